"""Following a run until it ends or a timeout of its request has passed: one step at a time, the same for a
trigger (which sleeps without blocking) and a worker (which just sleeps)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_gpu_burst.errors import ClusterUnauthorized, GpuBurstError, ObjectMissing
from airflow_gpu_burst.routes import Live, Route
from airflow_gpu_burst.runs.output import OutputReader, ranks_wanted
from airflow_gpu_burst.runs.progress import Progress
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Handle, Observation, Phase
from airflow_gpu_burst.store import Store

PATIENCE_S = 900.0
"""How long a cluster or store may be out of reach before the wait ends: as long as MultiKueue waits for a lost
worker by default."""
CURSOR_EVERY_S = 5.0
"""How often the place in the output is noted: what a killed triggerer's successor prints twice at most."""
SPOOL_PAUSE_S = (2.0, 30.0)
"""Seconds between two looks at the spool where something else tells of changes: from the first to the second while
nothing new comes."""
QUIET_S = 60.0
"""Longest pause without a look, when the route says by itself that there is something."""
DRAIN_S = 5.0
"""How long the last live lines may take after a run without a spool has ended."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """
    One look.

    :param lines: new output.
    :param notes: state changes worth a line in the task's log.
    :param timeout: the timeout that has passed, a sentence; empty: none.
    :param moved: the observation is another than at the last look.
    :param done: there is nothing more to wait for.
    :param wait_s: seconds until the next look, unless woken before.
    :param refused: the cluster does not take our credentials any more: read the connection again.
    """

    observation: Observation
    lines: list[str]
    notes: list[str]
    timeout: str = ""
    moved: bool = False
    done: bool = False
    wait_s: float = 0.0
    refused: bool = False


def overdue(timeouts: Timeouts, submitted_at: float, observation: Observation, now: float) -> str:
    """
    Which timeout has passed, as a sentence; empty: none. Times are wall clock, seconds since the epoch: they
    travel between machines.
    """
    limit, began, what = _clock(timeouts, submitted_at, observation)
    if limit is None or now - began <= limit:
        return ""
    field = {"waiting in the queue": "queue_timeout", "starting": "start_timeout", "running": "run_timeout"}[what]
    return f"{what} for {now - began:.0f} s, and {field} is {limit:.0f} s"


def _clock(timeouts: Timeouts, submitted_at: float, observation: Observation) -> tuple[float | None, float, str]:
    """Limit of the clock that runs now, when it began, and what it measures."""
    # A cluster's own time, where there is one: the worker's clock may be an hour off.
    submitted = submitted_at if observation.submitted is None else observation.submitted
    began = observation.since or submitted
    if observation.terminal:
        return None, began, "running"
    if observation.phase in {Phase.SUBMITTED, Phase.QUEUED}:
        return timeouts.queue_s, submitted, "waiting in the queue"
    if observation.phase is Phase.PREEMPTED:
        return timeouts.queue_s, began, "waiting in the queue"
    if observation.phase in {Phase.ADMITTED, Phase.DISPATCHED, Phase.STARTING}:
        return timeouts.start_s, began, "starting"
    return timeouts.run_s, began, "running"


class Follower:
    """
    Looks at one run again and again.

    :param submitted_at: wall clock of the submission, seconds since the epoch.
    :param wake: called from any thread when there is something new to look at.
    :param ranks: how many pods the run has; lines are labelled when there are several.
    :param logs: whose lines: `all`, `rank0`, `none`, or ranks such as `0,4-7`.
    :param spooled: False: a raw manifest, whose containers are not known to have the runtime.
    :param poll_s: seconds between two looks at a route that does not say when something changed.
    """

    def __init__(
        self,
        *,
        store: Store,
        route: Route,
        handle: Handle,
        timeouts: Timeouts,
        submitted_at: float,
        wake: Callable[[], None] = lambda: None,
        ranks: int = 1,
        logs: str = "all",
        spooled: bool = True,
        poll_s: float = 2.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._handle = store, handle
        self._timeouts, self._submitted_at, self._wall = timeouts, submitted_at, wall
        self._progress = Progress(store, handle, wall=wall)
        self._ranks, self._logs, self._spooled, self._poll_s = ranks, logs, spooled, poll_s
        self._last: Observation | None = None
        self._noted_at = 0.0
        self._noted: Mapping[str, Any] | None = None
        self._salvaged = False
        self._ended_at: float | None = None
        self._out_of_reach_since: float | None = None
        self._reader: OutputReader | None = None
        self._spool_due, self._spool_pause = 0.0, SPOOL_PAUSE_S[0]
        self._route, self._wake = route, wake
        self._live: Live | None = None

    def close(self) -> None:
        """Nobody looks any more."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def step(self) -> Step:
        """
        One look at the run and its output.

        :raises GpuBurstError: not retryable, or out of reach for longer than PATIENCE_S.
        """
        try:
            reader, live = self._open()
            # The run first, its output second: what it said before its end is then always read.
            observation = live.observe()
            printed = reader.cursor
            lines = self._output(reader, live, observation)
        except GpuBurstError as error:
            return self._out_of_reach(error)
        self._out_of_reach_since = None
        moved, notes = self._changes(live, observation)
        timeout = overdue(self._timeouts, self._submitted_at, observation, self._wall())
        self._keep_cursor(printed)
        self._progress.note(observation, moved=moved, flowing=bool(lines))
        done = bool(timeout) or (observation.terminal and reader.exhausted and self._drained(live))
        return Step(
            observation=observation,
            lines=lines,
            notes=notes,
            timeout=timeout,
            moved=moved,
            done=done,
            wait_s=self._pause(reader, live, observation),
        )

    def _open(self) -> tuple[OutputReader, Live]:
        if self._reader is None:
            self._reader = reader_of(
                self._store, self._handle, ranks=self._ranks, logs=self._logs, spooled=self._spooled
            )
        if self._live is None:
            self._live = self._route.follow(
                self._handle, self._wake, resume=not self._spooled, since=self._reader.times
            )
        return self._reader, self._live

    def _output(self, reader: OutputReader, live: Live, observation: Observation) -> list[str]:
        pieces = live.output()
        lines = [line for piece in pieces for line in reader.feed(piece)]
        if observation.terminal:
            self._ended_at = self._ended_at if self._ended_at is not None else self._wall()
            if not self._salvaged:
                self._route.salvage(self._handle, self._store)
                self._salvaged = True
            return lines + reader.read(ended=True)
        now = self._wall()
        if not live.pushes:
            return lines + reader.read()
        if not self._spooled or reader.live() or now < self._spool_due or observation.phase not in _SPEAKING:
            return lines
        found = reader.read(find=True)
        self._spool_pause = SPOOL_PAUSE_S[0] if found else min(self._spool_pause * 1.5, SPOOL_PAUSE_S[1])
        self._spool_due = now + self._spool_pause
        return lines + found

    def _drained(self, live: Live) -> bool:
        """Without a spool the last lines come live or not at all: give them a moment."""
        if self._spooled or not live.reading():
            return True
        return self._ended_at is not None and self._wall() - self._ended_at > DRAIN_S

    def _pause(self, reader: OutputReader, live: Live, observation: Observation) -> float:
        if not live.pushes:
            return self._poll_s
        if observation.terminal:
            return 0.1
        limit, began, _ = _clock(self._timeouts, self._submitted_at, observation)
        now = self._wall()
        pauses = [QUIET_S]
        if limit is not None:
            pauses.append(max(began + limit - now + 0.01, 0.1))
        if self._spooled and observation.phase in _SPEAKING and not reader.live():
            pauses.append(max(self._spool_due - now, 0.1))
        return min(pauses)

    def _changes(self, live: Live, observation: Observation) -> tuple[bool, list[str]]:
        before, self._last = self._last, observation
        notes: list[str] = live.notes()
        if before is not None and (before.phase, before.reason) == (observation.phase, observation.reason):
            return False, notes
        why = " ".join(p for p in (observation.reason, observation.message) if p)
        arrow = f"{before.phase} -> " if before else ""
        return True, [*notes, f"{self._handle.name}: {arrow}{observation.phase}" + (f" ({why})" if why else "")]

    def _out_of_reach(self, error: GpuBurstError) -> Step:
        now = self._wall()
        first = self._out_of_reach_since is None
        if self._out_of_reach_since is None:
            self._out_of_reach_since = now
        if not error.retryable or now - self._out_of_reach_since > PATIENCE_S:
            raise error
        notes = [f"out of reach, asking again: {error}"] if first else []
        observation = self._last or Observation(phase=Phase.SUBMITTED)
        return Step(
            observation=observation,
            lines=[],
            notes=notes,
            wait_s=max(self._poll_s, 2.0),
            refused=isinstance(error, ClusterUnauthorized),
        )

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


_SPEAKING = frozenset({Phase.RUNNING, Phase.RESTARTING})
"""Phases in which there may be output."""


def reader_of(store: Store, handle: Handle, *, ranks: int = 1, logs: str = "all", spooled: bool = True) -> OutputReader:
    """A reader of the run's output that begins where an earlier follower was."""
    try:
        cursor = json.loads(store.get(_cursor_key(handle)))
    except (ObjectMissing, ValueError):
        cursor = None
    return OutputReader(
        store,
        handle.run_key.prefix,
        handle.generation,
        cursor,
        wanted=ranks_wanted(logs),
        labelled=ranks > 1,
        spooled=spooled,
    )


def unprinted(store: Store, handle: Handle, *, ranks: int = 1, logs: str = "all") -> Iterator[str]:
    """What is left of the output of a run that ended while nobody followed it."""
    reader = reader_of(store, handle, ranks=ranks, logs=logs)
    while not reader.exhausted:
        yield from reader.read(ended=True)


def _cursor_key(handle: Handle) -> str:
    return f"{handle.run_key.prefix}/output/cursor-g{handle.generation:06d}.json"
