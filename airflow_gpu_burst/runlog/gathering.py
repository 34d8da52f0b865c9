"""How the ranks of one owner come together for an epoch: all register, rank 0 writes the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_gpu_burst.errors import NotStarted, StoreUnavailable
from airflow_gpu_burst.runlog.history import History
from airflow_gpu_burst.runlog.joins import Join, Member
from airflow_gpu_burst.runlog.log import RunLog
from airflow_gpu_burst.runlog.records import Seat, Start


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """What a rank needs to come to an epoch: the arguments of `begin`, kept for the ones after a restart."""

    log: RunLog
    generation: int
    member: Member
    world_size: int
    deadline_s: float
    restore: bool
    poll_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]


def gather(plan: Gathering, join: Join) -> Start:
    """Wait for the start that names this rank; rank 0 writes it."""
    deadline = plan.clock() + plan.deadline_s
    look = _lead if plan.member.rank == 0 else _follow
    while True:
        try:
            start = look(plan, join)
        except StoreUnavailable as error:
            waiting = str(error)
        else:
            if isinstance(start, Start):
                return start
            waiting = start
        if plan.clock() >= deadline:
            raise NotStarted(
                f"rank {plan.member.rank} of owner {plan.member.owner} waited {plan.deadline_s:.0f} s for an "
                f"epoch: {waiting}. Look at the other pods; a restart may help"
            )
        plan.sleep(plan.poll_s)


def _register(plan: Gathering, join: Join) -> None:
    """Write the join record, unless it is there as it should be (a ghost may have written over it)."""
    if Join.read(plan.log, plan.member.owner, plan.member.rank) != join:
        join.write(plan.log, plan.member.owner, plan.member.rank)


def _follow(plan: Gathering, join: Join) -> Start | str:
    """The newest start, if it names this rank and is new to it; else what is being waited for."""
    history = plan.log.read()
    member = plan.member
    history.check_may_start(plan.generation, member.owner, member.seat)
    start = history.last_start(plan.generation)
    if start is not None and start.seq > join.after and seated(start, member):
        return start
    _register(plan, join)
    return "rank 0 has not named this rank"


def _lead(plan: Gathering, join: Join) -> Start | str:
    """Append a start once all ranks have registered; else which are missing."""
    history = plan.log.read()
    owner, log = plan.member.owner, plan.log
    history.check_may_start(plan.generation, owner, plan.member.seat)
    _register(plan, join)
    joins = {rank: Join.read(log, owner, rank) for rank in range(1, plan.world_size)}
    damaged = {*join.damaged, *(seq for other in joins.values() if other for seq in other.damaged)}

    def build(history: History) -> Start:
        history.check_may_start(plan.generation, owner, plan.member.seat)
        seats = [plan.member.seat, *(_seat_of(plan, history, rank, found) for rank, found in joins.items())]
        missing = [rank for rank, seat in enumerate(seats) if seat is None]
        if missing:
            raise _Incomplete(f"ranks {missing} have not registered")
        known = {commit.seq for commit in history.commits}
        broken = tuple(sorted(damaged & known))
        newest = history.newest_checkpoint(plan.generation, broken) if plan.restore else None
        return Start(
            **log.stamp(),
            generation=plan.generation,
            owner=owner,
            members=tuple(seat for seat in seats if seat),
            world_size=plan.world_size,
            restore_from=newest.seq if newest else None,
            damaged=broken,
        )

    try:
        return log.append(build)
    except _Incomplete as waiting:
        return str(waiting)


class _Incomplete(Exception):
    """Leaves `append`: a start cannot be written yet."""


def _seat_of(plan: Gathering, history: History, rank: int, join: Join | None) -> Seat | None:
    """Who sits at a rank: the last that registered, or, if that is a ghost, who sat there before."""
    owner = plan.member.owner
    if join is not None and not history.superseded(plan.generation, owner, join.seat):
        return join.seat
    last = history.last_start(plan.generation)
    if last is not None and last.owner == owner and rank < last.world_size:
        return last.members[rank]
    return None


def seated(start: Start, member: Member) -> bool:
    """Whether a start names this boot of this rank."""
    return start.owner == member.owner and member.rank < start.world_size and start.members[member.rank] == member.seat
