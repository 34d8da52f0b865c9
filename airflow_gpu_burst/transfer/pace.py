"""How fast, and how much at once: a cap in bytes per second, and a number of requests that grows from few."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_gpu_burst.transfer.interface import MIB

_SLICE_S = 0.005
"""
Seconds that one slice stands for: 200 wake-ups per second, whatever the cap. What any 100 ms may hold adds up to
1.05 x (100 ms + 8 ms) + 5 ms = 118 ms of the cap; 120 are allowed.
"""
_LATE_S = 0.008  # lateness that is caught up at once
_LOST_MOST_S = 0.15  # lateness beyond it that is made up for little by little: 1.5 % of 10 s
_FASTER = 1.05
_FREE_SLICE = 8 * MIB

_TICK_S = 0.25  # how soon a waiting thread hears that it is not wanted any more
_GROWN = 1.03  # more throughput than before by so much: one more connection helps
_PATIENCE = 8  # rounds without growth before one more is tried all the same: the first may have been a bad moment
_PER_REQUEST = 64 << 10  # bytes that a request without any counts for


class TokenBucket:
    """
    Bytes per second, shared by all threads of a mover.

    Each slice has its time; who comes early sleeps until then, who comes late (up to 8 ms) goes at once. So sleeps that
    take longer than asked for do not add up, and no thread ever spins. Holds within 3 % over 10 s, and no 100 ms see
    more than 1.2 times the cap, as long as sleeps are late by at most 9 ms.

    :param rate: bytes per second; None: free.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if rate is not None and not rate > 0:
            raise ValueError(f"a cap of {rate} bytes/s lets nothing through; give more than 0, or None for none")
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self.slice = _FREE_SLICE if rate is None else max(1, min(_FREE_SLICE, int(rate * _SLICE_S)))
        """Bytes to ask for at a time: more at once would break the promise about 100 ms."""
        self._lock = threading.Lock()
        self._due = clock()  # when the next slice may go
        self._lost = 0.0  # seconds in which nothing was sent though something could have been

    def take(self, n: int) -> None:
        """Wait until `n` bytes may go."""
        if self._rate is None or n <= 0:
            return
        with self._lock:
            now = self._clock()
            if self._due < now - _LATE_S:
                self._lost = min(self._lost + now - _LATE_S - self._due, _LOST_MOST_S)
                self._due = now - _LATE_S
            span = n / self._rate
            repaid = min(self._lost, span * (1 - 1 / _FASTER))
            self._lost -= repaid
            # More than a slice goes when the last of it may.
            at = self._due + max(0, n - self.slice) / self._rate
            self._due += span - repaid
        if at > now:
            self._sleep(at - now)


class Slots:
    """
    How many requests may be under way: two at first, twice as many while that brings more bytes per second, later one
    more at a time, half as many when the server wants less. As TCP does it.

    :param most: never more than so many.
    """

    def __init__(
        self,
        most: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if most < 1:
            raise ValueError(f"{most} connections move nothing; give at least 1")
        self._most, self._clock, self._sleep = most, clock, sleep
        self._changed = threading.Condition()
        self.allowed = min(2, most)
        """How many, at present."""
        self._slow_start = True
        self._busy = 0
        self._not_before = float("-inf")
        self._old = 0  # requests under way that began before the last halving: they say nothing about the new number
        self._full = False  # whether there were requests for all places in this round
        self._begin_round(0.0)

    @contextmanager
    def one(self, wanted: Callable[[], None] = lambda: None) -> Iterator[None]:
        """
        A place, for as long as the request takes.

        :param wanted: called while waiting, every 250 ms; may raise to give up.
        """
        self._enter(wanted)
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._old = max(0, self._old - 1)
                self._changed.notify()

    def went_well(self, nbytes: int, seconds: float) -> None:
        """
        A request was answered.

        :param nbytes: that it moved.
        :param seconds: that it took.
        """
        with self._changed:
            if self._old:
                return
            if not self._done:
                self._began = self._clock() - seconds
            self._done += 1
            self._moved += nbytes + _PER_REQUEST
            self._full = self._full or self._busy >= self.allowed
            if self._done >= 2 * self.allowed:
                self._end_round()

    def slow_down(self, retry_after_s: float | None) -> None:
        """
        The server wants less. What several requests under way are told at once counts once.

        :param retry_after_s: nobody asks again before; None: the server did not say.
        """
        with self._changed:
            if retry_after_s:
                self._not_before = max(self._not_before, self._clock() + retry_after_s)
            if not self._old:
                self.allowed, self._slow_start = max(1, self.allowed // 2), False
                self._old = self._busy
                self._begin_round(0.0)

    def _enter(self, wanted: Callable[[], None]) -> None:
        while True:
            with self._changed:
                pause = self._not_before - self._clock()
                if pause <= 0:
                    if self._busy < self.allowed:
                        self._busy += 1
                        return
                    self._changed.wait(_TICK_S)
            if pause > 0:
                self._sleep(min(pause, _TICK_S))
            wanted()

    def _begin_round(self, before: float, patience: int = _PATIENCE) -> None:
        self._before, self._patience = before, patience
        self._done, self._moved, self._began, self._full = 0, 0, 0.0, False

    def _end_round(self) -> None:
        """Two answers for each place: more places if the last ones helped, or if it is time to try again."""
        rate = self._moved / max(self._clock() - self._began, 1e-6)
        if not self._full or self.allowed == self._most:
            self._begin_round(max(rate, self._before))
        elif rate > self._before * _GROWN or self._patience == 0:
            more = self.allowed if self._slow_start else 1
            self.allowed = min(self._most, self.allowed + more)
            self._changed.notify_all()
            self._begin_round(rate)
        else:
            self._slow_start = False
            self._begin_round(self._before, self._patience - 1)
