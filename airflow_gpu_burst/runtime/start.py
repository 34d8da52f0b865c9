"""What one start of the runtime works with: who it is, what it was given, and why it must end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from airflow_gpu_burst import contract
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ExitCode, GpuBurstError, RunFailed
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.runtime.workspace import Workspace
from airflow_gpu_burst.store import Store


class Terminated(RunFailed):
    """The runtime was told to end (preempted, drained, cancelled)."""

    exit_code = ExitCode.RETRY_MAY_HELP


@dataclass(frozen=True, kw_only=True)
class Identity:
    """
    Who this pod is.

    :param nonce: of this boot: a restarted container keeps its pod's UID.
    """

    owner: str
    pod_uid: str
    rank: int
    nonce: str


@dataclass
class Stop:
    """Why the process must end, set from signal handlers and threads; the first reason counts."""

    reason: GpuBurstError | None = None
    event: threading.Event = field(default_factory=threading.Event)

    def because(self, reason: GpuBurstError) -> None:
        """Ask whoever waits to end."""
        if self.reason is None:
            self.reason = reason
        self.event.set()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """SIGTERM and SIGINT: what a kubelet, a host or a person sends."""
        name = signal.Signals(number).name
        self.because(Terminated(f"the run was told to end ({name})", reason="Terminated"))

    def check(self) -> None:
        """
        :raises GpuBurstError: the reason, if there is one.
        """
        if self.reason is not None:
            raise self.reason

    def sleep(self, seconds: float) -> None:
        """
        Wait, but not longer than there is a reason to end.

        :raises GpuBurstError: that reason.
        """
        self.event.wait(seconds)
        self.check()


@dataclass(frozen=True, kw_only=True)
class Pod:
    """
    Everything that one start works with.

    :param began: monotonic seconds of the process's start.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    context: PodContext
    identity: Identity
    store: Store
    workspace: Workspace
    output: Output
    stop: Stop
    began: float

    @property
    def grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL for the trainer."""
        return float(self.env.get(contract.ENV_GRACE) or 30)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone writes to the run log."""
        return self.identity.rank == 0

    @property
    def others(self) -> range:
        """The other ranks, seen from rank 0."""
        return range(1, self.context.world_size)
