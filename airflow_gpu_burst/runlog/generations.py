"""The Airflow side: which generation a try belongs to, opening one, closing one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from airflow_gpu_burst.errors import Fenced, Overtaken, RunLogError, SpecError
from airflow_gpu_burst.runlog.history import History
from airflow_gpu_burst.runlog.log import RunLog
from airflow_gpu_burst.runlog.records import Close, Finish, Open

AIRFLOW = "airflow"
"""The owner in records of the Airflow side; its tries need no identity, all they do is idempotent."""


@dataclass(frozen=True, kw_only=True)
class Adopt:
    """The generation is open and the same was asked for: find its object, or submit it again."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Collect:
    """The generation has its result: collect what `finish` names."""

    generation: int
    finish: Finish


@dataclass(frozen=True, kw_only=True)
class OpenNew:
    """
    A new generation is due.

    :param close_verdict: verdict with which the previous one must be closed first; None: it is closed,
        or there is none.
    :param previous_verdict: how the previous one ended (or will, by `close_verdict`).
    """

    generation: int
    close_verdict: str | None = None
    previous: int | None = None
    previous_verdict: str | None = None


Plan: TypeAlias = Adopt | Collect | OpenNew


def plan(history: History, *, spec_digest: str, max_tries: int, try_number: int = 0) -> Plan:
    """
    What a try has to do, given the log.

    Airflow's `max_tries` tells a clear from a retry: a clear sets it to the try number plus the task's
    retries. It may also *fall*, when the DAG's retries were lowered before the clear. The try number always
    rises: one that is not higher, with another `max_tries`, is an outdated try that still runs (Fenced).
    """
    generation = history.generation
    if not generation:
        return OpenNew(generation=1)
    opened = history.opens[generation]
    close = history.closes.get(generation)
    finish = history.finishes.get(generation)
    if max_tries != opened.max_tries and try_number <= opened.try_number:
        raise Fenced(
            f"try {try_number} (max_tries {max_tries}) is older than generation {generation}, which try "
            f"{opened.try_number} (max_tries {opened.max_tries}) opened after a clear"
        )
    if max_tries != opened.max_tries:
        verdict = close.verdict if close else "succeeded" if finish else "cancelled"
        return _next(generation, None if close else verdict, verdict)
    if finish is not None or close is None:
        if spec_digest != opened.spec_digest:
            raise SpecError(
                f"generation {generation} was opened for spec {opened.spec_digest}, this try asks for "
                f"{spec_digest}. Clear the task to start again with the new spec, or undo the change"
            )
        return Collect(generation=generation, finish=finish) if finish else Adopt(generation=generation)
    return _next(generation, None, close.verdict)


def _next(generation: int, close_verdict: str | None, previous_verdict: str) -> OpenNew:
    return OpenNew(
        generation=generation + 1,
        close_verdict=close_verdict,
        previous=generation,
        previous_verdict=previous_verdict,
    )


def settle_generation(
    log: RunLog,
    *,
    spec_digest: str,
    max_tries: int,
    try_number: int,
    goes_on: Callable[[Open], bool] | None = None,
    owner: str = AIRFLOW,
) -> Adopt | Collect:
    """
    Plan, and do what the plan says, until there is a generation to adopt or a result to collect.

    Whatever another try does meanwhile, a retry, a zombie or a clear, is taken in and planned for again.

    After a success a new generation restores nothing.

    :param goes_on: whether a new generation may restore what the given previous one could, or has committed.
        None: if the spec is the same.
    """
    while True:
        todo = plan(log.read(), spec_digest=spec_digest, max_tries=max_tries, try_number=try_number)
        if not isinstance(todo, OpenNew):
            return todo
        if todo.previous and todo.close_verdict:
            close_generation(log, todo.previous, todo.close_verdict, "the task was cleared", owner=owner)
        since = _since(log.known, todo, goes_on)
        with suppress(Overtaken):
            opened = open_generation(
                log,
                todo.generation,
                spec_digest=spec_digest,
                max_tries=max_tries,
                try_number=try_number,
                restore_since=since,
                owner=owner,
            )
            return Adopt(generation=opened.generation)


def _since(history: History, todo: OpenNew, goes_on: Callable[[Open], bool] | None) -> int | None:
    if goes_on is None:
        return None
    previous = history.opens.get(todo.previous or 0)
    if previous is None or todo.previous_verdict == "succeeded" or not goes_on(previous):
        return todo.generation
    return previous.restore_since


def open_generation(
    log: RunLog,
    generation: int,
    *,
    spec_digest: str,
    max_tries: int,
    try_number: int,
    restore_since: int | None = None,
    owner: str = AIRFLOW,
) -> Open:
    """
    Open a generation, or return the record of another try that has just opened it for the same.

    Raises Overtaken when it was opened for something else; `settle_generation` plans again then.

    :param restore_since: the lowest generation whose commits it may restore. None: the protocol's choice.
    """

    def build(history: History) -> Open:
        there = history.opens.get(generation)
        if there is not None:
            same = (there.spec_digest, there.max_tries) == (spec_digest, max_tries)
            if not same or generation in history.closes:
                raise Overtaken(f"generation {generation} was just opened by try {there.try_number}: plan again")
            return there
        since = _restore_since(history, generation, spec_digest) if restore_since is None else restore_since
        return Open(
            **log.stamp(),
            generation=generation,
            owner=owner,
            spec_digest=spec_digest,
            max_tries=max_tries,
            try_number=try_number,
            restore_since=since,
        )

    return log.append(build)


def _restore_since(history: History, generation: int, spec_digest: str) -> int:
    previous = generation - 1
    close = history.closes.get(previous)
    if close is None or close.verdict == "succeeded" or history.opens[previous].spec_digest != spec_digest:
        return generation
    return history.opens[previous].restore_since


def close_generation(log: RunLog, generation: int, verdict: str, reason: str = "", *, owner: str = AIRFLOW) -> Close:
    """
    Close a generation, or return the close that is there. Look at its verdict: it may not be the one asked for.

    A generation with a result is closed as succeeded whatever was asked, even when the result comes while
    this is being written: then there is something to collect.
    """

    def build(history: History) -> Close:
        if generation in history.closes:
            return history.closes[generation]
        finish = history.finishes.get(generation)
        overruled = finish is not None and verdict != "succeeded"
        if finish is None and verdict == "succeeded":
            raise RunLogError(
                f"generation {generation} has no result, so it cannot be closed as succeeded: close it as failed"
            )
        return Close(
            **log.stamp(),
            generation=generation,
            owner=owner,
            verdict="succeeded" if finish else verdict,
            reason=f"has a result; {verdict} was asked for: {reason}" if overruled else reason,
        )

    return log.append(build)
