"""When rank 0 commits a checkpoint of several ranks, and when it gives one up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import Manifest
from airflow_gpu_burst.errors import CheckpointError, StoreUnavailable
from airflow_gpu_burst.runtime.assembly import STRANDED, STRANDED_S, Assembly, Fate, Waiting, fates

C, D, W = Fate.COMMIT, Fate.DROP, Fate.WAIT


@pytest.mark.parametrize(
    ("whole", "last", "expected"),
    [
        ([], False, []),
        ([False], False, [W]),
        ([False], True, [D]),
        ([True, True], False, [C, C]),
        ([False, True], False, [D, C]),
        ([True, False], False, [C, W]),
        ([False, True, False, True, False], False, [D, C, D, C, W]),
        ([False, True, False], True, [D, C, D]),
    ],
)
def test_fates(whole: list[bool], last: bool, expected: list[Fate]) -> None:
    assert fates(whole, last=last) == expected


def test_what_is_whole_is_always_committed_and_nothing_waits_before_it() -> None:
    for size in range(7):
        for whole in itertools.product([False, True], repeat=size):
            decided = fates(whole, last=False)
            assert [fate is C for fate in decided] == list(whole)
            newest = max((i for i, is_whole in enumerate(whole) if is_whole), default=-1)
            assert W not in decided[: max(newest, 0)] and D not in decided[newest + 1 :]


def part(rank: int) -> Manifest:
    return Manifest(key=f"{rank}/manifest.json", sha256="0" * 64, files=1, size=1)


class Parts:
    """The records of the other ranks, and the order in which they are asked for."""

    def __init__(self) -> None:
        self.there: set[tuple[int, int]] = set()
        self.asked: list[int] = []
        self.down = False

    def part(self, rank: int, step: int, count: int) -> Manifest | None:
        if self.down:
            raise StoreUnavailable("503")
        self.asked.append(step)
        return part(rank) if (rank, step) in self.there else None


class Bench:
    def __init__(self, ranks: Sequence[int] = (0, 1)) -> None:
        self.parts, self.ranks = Parts(), ranks
        self.committed: list[int] = []
        self.dropped: list[int] = []
        self.said: list[str] = []
        self.assembly = Assembly(
            self.parts,  # type: ignore[arg-type]
            commit=lambda waiting: self.committed.append(waiting.step),
            discard=lambda waiting: self.dropped.append(waiting.step),
            say=self.said.append,
        )

    def add(self, step: int, **values: float) -> None:
        self.assembly.add(
            Waiting(step=step, count=1, ranks=self.ranks, parts={0: part(0)}, metrics={}, **values)  # type: ignore[arg-type]
        )


def test_in_the_order_of_readiness_not_of_steps() -> None:
    bench = Bench()
    for step in (5, 3, 9):
        bench.add(step)
    bench.parts.there = {(1, 5), (1, 3)}
    bench.assembly.settle()
    assert (bench.committed, bench.dropped) == ([5, 3], [])
    bench.assembly.settle(last=True)
    assert bench.dropped == [9] and "never" not in bench.said[0] and 'ready(9, ranks="self")' in bench.said[0]
    assert bench.assembly.empty


def test_the_newest_is_looked_at_first() -> None:
    """Otherwise a part that comes between two looks would make an earlier checkpoint look abandoned."""
    bench = Bench()
    for step in (1, 2, 3):
        bench.add(step)
    bench.assembly.settle()
    assert bench.parts.asked == [3, 2, 1]


def test_a_store_that_is_down_decides_nothing() -> None:
    bench = Bench()
    bench.add(1)
    bench.parts.down = True
    bench.assembly.settle()
    assert not bench.assembly.empty and not bench.said
    with pytest.raises(StoreUnavailable):
        bench.assembly.settle(last=True)


def test_a_rank_that_never_saves_stops_the_run_before_days_are_lost() -> None:
    bench = Bench()
    for step in range(STRANDED):
        bench.add(step, since=-2 * STRANDED_S)
    with pytest.raises(CheckpointError, match=r"ranks \[1\].*ranks=\"self\""):
        bench.assembly.settle()


def test_a_rank_that_is_only_slow_does_not() -> None:
    bench = Bench()
    bench.add(0)
    bench.parts.there = {(1, 0)}
    bench.assembly.settle()
    for step in range(1, STRANDED + 2):
        bench.add(step, since=-2 * STRANDED_S)
    bench.assembly.settle()
    assert not bench.assembly.empty and len(bench.said) == 1


def test_alone_waits_for_nobody(tmp_path: Path) -> None:
    bench = Bench(ranks=(0,))
    bench.add(1)
    bench.assembly.settle()
    assert bench.committed == [1] and bench.parts.asked == []
