"""Following a run until it ends or a timeout of its request has passed: one step at a time, the same for a
trigger (which sleeps without blocking) and a worker (which just sleeps)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_gpu_burst.errors import GpuBurstError, ObjectMissing
from airflow_gpu_burst.routes import Route
from airflow_gpu_burst.runs.output import OutputReader
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Handle, Observation, Phase
from airflow_gpu_burst.store import Store

PATIENCE_S = 900.0
"""How long a cluster or store may be out of reach before the wait ends: as long as MultiKueue waits for a lost
worker by default."""
CURSOR_EVERY_S = 5.0
"""How often the place in the output is noted: what a killed triggerer's successor prints twice at most."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """
    One look.

    :param lines: new output.
    :param notes: state changes worth a line in the task's log.
    :param timeout: the timeout that has passed, a sentence; empty: none.
    :param done: there is nothing more to wait for.
    """

    observation: Observation
    lines: list[str]
    notes: list[str]
    timeout: str = ""
    done: bool = False


def overdue(timeouts: Timeouts, submitted_at: float, observation: Observation, now: float) -> str:
    """
    Which timeout has passed, as a sentence; empty: none. Times are wall clock, seconds since the epoch: they
    travel between machines.
    """
    waiting = {Phase.SUBMITTED, Phase.QUEUED, Phase.PREEMPTED}
    if observation.phase in waiting:
        limit, began, what = timeouts.queue_s, submitted_at, "waiting in the queue"
    elif observation.phase in {Phase.ADMITTED, Phase.DISPATCHED, Phase.STARTING}:
        limit, began, what = timeouts.start_s, observation.since or submitted_at, "starting"
    else:
        limit, began, what = timeouts.run_s, observation.since or submitted_at, "running"
    if limit is None or observation.terminal or now - began <= limit:
        return ""
    field = {"waiting in the queue": "queue_timeout", "starting": "start_timeout", "running": "run_timeout"}[what]
    return f"{what} for {now - began:.0f} s, and {field} is {limit:.0f} s"


class Follower:
    """
    Looks at one run again and again.

    :param submitted_at: wall clock of the submission, seconds since the epoch.
    """

    def __init__(
        self,
        *,
        store: Store,
        route: Route,
        handle: Handle,
        timeouts: Timeouts,
        submitted_at: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._route, self._handle = store, route, handle
        self._timeouts, self._submitted_at, self._wall = timeouts, submitted_at, wall
        self._last: Observation | None = None
        self._noted_at = 0.0
        self._noted: Mapping[str, Any] | None = None
        self._salvaged = False
        self._out_of_reach_since: float | None = None
        self._reader: OutputReader | None = None

    def step(self) -> Step:
        """
        One look at the run and its output.

        :raises GpuBurstError: not retryable, or out of reach for longer than PATIENCE_S.
        """
        try:
            # The run first, its output second: what it said before its end is then always read.
            observation = self._route.observe(self._handle)
            if self._reader is None:
                self._reader = reader_of(self._store, self._handle)
            printed = self._reader.cursor
            if observation.terminal and not self._salvaged:
                self._route.salvage(self._handle, self._store)
                self._salvaged = True
            lines = self._reader.read(ended=observation.terminal)
        except GpuBurstError as error:
            return self._out_of_reach(error)
        self._out_of_reach_since = None
        notes = self._changes(observation)
        timeout = overdue(self._timeouts, self._submitted_at, observation, self._wall())
        self._keep_cursor(printed)
        done = bool(timeout) or (observation.terminal and self._reader.exhausted)
        return Step(observation=observation, lines=lines, notes=notes, timeout=timeout, done=done)

    def _changes(self, observation: Observation) -> list[str]:
        before, self._last = self._last, observation
        if before is not None and (before.phase, before.reason) == (observation.phase, observation.reason):
            return []
        why = " ".join(p for p in (observation.reason, observation.message) if p)
        arrow = f"{before.phase} -> " if before else ""
        return [f"{self._handle.name}: {arrow}{observation.phase}" + (f" ({why})" if why else "")]

    def _out_of_reach(self, error: GpuBurstError) -> Step:
        now = self._wall()
        first = self._out_of_reach_since is None
        if self._out_of_reach_since is None:
            self._out_of_reach_since = now
        if not error.retryable or now - self._out_of_reach_since > PATIENCE_S:
            raise error
        notes = [f"out of reach, asking again: {error}"] if first else []
        observation = self._last or Observation(phase=Phase.SUBMITTED)
        return Step(observation=observation, lines=[], notes=notes)

    def _keep_cursor(self, printed: Mapping[str, Any]) -> None:
        """
        Note how far the lines of *earlier* steps came: those of this one are not printed yet, and whoever prints
        them may be killed first.
        """
        if printed == self._noted or self._wall() - self._noted_at < CURSOR_EVERY_S:
            return
        self._noted_at, self._noted = self._wall(), printed
        with contextlib.suppress(GpuBurstError):  # a hint: without it lines are printed twice, never lost
            self._store.put(_cursor_key(self._handle), json.dumps(printed).encode())


def reader_of(store: Store, handle: Handle) -> OutputReader:
    """A reader of the run's output that begins where an earlier follower was."""
    try:
        cursor = json.loads(store.get(_cursor_key(handle)))
    except (ObjectMissing, ValueError):
        cursor = None
    return OutputReader(store, handle.run_key.prefix, handle.generation, cursor)


def unprinted(store: Store, handle: Handle) -> Iterator[str]:
    """What is left of the output of a run that ended while nobody followed it."""
    reader = reader_of(store, handle)
    while not reader.exhausted:
        yield from reader.read(ended=True)


def _cursor_key(handle: Handle) -> str:
    return f"{handle.run_key.prefix}/output/cursor-g{handle.generation:06d}.json"
