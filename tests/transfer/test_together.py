"""Threads of one transfer: none is left when it is over."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_gpu_burst.transfer.flow import Halted, Stopped
from airflow_gpu_burst.transfer.together import all_of


def test_all_is_done() -> None:
    done: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        all_of(pool, range(10), lambda number, halted: done.append(number))
        all_of(pool, [10], lambda number, halted: done.append(number))
        all_of(pool, [], lambda number, halted: done.append(number))
    assert sorted(done) == list(range(11))


def test_the_first_error_stops_the_others_and_waits_for_them() -> None:
    running, begun = [0], [0]

    def do(number: int, halted: Halted) -> None:
        begun[0] += 1
        if number == 2:
            raise KeyError(number)
        running[0] += 1
        while not halted():
            time.sleep(0.01)
        time.sleep(0.1)
        running[0] -= 1
        raise Stopped

    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(KeyError):
            all_of(pool, range(10), do)
        assert running == [0]
        assert begun[0] <= 4  # those that had not begun never do
