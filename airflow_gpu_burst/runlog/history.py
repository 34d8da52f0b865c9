"""
What a run log says, and what may be appended to it: every precondition of the protocol, in one place.

Pure. A record at place n was judged by its writer against exactly the records 1 to n-1 (a slot is taken
once), so whoever reads it can judge it again: a log that holds a record which was not permitted is
refused, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from airflow_gpu_burst.errors import ExitCode, Fenced, RunLogError
from airflow_gpu_burst.runlog.records import (
    VERDICTS,
    Close,
    Commit,
    Finish,
    Open,
    Record,
    Retire,
    Seat,
    Start,
)

KEEP_AT_LEAST = 2
"""Commits that stay restorable, so that a damaged newest one has a predecessor."""


class Finished(RunLogError):
    """The generation has its result already: there is nothing left to do, and nothing is wrong."""

    exit_code = ExitCode.OK

    def __init__(self, finish: Finish) -> None:
        super().__init__(f"generation {finish.generation} has its result since record {finish.seq}; collect it")
        self.finish = finish


@dataclass(frozen=True)
class History:
    """
    The records so far, and what follows from them. Grows by `then`; never changes.

    :param live: commits that are not retired, of all generations.
    :param damaged: commits that some start has reported damaged.
    """

    records: tuple[Record, ...] = ()
    opens: Mapping[int, Open] = field(default_factory=dict)
    closes: Mapping[int, Close] = field(default_factory=dict)
    finishes: Mapping[int, Finish] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()
    commits: tuple[Commit, ...] = ()
    live: tuple[Commit, ...] = ()
    retired: frozenset[int] = frozenset()
    damaged: frozenset[int] = frozenset()

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """From records in the order of the log."""
        history = cls()
        for record in records:
            history = history.then(record)
        return history

    def then(self, record: Record) -> Self:
        """With one more record, as read. Raises RunLogError if the protocol cannot have written it."""
        if record.seq != self.tail + 1:
            raise RunLogError(f"record {record.seq} cannot follow record {self.tail}")
        try:
            self.permit(record)
        except RunLogError as error:
            raise RunLogError(
                f"the run log holds a {record.kind!r} at {record.seq} that was not permitted there ({error}). "
                "Something else than this release writes to it, or the store does not honour conditions; "
                "run `gpu-burst doctor` against the store"
            ) from error
        return self._with(record)

    @property
    def tail(self) -> int:
        """Place of the last record; 0 if there is none."""
        return len(self.records)

    @property
    def generation(self) -> int:
        """The one opened last; 0 if there is none."""
        return len(self.opens)

    def last_start(self, generation: int) -> Start | None:
        """The newest epoch of a generation, whoever owns it."""
        for start in reversed(self.starts):
            if start.generation == generation:
                return start
        return None

    def commit(self, seq: int) -> Commit:
        """The commit at a place."""
        record = self.records[seq - 1] if 0 < seq <= self.tail else None
        if not isinstance(record, Commit):
            raise RunLogError(f"record {seq} is no commit")
        return record

    def restorable(self, generation: int) -> tuple[Commit, ...]:
        """Commits that a generation may restore and that are not retired, in the order of the log."""
        since = self.opens[generation].restore_since
        return tuple(commit for commit in self.live if since <= commit.generation <= generation)

    def newest_checkpoint(self, generation: int, without: Collection[int] = ()) -> Commit | None:
        """
        What a start of `generation` restores: the last commit by sequence, damaged ones left out.

        Never by step, name or time: after damage and a step back, the abandoned higher step must not win.
        """
        for commit in reversed(self.restorable(generation)):
            if commit.seq not in self.damaged and commit.seq not in without:
                return commit
        return None

    def superseded(self, generation: int, owner: str, seat: Seat) -> str:
        """
        Why this owner, pod or boot may never start again, or empty.

        Without it a ghost and its successor would fence each other for ever. Who was never named is not
        superseded: the late first start of a ghost can still take over, once.
        """
        starts = [start for start in self.starts if start.generation == generation]
        mine = [start for start in starts if start.owner == owner]
        if not mine:
            return ""
        last = starts[-1]
        if last.owner != owner:
            return f"owner {owner} was superseded by {last.owner} at record {last.seq}"
        named = {member for start in mine for member in start.members}
        pod = seat[0]
        if seat in named and seat not in last.members:
            return f"boot {seat[1]} of pod {pod} was superseded at record {last.seq}"
        if pod in {uid for uid, _ in named} and pod not in {uid for uid, _ in last.members}:
            return f"pod {pod} was superseded at record {last.seq}"
        return ""

    def check_alive(self, generation: int) -> None:
        """Raise Fenced unless `generation` is the last one and still open."""
        if generation not in self.opens:
            raise RunLogError(f"generation {generation} was never opened: the Airflow side opens it first")
        if generation in self.closes:
            close = self.closes[generation]
            raise Fenced(f"generation {generation} was closed at record {close.seq}: {close.verdict}")

    def check_may_start(self, generation: int, owner: str, seat: Seat) -> None:
        """Raise Fenced or Finished unless this boot of this pod may still take part in a new epoch."""
        self.check_alive(generation)
        if generation in self.finishes:
            raise Finished(self.finishes[generation])
        if reason := self.superseded(generation, owner, seat):
            raise Fenced(reason)

    def check_epoch(self, epoch: int, generation: int) -> Start:
        """Raise Fenced unless `epoch` is the newest start of the open generation; else its record."""
        self.check_alive(generation)
        last = self.last_start(generation)
        if last is None or last.seq != epoch:
            newer = f"epoch {last.seq} of owner {last.owner}" if last else "nothing"
            raise Fenced(f"epoch {epoch} was superseded by {newer}")
        return last

    def permit(self, record: Record) -> None:
        """Raise Fenced, Finished or RunLogError unless `record` may be appended here."""
        if isinstance(record, Open):
            self._permit_open(record)
        elif isinstance(record, Start):
            self._permit_start(record)
        elif isinstance(record, Close):
            self._permit_close(record)
        else:
            start = self.check_epoch(record.epoch, record.generation)
            if record.owner != start.owner:
                raise RunLogError(f"{record.owner} writes in epoch {start.seq}, which {start.owner} owns")
            if record.generation in self.finishes:
                raise Finished(self.finishes[record.generation])
            if isinstance(record, Retire):
                self._permit_retire(record, start)

    def _permit_open(self, record: Open) -> None:
        last = self.generation
        if record.generation != last + 1:
            raise Fenced(f"generation {record.generation} cannot follow {last}")
        if last and last not in self.closes:
            raise RunLogError(f"generation {last} is still open: close it first")
        if not 1 <= record.restore_since <= record.generation:
            raise RunLogError(f"restore_since={record.restore_since}: use 1 to {record.generation}")

    def _permit_start(self, record: Start) -> None:
        if len(set(record.members)) != record.world_size or record.world_size != len(record.members):
            raise RunLogError(f"{len(set(record.members))} members for a world of {record.world_size}")
        for seat in record.members:
            self.check_may_start(record.generation, record.owner, seat)
        if not set(record.damaged) <= {commit.seq for commit in self.commits}:
            raise RunLogError(f"damaged={record.damaged} names what is no commit")
        newest = self.newest_checkpoint(record.generation, record.damaged)
        if record.restore_from is not None and (newest is None or record.restore_from != newest.seq):
            raise RunLogError(f"restore_from={record.restore_from}, but the newest checkpoint is {newest}")

    def _permit_retire(self, record: Retire, start: Start) -> None:
        restorable = self.restorable(record.generation)
        sound = [commit.seq for commit in restorable if commit.seq not in self.damaged]
        going = set(record.seqs)
        if not going or not going <= {commit.seq for commit in restorable}:
            raise RunLogError(f"retire {record.seqs}: not all are restorable commits")
        if going & set(sound[-KEEP_AT_LEAST:]) or start.restore_from in going:
            raise RunLogError(
                f"retire {record.seqs}: the last {KEEP_AT_LEAST} commits and what epoch {start.seq} restores stay"
            )

    def _permit_close(self, record: Close) -> None:
        self.check_alive(record.generation)
        if record.verdict not in VERDICTS:
            raise RunLogError(f"verdict {record.verdict!r}: use one of {', '.join(VERDICTS)}")
        if (record.verdict == "succeeded") != (record.generation in self.finishes):
            raise RunLogError(
                f"verdict {record.verdict!r} for generation {record.generation}, which has "
                f"{'a' if record.generation in self.finishes else 'no'} result: a result and success go together"
            )

    def _with(self, record: Record) -> Self:
        grown = replace(self, records=(*self.records, record))
        generation = record.generation
        match record:
            case Open():
                return replace(grown, opens={**self.opens, generation: record})
            case Close():
                return replace(grown, closes={**self.closes, generation: record})
            case Finish():
                return replace(grown, finishes={**self.finishes, generation: record})
            case Start():
                return replace(grown, starts=(*self.starts, record), damaged=self.damaged | frozenset(record.damaged))
            case Commit():
                return replace(grown, commits=(*self.commits, record), live=(*self.live, record))
            case Retire():
                live = tuple(commit for commit in self.live if commit.seq not in record.seqs)
                return replace(grown, live=live, retired=self.retired | frozenset(record.seqs))
