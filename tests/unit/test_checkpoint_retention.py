"""Which commits stay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint.retention import staying
from airflow_gpu_burst.runlog import Commit
from airflow_gpu_burst.spec import Checkpointing


def commit(seq: int, step: int, **metrics: Any) -> Commit:
    return Commit(
        seq=seq, id="x", generation=1, owner="o", at="", epoch=2, step=step, manifests={"k": "s"}, metrics=metrics
    )


LOSSES = [commit(3, 10, loss=0.5), commit(4, 20, loss=0.1), commit(5, 30, loss=0.3), commit(6, 40), commit(7, 50)]


@pytest.mark.parametrize(
    ("policy", "commits", "stay"),
    [
        ({}, LOSSES, {6, 7}),
        ({"keep": 3}, LOSSES, {5, 6, 7}),
        ({"keep": 9}, LOSSES, {3, 4, 5, 6, 7}),
        ({}, [], set()),
        ({}, LOSSES[:1], {3}),
        ({"keep_every": 20}, LOSSES, {4, 6, 7}),
        ({"keep_every": 1}, LOSSES, {3, 4, 5, 6, 7}),
        # the step before a fall back and the same one after it: training went on from the later one
        ({"keep_every": 10}, [commit(3, 10), commit(4, 15), commit(5, 10), commit(6, 12), commit(7, 13)], {5, 6, 7}),
        # by sequence, never by step: a step back makes a new lineage
        ({}, [commit(3, 500), commit(4, 10), commit(5, 20)], {4, 5}),
        ({"best": "loss"}, LOSSES, {4, 6, 7}),
        ({"best": "loss", "best_mode": "max"}, LOSSES, {3, 6, 7}),
        ({"best": "loss", "keep_best": 2}, LOSSES, {4, 5, 6, 7}),
        ({"best": "loss", "keep_best": 9}, LOSSES, {3, 4, 5, 6, 7}),
        ({"best": "accuracy"}, LOSSES, {6, 7}),
        # of equals the later one
        ({"best": "loss"}, [commit(3, 1, loss=1), commit(4, 2, loss=1), commit(5, 3), commit(6, 4)], {4, 5, 6}),
        ({}, [commit(3, 1, pinned=True), *LOSSES[1:]], {3, 6, 7}),
        # only what `ready(pin=True)` writes pins
        ({}, [commit(3, 1, pinned="yes"), commit(4, 2, pinned=1), *LOSSES[2:]], {6, 7}),
    ],
)
def test_what_stays(policy: dict[str, Any], commits: list[Commit], stay: set[int]) -> None:
    assert staying(commits, Checkpointing(**policy)) == stay


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "nan", "-inf", "0.1", None, True])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_no_finite_number_is_never_the_best(value: Any, mode: Any) -> None:
    commits = [commit(3, 1, loss=0.5), commit(4, 2, loss=value), commit(5, 3), commit(6, 4)]
    assert staying(commits, Checkpointing(best="loss", best_mode=mode)) == {3, 5, 6}


def test_a_damaged_commit_does_not_count_among_the_last_or_the_best() -> None:
    policy = Checkpointing(best="loss", keep_every=20)
    assert staying(LOSSES, policy, damaged={7, 4}) == {5, 6}


METRICS = st.fixed_dictionaries({}, optional={"loss": st.floats(), "pinned": st.just(True)})
COMMITS = st.lists(st.tuples(st.integers(0, 50), METRICS), max_size=12).map(
    lambda found: [commit(seq, step, **metrics) for seq, (step, metrics) in enumerate(found, 3)]
)
POLICIES = st.builds(
    Checkpointing,
    keep=st.integers(2, 5),
    keep_every=st.none() | st.integers(1, 20),
    best=st.sampled_from(["", "loss"]),
    best_mode=st.sampled_from(["min", "max"]),
    keep_best=st.integers(1, 3),
)


@given(COMMITS, POLICIES, st.data())
def test_the_last_two_what_is_restored_and_what_is_pinned_always_stay(
    commits: list[Commit], policy: Checkpointing, data: st.DataObject
) -> None:
    seqs = [c.seq for c in commits]
    damaged = data.draw(st.sets(st.sampled_from(seqs))) if seqs else set()
    restored = data.draw(st.none() | st.sampled_from(seqs)) if seqs else None
    stay = staying(commits, policy, damaged=damaged, restore_from=restored)
    assert stay <= set(seqs)
    assert set([seq for seq in seqs if seq not in damaged][-2:]) <= stay
    assert restored is None or restored in stay
    assert {c.seq for c in commits if "pinned" in c.metrics} <= stay
    bounded = policy.keep + (policy.keep_best if policy.best else 0) + 1 + sum("pinned" in c.metrics for c in commits)
    if policy.keep_every is None:
        assert len(stay) <= bounded


@given(COMMITS, POLICIES, st.data())
def test_what_is_let_go_is_never_wanted_back(commits: list[Commit], policy: Checkpointing, data: st.DataObject) -> None:
    """Retiring now and retiring later must not contradict each other: a later commit makes no earlier one stay."""
    cut = data.draw(st.integers(0, len(commits)))
    early = staying(commits[:cut], policy)
    assert staying(commits, policy) <= early | {c.seq for c in commits[cut:]}
