"""What all connections of one mover share: the cap, the counts, and the order to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from airflow_gpu_burst.transfer.interface import Tally

Halted = Callable[[], bool]
"""Whether a request is not wanted any more."""


class Stopped(Exception):
    """The request was given up because nobody wants its result: the mover is closed, or another part has failed."""


def never() -> bool:
    """Nothing halts it."""
    return False


class Bucket(Protocol):
    """Bytes that may go now: see `pace.TokenBucket`."""

    slice: int

    def take(self, n: int) -> None:
        """Wait until `n` bytes may go."""
        ...


class Flow:
    """
    :param bucket: the cap.
    :param tally: what is counted here.
    """

    def __init__(self, bucket: Bucket, tally: Tally) -> None:
        self._bucket, self.tally = bucket, tally
        self._lock = threading.Lock()
        self.closed = threading.Event()

    @property
    def slice(self) -> int:
        """Bytes to ask for at a time."""
        return self._bucket.slice

    def take(self, n: int) -> None:
        """Wait until `n` bytes may go."""
        self._bucket.take(n)

    def count(self, **amounts: int) -> None:
        """Add to fields of the tally."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.tally, name, getattr(self.tally, name) + amount)

    def check(self, halted: Halted) -> None:
        """
        :raises Stopped: go no further.
        """
        if self.closed.is_set() or halted():
            raise Stopped

    def pause(self, seconds: float, halted: Halted) -> None:
        """Sleep, but not longer than the result is wanted."""
        while seconds > 0:
            self.check(halted)
            self.closed.wait(min(seconds, 0.25))
            seconds -= 0.25
        self.check(halted)
