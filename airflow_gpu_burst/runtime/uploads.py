"""Checkpoints: the trainer says that one is ready, a thread has it saved and commits it while training goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter

from airflow_gpu_burst.errors import CheckpointError, Fenced, GpuBurstError, Renamed, SpecError
from airflow_gpu_burst.runlog import Epoch
from airflow_gpu_burst.runtime.agent_process import Agent
from airflow_gpu_burst.runtime.announcing import Markers
from airflow_gpu_burst.runtime.assembly import Assembly, Waiting
from airflow_gpu_burst.runtime.keeping import Keeping
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.runtime.peers import Peers
from airflow_gpu_burst.runtime.start import Stop
from airflow_gpu_burst.runtime.telling import Telling, moved, size_text
from airflow_gpu_burst.runtime.totals import Totals
from airflow_gpu_burst.runtime.workspace import Ready, Workspace

MAX_FAILURES = 3
"""Checkpoints that may fail in a row before training is stopped: beyond that it runs without a net."""
BEHIND_S = 5.0
"""A checkpoint of one rank that has waited so long for another's upload gives way to a newer one."""


class Uploader(threading.Thread):
    """
    Takes ready checkpoints, oldest first, one at a time: each rank saves its own, rank 0 commits what is whole.

    A failed upload is said, kept on disk and taken up again with the next round; after MAX_FAILURES in a row, or
    when the epoch is over, `error` is set and the main loop ends the trainer. Nothing is dropped silently.

    :param agent: moves the bytes.
    :param keeping: what becomes of checkpoints that are in the store.
    :param totals: counts.
    :param peers: the ranks of this epoch.
    :param stop: why the process must end.
    :param grace_s: how long after that the last checkpoints may still take.
    :param rank: this rank.
    """

    def __init__(
        self,
        *,
        workspace: Workspace,
        epoch: Epoch,
        agent: Agent,
        keeping: Keeping,
        totals: Totals,
        output: Output,
        peers: Peers,
        stop: Stop,
        grace_s: float,
        rank: int = 0,
        pause_s: float = 0.1,
    ) -> None:
        super().__init__(name="gpu-burst-uploader", daemon=True)
        self._workspace, self._epoch, self._agent, self._keeping = workspace, epoch, agent, keeping
        self._totals, self._output, self._pause_s = totals, output, pause_s
        self._rank, self._peers, self._stop_run, self._grace_s = rank, peers, stop, grace_s
        world_size = len(peers.others(rank)) + 1
        self._assembly = Assembly(peers, commit=self._commit, discard=self._discard, say=output.say)
        self._markers = Markers(workspace, rank=rank, world_size=world_size, refused=self._refused)
        self._stop_event = threading.Event()
        self._abandoned = self._gave_up = False
        self._limit: _Limit | None = None
        self._counts: Counter[int] = Counter()
        self._prefixes: dict[str, str] = {}
        self._failures = 0
        self._telling: Telling | None = None
        self._took = 0.0
        self.error: GpuBurstError | None = None
        self.step: int | None = None

    def run(self) -> None:
        """Until `finish` is called or an error ends it."""
        while not self._stop_event.wait(self._pause_s * (1 + 50 * self._failures)):
            self._take_all()

    def finish(self, timeout_s: float, *, peers_s: float = 0.0, hurry: bool = True) -> None:
        """
        Save and commit what is ready, then stop. `error` says whether something could not be committed.

        :param timeout_s: for what this rank still has to save.
        :param peers_s: how long rank 0 waits for other ranks' parts.
        :param hurry: the time counts from now, and older ones give way; else it counts from the last moved byte.
        """
        self._limit = _Limit(timeout_s, hurry=hurry, began=time.monotonic())
        self._stop_event.set()
        deadline = time.monotonic() + peers_s
        while self.is_alive():
            self.join(0.1)
            if self._late(margin_s=2.0):
                self._output.say(f"the store does not answer in time. {self._limit.why}")
                return
        self._take_all()
        self._take_all()  # a marker is taken at the second look
        while not self._assembly.empty and self.error is None and not self._nothing_comes(deadline):
            time.sleep(0.5)
            self._take_all()
        self._take_all(last=True)

    def abandon(self) -> None:
        """Stop at once, without a word: the epoch is over, and its checkpoints with it."""
        self._abandoned = True
        self._stop_event.set()
        self.join(5.0)  # the agent is ended within 0.1 s; what waits for the store writes to keys that nobody reads

    def _nothing_comes(self, deadline: float) -> bool:
        if time.monotonic() > deadline:
            return True
        try:
            return self._peers.all_flushed(self._peers.others(self._rank))
        except GpuBurstError:
            return False

    def _take_all(self, *, last: bool = False) -> None:
        step: int | None = None
        try:
            self._markers.take()
            while self._goes_on and (ready := self._next()) is not None:
                step = ready.step
                try:
                    self._save(ready)
                except CheckpointError as error:
                    # This one can never be saved; it must not stand in the way of those after it.
                    self._counts[step] += 1
                    self._failed(step, error)
                    self._workspace.drop(ready)
                self._settle()
                self._keeping.clean()
            if self.error is None and not self._abandoned:
                step = None
                self._settle(last=last)
                self._keeping.clean()
        except (Fenced, Renamed) as error:
            self.error = error
        except _GivenUp:
            self._give_up()
        except Exception as error:  # a thread that dies in silence would leave training without a net
            self._failed(step, error)

    def _next(self) -> Ready | None:
        """The oldest that is not to give way."""
        waiting = self._workspace.ready()
        patience = 0.0 if self._limit and self._limit.hurry else BEHIND_S
        for ready, newer in zip(waiting, waiting[1:], strict=False):
            # What several ranks save together cannot be left out by one of them: the others' parts would be in vain.
            begun = ready.folder.name in self._prefixes
            if not ready.alone or ready.pinned or begun or time.monotonic() - ready.at < patience:
                return ready
            self._output.say(f"checkpoint {ready.step} skipped: {newer.step} is newer and the upload is behind")
            self._totals.skipped += 1
            self._workspace.drop(ready)
        return waiting[-1] if waiting else None

    def _settle(self, *, last: bool = False) -> None:
        try:
            self._assembly.settle(last=last)
        except CheckpointError as error:
            self.error = error  # ranks that take no part: no further try helps

    def _failed(self, step: int | None, error: Exception) -> None:
        if self._abandoned:
            return
        self._failures += 1
        self._totals.failed += 1
        name = "a checkpoint" if step is None else f"checkpoint {step}"
        self._output.say(f"{name} could not be saved ({self._failures}. time): {error}")
        if self._failures >= MAX_FAILURES:
            own = error if isinstance(error, GpuBurstError) else CheckpointError(f"{name}: {error!r}")
            self.error = own

    def _refused(self, step: int | None, error: SpecError) -> None:
        self._failed(step, error)

    @property
    def _goes_on(self) -> bool:
        return self.error is None and not self._abandoned and not self._gave_up

    def _give_up(self) -> None:
        self._gave_up = True
        if not self._abandoned and self._limit is not None:
            steps = [ready.step for ready in self._workspace.ready()]
            self._output.say(f"not in the store: checkpoint {', '.join(map(str, steps))}. {self._limit.why}")
            self._totals.failed += len(steps)

    def _save(self, ready: Ready) -> None:
        # A key for every attempt, but for one that goes on: data keys are written once.
        place = f"{self._epoch.data_prefix}/step-{ready.step:012d}-{len(self._prefixes) + 1}"
        prefix = self._prefixes.setdefault(ready.folder.name, place)
        count = self._counts[ready.step] + 1
        self._telling = telling = Telling(f"checkpoint {ready.step}", self._output.say)
        part = self._agent.save(
            ready.folder, prefix, self._workspace.state(ready), progress=telling.progress, check=self._check
        )
        self._took = telling.seconds
        self._totals.saved_bytes += part.size
        self._totals.seconds += self._took
        if self._rank == 0:
            ranks = [0] if ready.alone else [0, *self._peers.others(0)]
            self._assembly.add(
                Waiting(step=ready.step, count=count, ranks=ranks, parts={0: part}, metrics=ready.metrics)
            )
        else:
            self._peers.offer(ready.step, count, part)
            self._failures = 0
        if not ready.alone:
            what = f"{part.files} files, {moved(part.size, self._took)}"
            self._output.say(f"checkpoint {ready.step}: this rank's part is saved, {what}")
        self._counts[ready.step] = count
        self._keeping.saved(ready, part)

    def _check(self) -> None:
        """Called several times a second while the agent is at work."""
        self._markers.take()
        if self._abandoned or self._late():
            raise _GivenUp

    def _late(self, margin_s: float = 0.0) -> bool:
        if self._limit is None:
            return False
        told = self._stop_run.at
        if told is not None and time.monotonic() - told > self._grace_s + margin_s and not self._limit.hurry:
            self._limit = _Limit(self._grace_s, hurry=True, began=told)
        return self._limit.passed(self._telling.moved_at if self._telling else 0.0, margin_s)

    def _commit(self, whole: Waiting) -> None:
        self._epoch.commit(whole.step, {part.key: part.sha256 for part in whole.parts.values()}, whole.metrics)
        self._failures = 0
        self.step = whole.step
        size = sum(part.size for part in whole.parts.values())
        self._totals.committed += 1
        self._totals.bytes += size
        self._keeping.committed()
        files = sum(part.files for part in whole.parts.values())
        alone, ranks = len(whole.ranks) == 1, len(whole.ranks)
        how = moved(size, self._took) if alone else f"{size_text(size)} of {ranks} ranks"
        self._output.say(f"checkpoint {whole.step} committed: {files} files, {how}")

    def _discard(self, dropped: Waiting) -> None:
        self._keeping.discard(list(dropped.parts.values()))


class _Limit:
    """How long the last checkpoints may take."""

    def __init__(self, seconds: float, *, hurry: bool, began: float) -> None:
        self.seconds, self.hurry, self._began = seconds, hurry, began

    def passed(self, moved_at: float, margin_s: float) -> bool:
        since = self._began if self.hurry else max(self._began, moved_at)
        return time.monotonic() - since > self.seconds + margin_s

    @property
    def why(self) -> str:
        if self.hurry:
            return (
                f"The {self.seconds:.0f} s that are left after SIGTERM were too short, so the run goes on from the one "
                "before: raise the grace time, or save less"
            )
        return f"Nothing has moved for {self.seconds:.0f} s: see whether the store answers"


class _GivenUp(Exception):
    """Leaves the agent's request."""
