"""What the pod's log says of a transfer, and how often."""

from __future__ import annotations

import pytest

from airflow_gpu_burst.runtime.telling import EVERY_S, FIRST_S, Telling, moved, progress_line, size_text
from airflow_gpu_burst.runtime.totals import Totals


@pytest.mark.parametrize(
    ("done", "total", "rate", "line"),
    [
        (3_100_000_000, 12_000_000_000, 1.2e9, "3.1 of 12.0 GB, 1.2 GB/s, 7 s left"),
        (0, 12_000_000_000, 0, "0.0 of 12.0 GB, 0 bytes/s, nothing moves"),
        (500_000, 2_000_000, 1000, "0.5 of 2.0 MB, 1.0 kB/s, 1500 s left"),
        (5, 5, 1, "0.0 of 0.0 MB, 1 bytes/s, 0 s left"),
        (6, 5, 1, "0.0 of 0.0 MB, 1 bytes/s, 0 s left"),
    ],
)
def test_a_line_of_progress(done: int, total: int, rate: float, line: str) -> None:
    assert progress_line(done, total, rate) == line


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1e3, "1.0 kB"), (2.5e9, "2.5 GB"), (4e12, "4.0 TB")]
)
def test_sizes_in_words(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_transfer_that_took_no_time_has_a_rate() -> None:
    assert moved(10, 0.0).startswith("10 bytes in 0.0 s, ")


def test_the_first_line_after_ten_seconds_then_every_thirty() -> None:
    now, said = [0.0], []
    telling = Telling("checkpoint 7", said.append, clock=lambda: now[0])
    times = []
    for half_seconds in range(1, 200):
        now[0] = half_seconds / 2
        telling.progress(half_seconds * 10**8, 10**11)
        if len(said) > len(times):
            times.append(now[0])
    assert times == [FIRST_S, FIRST_S + EVERY_S, FIRST_S + 2 * EVERY_S]
    assert said[0] == "checkpoint 7: 2.0 of 100.0 GB, 200.0 MB/s, 490 s left"


def test_it_knows_when_something_last_moved() -> None:
    now: list[float] = [0.0]
    telling = Telling("x", lambda line: None, clock=lambda: now[0])
    for at, done in ((1.0, 5), (2.0, 5), (3.0, 6), (9.0, 6)):
        now[0] = at
        telling.progress(done, 10)
    assert (telling.moved_at, telling.seconds) == (3.0, 9.0)


def test_a_run_without_checkpoints_has_no_numbers() -> None:
    assert Totals().to_dict({}, 0) is None


def test_the_numbers_of_a_run() -> None:
    totals = Totals(committed=2, bytes=40, saved_bytes=20, seconds=4.0, stalls=[0.25, 0.5])
    found = totals.to_dict({"retries": 3, "requests": 9}, 1)
    assert found is not None
    assert (found["rate"], found["stall_s"], found["stall_max_s"]) == (5, 0.75, 0.5)
    assert (found["retries"], found["throttled"], found["restarts"]) == (3, 0, 1) and "requests" not in found
