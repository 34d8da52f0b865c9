"""Watching over one start of the trainer: fence, other ranks, timeouts, signals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from airflow_gpu_burst.errors import (
    CheckpointError,
    ExitCode,
    Fenced,
    GpuBurstError,
    Renamed,
    RunFailed,
    StoreUnavailable,
)
from airflow_gpu_burst.runlog import Epoch
from airflow_gpu_burst.runtime.process import TrainerProcess, describe_exit
from airflow_gpu_burst.runtime.start import Stop
from airflow_gpu_burst.runtime.uploads import Uploader

FENCE_POLL_S = 2.0
"""How often the log is read for a successor: one small GET, and on rank 0 one more for each other rank."""
RENAMED_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL when only the epoch is over: enough for torchrun to end its workers."""
PEERS_S = 60.0
"""When a trainer fails and some other rank's does not, how long to wait whether that rank was lost and is replaced:
collectives fail in seconds when a peer dies, and its pod comes again in about a minute."""


class Fence(threading.Thread):
    """
    Looks whether the epoch still holds, until it is over.

    :param stop: told when it is superseded.
    """

    def __init__(self, epoch: Epoch, stop: Stop) -> None:
        super().__init__(name="gpu-burst-fence", daemon=True)
        self._epoch, self._stop_run = epoch, stop
        self._over = threading.Event()
        self.renamed: Renamed | None = None

    def run(self) -> None:
        """Until `end` is called, or the epoch is over."""
        while not self._over.wait(FENCE_POLL_S):
            try:
                self._epoch.check()
            except Renamed as news:
                self.renamed = news
                return
            except Fenced as error:
                if not self._over.is_set():
                    self._stop_run.because(error)
                return
            except Exception:
                continue  # cannot tell; the next look may

    def end(self) -> None:
        """No more looks."""
        self._over.set()


@dataclass(frozen=True, kw_only=True)
class Watch:
    """
    Everything that can end one start of the trainer.

    :param uploader: None once it has done its work.
    :param run_s: the run timeout, in seconds; None: none.
    :param first_start: monotonic seconds of this process's first start of the trainer; the run timeout counts from it.
    """

    stop: Stop
    fence: Fence
    uploader: Uploader | None
    run_s: float | None
    first_start: float

    def check(self) -> None:
        """
        :raises GpuBurstError: why the trainer must end. Renamed: only this epoch is over.
        """
        error = self.uploader.error if self.uploader else None
        if isinstance(error, Renamed):
            raise error
        if error is not None:
            self.stop.because(error)
        elif self.run_s is not None and time.monotonic() - self.first_start > self.run_s:
            self.stop.because(RunFailed(f"the run timeout of {self.run_s:.0f} s has passed", reason="RunTimeout"))
        self.stop.check()
        if self.fence.renamed is not None:
            raise self.fence.renamed

    def until_exit(self, trainer: TrainerProcess, grace_s: float) -> int:
        """
        The trainer's exit status.

        :raises GpuBurstError: it had to be ended.
        """
        try:
            while (status := trainer.wait(0.1)) is None:
                if self.uploader and not self.uploader.is_alive() and self.uploader.error is None:
                    ended = "the upload of checkpoints ended unexpectedly; see the run's output"
                    self.stop.because(CheckpointError(ended))
                self.check()
            self.check()
        except Fenced:
            trainer.end(1.0)  # a successor trains already, every second of ours is waste
            raise
        except Renamed:
            trainer.end(min(grace_s, RENAMED_GRACE_S))
            raise
        except GpuBurstError:
            trainer.end(grace_s)
            raise
        return status

    def until(self, condition: Callable[[], bool], pause_s: float = 1.0) -> None:
        """
        Wait for something in the store.

        :raises GpuBurstError: what came instead.
        """
        while not _holds(condition):
            try:
                self.check()
            except Fenced:
                if _holds(condition):
                    return  # a finished run is closed soon after: both may be new
                raise
            self.stop.event.wait(pause_s)

    def failure(self, status: int, all_exited: Callable[[], bool]) -> RunFailed:
        """
        What a failed trainer means; waits whether it only failed because another rank was lost.

        :param all_exited: whether the other ranks' trainers are over too: then nobody was lost.
        :raises Renamed: a rank was replaced.
        """
        deadline = time.monotonic() + PEERS_S
        while not _holds(all_exited) and time.monotonic() < deadline:
            if self.fence.renamed is not None:
                raise self.fence.renamed
            if self.stop.event.wait(1.0):
                break
        return RunFailed(
            f"the trainer {describe_exit(status)}", code=int(ExitCode.TRAINER_FAILED), reason="TrainerFailed"
        )


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except StoreUnavailable:
        return False
