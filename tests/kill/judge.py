"""What must hold after a round, judged from the store, with as little of the package's own judgement as can be."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_gpu_burst.checkpoint import read_bytes, restore
from airflow_gpu_burst.runlog import RunLog
from airflow_gpu_burst.runlog.records import Close, Commit, Finish, Record, Retire, Start, decode
from airflow_gpu_burst.store import Store, StoreConfig
from airflow_gpu_burst.transfer import open_mover
from tests.kill.content import chain, differences, whole
from tests.kill.rounds import STEPS


@dataclass(frozen=True)
class Facts:
    """What a run left in the store."""

    config: StoreConfig
    store: Store
    prefix: str
    seed: int
    world_size: int

    def records(self) -> list[Record]:
        """The log, read without `History`, which would refuse what must be shown here."""
        keys = sorted(entry.key for entry in self.store.list(f"{self.prefix}/log/"))
        return [decode(self.store.get(key), seq) for seq, key in enumerate(keys, 1)]


def problems(facts: Facts) -> Iterator[str]:
    """Everything that is wrong; nothing: the run is as it must be."""
    records = facts.records()
    yield from one_epoch_at_a_time(records)
    yield from nothing_was_damaged(records)
    yield from checkpoints_restore(facts, records)
    yield from result_is_right(facts, records)


def one_epoch_at_a_time(records: list[Record]) -> Iterator[str]:
    """Whoever commits, retires or finishes is the newest epoch at that place, of a generation that is open."""
    newest: Start | None = None
    closed: set[int] = set()
    for record in records:
        if isinstance(record, Start):
            newest = record
        elif isinstance(record, Close):
            closed.add(record.generation)
        if isinstance(record, Commit | Retire | Finish):
            if newest is None or record.epoch != newest.seq or record.owner != newest.owner:
                yield f"record {record.seq} ({record.kind}) is of epoch {record.epoch}, the newest is {newest}"
            if record.generation in closed:
                yield f"record {record.seq} ({record.kind}) comes after its generation was closed"


def nothing_was_damaged(records: list[Record]) -> Iterator[str]:
    """No start had to leave out a checkpoint: the store loses nothing here, so that it would have been half written."""
    for record in records:
        if isinstance(record, Start) and record.damaged:
            yield f"record {record.seq} (start) found damaged: {record.damaged}"


def lineage_of(records: list[Record], commit: Commit) -> list[int]:
    """The epoch in which each step of a checkpoint was trained, as the log tells it."""
    start = records[commit.epoch - 1]
    assert isinstance(start, Start)
    before: list[int] = []
    if start.restore_from is not None:
        restored = records[start.restore_from - 1]
        assert isinstance(restored, Commit)
        before = lineage_of(records, restored)
    return before + [commit.epoch] * (commit.step - len(before))


def checkpoints_restore(facts: Facts, records: list[Record]) -> Iterator[str]:
    """Every commit that may be restored comes back bit for bit."""
    history = RunLog(facts.store, facts.prefix).read()
    restorable = history.restorable(history.generation)
    for commit in restorable:
        expected = whole(facts.seed, facts.world_size, lineage_of(records, commit))
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "restored"
            try:
                bring_back(facts, commit, target)
            except Exception as error:  # whatever it is, the checkpoint is not there
                yield f"commit {commit.seq} (step {commit.step}) cannot be restored: {type(error).__name__}: {error}"
                continue
            for difference in differences(target, expected):
                yield f"commit {commit.seq} (step {commit.step}): {difference}"


def bring_back(facts: Facts, commit: Commit, target: Path) -> None:
    """Restore a commit as rank 0 does."""
    mover = open_mover(facts.config)
    try:
        restore(mover, sorted(commit.manifests.items()), target)
    finally:
        mover.close()


def result_is_right(facts: Facts, records: list[Record]) -> Iterator[str]:
    """The run went on from exactly what its log says that it restored, every time, to the last step."""
    finishes = [record for record in records if isinstance(record, Finish)]
    if len(finishes) != 1:
        yield f"{len(finishes)} results"
        return
    finish = finishes[0]
    last = Commit(id="", generation=0, owner="", at="", epoch=finish.epoch, step=STEPS, manifests={})
    lineage = lineage_of(records, last)
    result = _result(facts.store, finish.result)
    if result != {"lineage": lineage, "state": chain(facts.seed, 0, lineage)}:
        yield f"the result is {result}, and the log says that it is trained in {lineage}"
    elif finish.result["step"] != STEPS:
        yield f"the last checkpoint is of step {finish.result['step']}, not {STEPS}"


def _result(store: Store, named: Mapping[str, Any]) -> Any:
    _key, data = read_bytes(store, named["result"]["key"], named["result"]["sha256"])
    return json.loads(data)
