"""Following a run until it ends or a timeout of its request has passed: one step at a time, the same for a
trigger (which sleeps without blocking) and a worker (which just sleeps)."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_gpu_burst.errors import FINAL_CODES, ClusterForbidden, ClusterUnauthorized, GpuBurstError, ObjectMissing
from airflow_gpu_burst.routes import Live, Piece, Route
from airflow_gpu_burst.runlog import RunLog
from airflow_gpu_burst.runs.output import OutputReader, ranks_wanted
from airflow_gpu_burst.runs.progress import Progress
from airflow_gpu_burst.runtime.output import ENDED
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Handle, Observation, Phase
from airflow_gpu_burst.store import Store

PATIENCE_S = 900.0
"""How long a cluster or store may be out of reach before the wait ends: as long as MultiKueue waits for a lost
worker by default."""
CURSOR_EVERY_S = 15.0
"""How often the place in the output is noted: what a killed triggerer's successor prints twice at most. Each time costs
4 ms of CPU: every 5 s it was a quarter of all that following takes."""
SPOOL_PAUSE_S = (2.0, 30.0)
"""Seconds between two looks at the spool where something else tells of changes: from the first to the second while
nothing new comes."""
QUIET_S = 60.0
"""Longest pause without a look, when the route says by itself that there is something."""
FINISHING = "Finishing"
"""The reason of a run whose pods have ended while the cluster has not said how."""
LAST_LINE = b"gpu-burst: finished in "
"""How the last line of a successful run begins; a trainer may print it too, and causes a look at the run log."""
LAST_WORD = f"gpu-burst: {ENDED} ".encode()
"""How that of a failed one begins; it causes a look at what the runtime left in the store."""
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
    # Between its pods' end and the cluster's word nobody says when it began: the wait in the queue is not to count.
    return (None if observation.since is None else timeouts.run_s), began, "running"


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
        self._told: Observation | None = None
        self._unsaid: list[str] = []
        self._lock, self._closed = threading.Lock(), False

    def close(self) -> None:
        """Nobody looks any more; from any thread, also while a look is under way."""
        with self._lock:
            self._closed = True
            live, self._live = self._live, None
        if live is not None:
            live.close()

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
            pieces = live.output()
            observation = self._decided(reader, observation, pieces)
            lines = self._output(reader, live, observation, pieces)
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
        live = self._live
        if live is None:
            live = self._route.follow(self._handle, self._wake, resume=not self._spooled, since=self._reader.times)
            with self._lock:
                closed = self._closed
                self._live = None if closed else live
            if closed:  # a cancelled trigger does not wait for its look: nobody else would close this
                live.close()
        return self._reader, live

    def _decided(self, reader: OutputReader, observation: Observation, pieces: Sequence[Piece]) -> Observation:
        """
        The end that the runtime has told, some seconds before a cluster does: a kubelet looks once a second, the pod's
        phase comes a second later, the job's condition another.

        The runtime notes its end in the store and says so in its last line. So the store is asked when that line comes
        live: all lines before it came live as well, and nothing is left to wait for. With several ranks the others have
        more to say; then, and after a stream that broke off, it is asked when all pods have ended.
        """
        if observation.terminal or not self._spooled:
            return observation
        live = self._ranks == 1 and reader.live()
        last = live and any(LAST_LINE in piece.data for piece in pieces)
        finishing = observation.reason == FINISHING and (self._last is None or self._last.reason != FINISHING)
        if self._told is None:
            with contextlib.suppress(GpuBurstError):  # then the cluster's word is waited for
                if last or finishing:
                    self._told = self._finish(observation)
                elif live and any(LAST_WORD in piece.data for piece in pieces):
                    self._told = self._failure(reader, observation)
        return self._told or observation

    def _finish(self, observation: Observation) -> Observation | None:
        """The success that the run log holds."""
        log = RunLog(self._store, self._handle.run_key.prefix).read()
        if self._handle.generation not in log.finishes:
            return None
        return replace(observation, phase=Phase.SUCCEEDED, reason="Succeeded", message="", since=self._wall(), code=0)

    def _failure(self, reader: OutputReader, observation: Observation) -> Observation | None:
        """The runtime's own word on a failure after which nothing is started again."""
        # A pod that the cluster is taking away is replaced, whatever its trainer makes of that.
        if observation.phase is not Phase.RUNNING or observation.reason:
            return None
        word = reader.end_word()
        if word is None or word["code"] not in FINAL_CODES:
            return None
        return replace(observation, phase=Phase.FAILED, since=self._wall(), **word)

    def _output(self, reader: OutputReader, live: Live, observation: Observation, pieces: Sequence[Piece]) -> list[str]:
        # Kept until they are given out: the store may not answer now, and they come only once.
        self._unsaid += [line for piece in pieces for line in reader.feed(piece)]
        found = self._spooled_lines(reader, live, observation)
        lines, self._unsaid = [*self._unsaid, *found], []
        return lines

    def _spooled_lines(self, reader: OutputReader, live: Live, observation: Observation) -> list[str]:
        if observation.terminal:
            self._ended_at = self._ended_at if self._ended_at is not None else self._wall()
            if not self._salvaged:
                self._route.salvage(self._handle, self._store)
                self._salvaged = True
            return reader.read(ended=True)
        now = self._wall()
        if not live.pushes:
            return reader.read()
        if not self._spooled or reader.live() or now < self._spool_due or observation.phase not in _SPEAKING:
            return []
        found = reader.read(find=True)
        self._spool_pause = SPOOL_PAUSE_S[0] if found else min(self._spool_pause * 1.5, SPOOL_PAUSE_S[1])
        self._spool_due = now + self._spool_pause
        return found

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
        # A right that is missing now may be back in a minute (a Role is replaced); the run goes on meanwhile.
        patient = error.retryable or isinstance(error, ClusterForbidden)
        if not patient or now - self._out_of_reach_since > PATIENCE_S:
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
