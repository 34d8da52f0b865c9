"""The cap and the number of requests: over simulated time by property, over real time once."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.transfer.pace import Slots, TokenBucket

MIB = 1 << 20


class Time:
    """A clock that only sleeping moves, and only in steps; sleeps last longer than was asked for."""

    def __init__(self, late_s: float = 0.0, step_s: float = 0.0, seed: int = 0) -> None:
        self.now = 1000.0
        self._late_s, self._step_s = late_s, step_s
        self._random = random.Random(seed)

    def clock(self) -> float:
        return self.now - self.now % self._step_s if self._step_s else self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._random.uniform(0, self._late_s)


def run(bucket_of: Callable[[Callable[[float], None]], TokenBucket], time_: Time, takers: int, seconds: float,
        send: Callable[[int], float] = lambda n: 0.0) -> list[tuple[float, int]]:  # fmt: skip
    """
    `takers` threads that each take and send, one after the other as time goes on. When each slice went.

    :param send: how long the sending of so many bytes takes.
    """
    wake: list[float] = []
    bucket = bucket_of(lambda seconds: wake.append(seconds))
    began, sent = time_.now, []
    line = [(began, number) for number in range(takers)]
    while line and line[0][0] < began + seconds:
        at, taker = heapq.heappop(line)
        time_.now = at
        bucket.take(bucket.slice)
        while wake:
            time_.sleep(wake.pop())
        sent.append((time_.now, bucket.slice))
        heapq.heappush(line, (time_.now + send(bucket.slice), taker))
    return sorted(sent)


def most_in(sent: list[tuple[float, int]], window_s: float) -> int:
    """Bytes in the fullest window."""
    most = total = first = 0
    for at, n in sent:
        total += n
        while sent[first][0] <= at - window_s:
            total -= sent[first][1]
            first += 1
        most = max(most, total)
    return most


@settings(deadline=None, max_examples=60)
@given(
    rate=st.floats(1e3, 1.5e9),
    takers=st.integers(1, 8),
    late_s=st.floats(0, 0.005),
    step_s=st.sampled_from([0.0, 0.001, 0.004]),
    seed=st.integers(0, 1000),
)
def test_cap_holds_over_10_s_and_in_each_100_ms(
    rate: float, takers: int, late_s: float, step_s: float, seed: int
) -> None:
    time_ = Time(late_s, step_s, seed)
    sent = run(lambda sleep: TokenBucket(rate, clock=time_.clock, sleep=sleep), time_, takers, 10.0)
    assert sum(n for at, n in sent if at < 1010.0) == pytest.approx(10 * rate, rel=0.03)
    assert most_in(sent, 0.1) <= 1.2 * rate * 0.1


@settings(deadline=None, max_examples=30)
@given(rate=st.floats(1e6, 1.5e9), seed=st.integers(0, 1000), pause_s=st.floats(0.02, 0.06))
def test_what_a_busy_machine_holds_up_is_made_up_for_slowly(rate: float, seed: int, pause_s: float) -> None:
    """The thread stands still for 3 % of the time, which the 10 s do not show."""
    time_ = Time(0.002, seed=seed)
    last = [time_.now]

    def send(n: int) -> float:
        if time_.now - last[0] < pause_s * 33:
            return 0.0
        last[0] = time_.now
        return pause_s

    sent = run(lambda sleep: TokenBucket(rate, clock=time_.clock, sleep=sleep), time_, 1, 10.0, send)
    assert sum(n for at, n in sent if at < 1010.0) == pytest.approx(10 * rate, rel=0.01)
    assert most_in(sent, 0.1) <= 1.2 * rate * 0.1


def test_a_pause_gives_no_burst() -> None:
    time_ = Time()
    bucket = TokenBucket(1e6, clock=time_.clock, sleep=time_.sleep)
    time_.now += 3600
    began, taken = time_.now, 0
    while time_.now < began + 0.1:
        bucket.take(bucket.slice)
        taken += bucket.slice
    assert taken <= 1.2 * 1e5


def test_few_wakeups_whatever_the_cap() -> None:
    for rate in (1e5, 1e7, 1e9):
        slept: list[float] = []
        time_ = Time()

        def sleep(seconds: float, slept: list[float] = slept, time_: Time = time_) -> None:
            slept.append(seconds)
            time_.sleep(seconds)

        bucket = TokenBucket(rate, clock=time_.clock, sleep=sleep)
        while time_.now < 1010.0:
            bucket.take(bucket.slice)
        assert len(slept) <= 10 * 210


@pytest.mark.parametrize("n", [1, 999, 10_000_000])
def test_any_amount_takes_its_time(n: int) -> None:
    time_ = Time()
    bucket = TokenBucket(1e6, clock=time_.clock, sleep=time_.sleep)
    for _ in range(10):
        bucket.take(n)
    assert time_.now - 1000.0 == pytest.approx(10 * n / 1e6, abs=0.005 + n / 1e6 if n < 5000 else 0.01)


def test_no_cap_never_waits_and_asks_for_much_at_once() -> None:
    bucket = TokenBucket(None, sleep=lambda seconds: pytest.fail("slept"))
    bucket.take(1 << 40)
    assert bucket.slice == 8 * MIB


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_cap_that_lets_nothing_through_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="None for none"):
        TokenBucket(rate)


def test_in_real_time_by_several_threads() -> None:
    rate = 20e6
    bucket = TokenBucket(rate)
    sent: list[tuple[float, int]] = []
    began = time.monotonic()

    def taker() -> None:
        while time.monotonic() < began + 1.5:
            bucket.take(bucket.slice)
            sent.append((time.monotonic(), bucket.slice))

    cpu = time.process_time()
    threads = [threading.Thread(target=taker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.process_time() - cpu < 0.5  # nobody spins
    assert sum(n for at, n in sent if at < began + 1.5) == pytest.approx(1.5 * rate, rel=0.05)


class Server:
    """A simulated one: so many bytes per second together, and per connection; `Slots` is asked before each request."""

    def __init__(self, total: float, each: float, most: int = 16) -> None:
        self.time = Time()
        self.slots = Slots(most, clock=self.time.clock, sleep=self.time.sleep)
        self._total, self._each = total, each

    def work(self, requests: int, nbytes: int = 32 * MIB) -> int:
        """As many at once as allowed. The number allowed afterwards."""
        running: list[tuple[float, int]] = []
        held: dict[int, Iterator[None]] = {}
        for number in range(requests):
            while len(running) >= self.slots.allowed:
                self._finish(running, held, nbytes)
            place = self.slots.one()
            place.__enter__()
            held[number] = place  # type: ignore[assignment]
            speed = min(self._each, self._total / (len(running) + 1))
            heapq.heappush(running, (self.time.now + nbytes / speed, number))
        while running:
            self._finish(running, held, nbytes)
        return self.slots.allowed

    def _finish(self, running: list[tuple[float, int]], held: dict[int, Iterator[None]], nbytes: int) -> None:
        at, number = heapq.heappop(running)
        took = max(at - self.time.now, 1e-3)
        self.time.now = max(self.time.now, at)
        self.slots.went_well(nbytes, took)
        held.pop(number).__exit__(None, None, None)  # type: ignore[attr-defined]


class TestSlots:
    def test_begin_with_two_and_grow_while_it_helps(self) -> None:
        server = Server(total=1e12, each=1e8)
        assert server.slots.allowed == 2
        assert server.work(400) == 16

    def test_all_places_within_thirty_answers_where_each_helps(self) -> None:
        assert Server(total=1e12, each=1e8).work(30) == 16

    def test_stay_low_where_more_bring_nothing(self) -> None:
        assert Server(total=1e8, each=1e8).work(60) <= 4

    def test_no_more_than_asked_for(self) -> None:
        assert Server(total=1e12, each=1e8, most=1).work(50) == 1
        assert Server(total=1e12, each=1e8, most=3).work(100) == 3

    def test_halve_when_the_server_wants_less_and_grow_again(self) -> None:
        server = Server(total=1e12, each=1e8)
        server.work(400)
        server.slots.slow_down(None)
        assert server.slots.allowed == 8
        assert server.work(400) == 16

    def test_what_all_are_told_at_once_counts_once(self) -> None:
        slots = Server(total=1e12, each=1e8)
        slots.work(400)
        held = [slots.slots.one() for _ in range(16)]
        for place in held:
            place.__enter__()
        for place in held:
            slots.slots.slow_down(None)
            place.__exit__(None, None, None)
        assert slots.slots.allowed == 8
        with slots.slots.one():
            slots.slots.slow_down(None)
        assert slots.slots.allowed == 4

    def test_never_none(self) -> None:
        slots = Slots(4)
        for _ in range(10):
            with slots.one():
                slots.slow_down(None)
        assert slots.allowed == 1

    def test_retry_after_holds_for_all(self) -> None:
        time_ = Time()
        slots = Slots(4, clock=time_.clock, sleep=time_.sleep)
        with slots.one():
            slots.slow_down(30.0)
            slots.slow_down(5.0)  # a shorter one does not end it
        for _ in range(2):
            with slots.one():
                assert time_.now >= 1030.0

    def test_who_is_not_wanted_any_more_waits_no_longer(self) -> None:
        class Gone(Exception):
            pass

        def gone() -> None:
            raise Gone

        time_ = Time()
        slots = Slots(1, clock=time_.clock, sleep=time_.sleep)
        with slots.one(), pytest.raises(Gone), slots.one(gone):
            pass
        slots.slow_down(1000.0)
        with pytest.raises(Gone), slots.one(gone):
            pass
        assert time_.now < 1001.0

    @pytest.mark.parametrize("most", [1, 2, 5])
    def test_never_more_at_once_than_allowed(self, most: int) -> None:
        slots, lock, now, peak = Slots(most), threading.Lock(), [0], [0]

        def work() -> None:
            for _ in range(20):
                with slots.one():
                    with lock:
                        now[0] += 1
                        peak[0] = max(peak[0], now[0])
                    time.sleep(0.0005)
                    with lock:
                        now[0] -= 1
                    slots.went_well(1000, 0.0005)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 <= peak[0] <= most

    def test_none_at_all_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            Slots(0)
