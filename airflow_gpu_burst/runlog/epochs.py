"""The pod's side: coming together for an epoch, and everything that may be written in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from airflow_gpu_burst.errors import Renamed, RunLogError
from airflow_gpu_burst.runlog.gathering import Gathering, gather, seated
from airflow_gpu_burst.runlog.history import KEEP_AT_LEAST, History
from airflow_gpu_burst.runlog.joins import Join, Member
from airflow_gpu_burst.runlog.log import RunLog
from airflow_gpu_burst.runlog.records import Commit, Finish, Retire


def begin(
    log: RunLog,
    *,
    generation: int,
    member: Member,
    world_size: int,
    deadline_s: float,
    restore: bool = True,
    poll_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Epoch:
    """
    Wait until all ranks are there, and return the epoch that names them.

    Rank 0 writes its start, the others wait for it. Raises Fenced when superseded, `Finished` when the
    generation has its result already (exit with 0), `NotStarted` after `deadline_s`.

    :param restore: False: this run keeps no checkpoints.
    """
    if not 0 <= member.rank < world_size:
        raise RunLogError(f"rank {member.rank} in a world of {world_size}: ranks count from 0")
    plan = Gathering(
        log=log,
        generation=generation,
        member=member,
        world_size=world_size,
        deadline_s=deadline_s,
        restore=restore,
        poll_s=poll_s,
        clock=clock,
        sleep=sleep,
    )
    return Epoch(plan, Join(seat=member.seat))


class Epoch:
    """
    One start of the trainer on all ranks, seen from one rank. Made by `begin`.

    Every method raises Fenced once a newer epoch or generation has taken over (exit with 8, restart
    nothing), and `Renamed` once a newer epoch names this rank (stop the trainer, call `restart`).
    Only rank 0 may commit, retire and finish. After StoreUnavailable any method may be called again
    with the same arguments: what was written already is recognised.
    """

    def __init__(self, plan: Gathering, join: Join) -> None:
        self._plan = plan
        self._start = gather(plan, join)
        self._join = join
        self._log = plan.log
        self._handed_out: set[int] = set()

    @property
    def number(self) -> int:
        """The place of its start in the log: rises with every epoch of the run key."""
        return self._start.seq

    @property
    def generation(self) -> int:
        """The generation that it belongs to."""
        return self._start.generation

    @property
    def restore_from(self) -> Commit | None:
        """The commit that every rank restores before it trains."""
        seq = self._start.restore_from
        return None if seq is None else self._log.known.commit(seq)

    @property
    def data_prefix(self) -> str:
        """Where this rank writes its files, each once: no other writer, of any epoch, has the same."""
        return self.data_prefix_of(self._plan.member.rank)

    def data_prefix_of(self, rank: int) -> str:
        """Where another rank of this epoch writes its files."""
        _pod, nonce = self._start.members[rank]
        return f"{self._log.prefix}/data/{self.number:012d}/{rank:05d}-{nonce}"

    def check(self) -> None:
        """
        Look whether this epoch still holds. To be called every few seconds while the trainer runs.

        Rank 0 also looks whether a rank has registered anew, which calls for a new epoch.
        """
        history = self._log.read()
        self._check_holds(history)
        if self._plan.member.rank == 0 and self._plan.generation not in history.finishes:
            self._check_joins(history)

    def commit(self, step: int, manifests: Mapping[str, str], metrics: Mapping[str, Any] | None = None) -> int:
        """
        Make the checkpoint of `step` exist, after all its data is in the store. Returns its place.

        :param manifests: key → SHA-256; all below the data prefixes of this epoch's ranks.
        """
        self._only_rank_0("commit")
        allowed = tuple(f"{self.data_prefix_of(rank)}/" for rank in range(self._start.world_size))
        foreign = [key for key in manifests if not key.startswith(allowed)]
        if foreign or not manifests:
            raise RunLogError(
                f"commit of step {step}: {foreign or 'no manifest'}; write everything below `Epoch.data_prefix`"
            )

        def build(history: History) -> Commit:
            self._check_holds(history)
            last = history.commits[-1] if history.commits else None
            if last and (last.epoch, last.step, last.manifests) == (self.number, step, dict(manifests)):
                return last
            return Commit(
                **self._log.stamp(),
                generation=self._plan.generation,
                owner=self._plan.member.owner,
                epoch=self.number,
                step=step,
                manifests=dict(manifests),
                metrics=dict(metrics or {}),
            )

        return self._log.append(build).seq

    def retire(self, keep: int = KEEP_AT_LEAST, extra_protected: Collection[int] = ()) -> tuple[Commit, ...]:
        """
        Retire all but the newest `keep` commits, and return those whose data may be deleted now.

        What this epoch restores stays, and `extra_protected` (places of commits). The answer includes
        commits that earlier epochs retired, once: they may have died before they deleted.
        """
        self._only_rank_0("retire")
        if keep < KEEP_AT_LEAST:
            raise RunLogError(f"retire keep={keep}: keep at least {KEEP_AT_LEAST}")
        protected = {*extra_protected, self._start.restore_from}

        def build(history: History) -> Retire:
            self._check_holds(history)
            restorable = history.restorable(self._plan.generation)
            sound = [commit.seq for commit in restorable if commit.seq not in history.damaged]
            staying = protected | set(sound[-keep:])
            going = tuple(commit.seq for commit in restorable if commit.seq not in staying)
            if not going:
                raise _NothingToRetire
            return Retire(
                **self._log.stamp(),
                generation=self._plan.generation,
                owner=self._plan.member.owner,
                epoch=self.number,
                seqs=going,
            )

        with suppress(_NothingToRetire):
            self._log.append(build)
        history = self._log.known
        gone = [c for c in history.commits if c.seq in history.retired and c.seq not in self._handed_out]
        self._handed_out.update(commit.seq for commit in gone)
        return tuple(gone)

    def finish(self, result: Mapping[str, Any], model: tuple[str, str] | None = None) -> Finish:
        """
        Give the generation its one result.

        :param result: JSON-safe and small; what it names must be in the store already.
        :param model: (key, SHA-256) of the manifest of the model to publish.
        """
        self._only_rank_0("finish")

        def build(history: History) -> Finish:
            self._check_holds(history)
            there = history.finishes.get(self._plan.generation)
            if there is not None:  # by this epoch, since it holds
                return there
            return Finish(
                **self._log.stamp(),
                generation=self._plan.generation,
                owner=self._plan.member.owner,
                epoch=self.number,
                result=dict(result),
                model=model,
            )

        return self._log.append(build)

    def restart(self) -> Epoch:
        """The next epoch of the same member, after `Renamed`, or because this rank's trainer has to start anew."""
        return Epoch(self._plan, Join(seat=self._plan.member.seat, after=self.number, damaged=self._join.damaged))

    def restart_without(self, seq: int) -> Epoch:
        """
        The next epoch, which restores the commit before `seq`, because that one is damaged. Any rank may ask.

        Looks first whether this epoch still holds: what is missing may have been retired by a newer one.
        """
        history = self._log.read()
        history.commit(seq)
        with suppress(Renamed):  # then the newer epoch is the answer
            self._check_holds(history)
        damaged = tuple(sorted({*self._join.damaged, seq}))
        return Epoch(self._plan, Join(seat=self._plan.member.seat, after=self.number, damaged=damaged))

    def _check_holds(self, history: History) -> None:
        history.check_alive(self._plan.generation)
        last = history.last_start(self._plan.generation)
        if last is not None and last.seq != self.number and seated(last, self._plan.member):
            raise Renamed(f"epoch {self.number} was followed by {last.seq}, which names this rank again")
        history.check_epoch(self.number, self._plan.generation)

    def _check_joins(self, history: History) -> None:
        owner = self._plan.member.owner
        for rank in range(1, self._start.world_size):
            join = Join.read(self._log, owner, rank)
            if join is None or history.superseded(self._plan.generation, owner, join.seat):
                continue
            if join.seat != self._start.members[rank] or join.after >= self.number:
                raise Renamed(f"rank {rank} has registered anew ({join.seat[0]}): a new epoch is due")

    def _only_rank_0(self, action: str) -> None:
        if self._plan.member.rank != 0:
            raise RunLogError(f"rank {self._plan.member.rank} may not {action}: only rank 0 writes to the log")


class _NothingToRetire(Exception):
    """Leaves `append`."""
