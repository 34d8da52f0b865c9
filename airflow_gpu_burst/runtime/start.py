"""What one start of the runtime works with: who it is, what it was given, and why it must end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from airflow_gpu_burst import contract
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ExitCode, GpuBurstError, RunFailed
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.runtime.workspace import Workspace
from airflow_gpu_burst.store import Store

ENV_PROCESS_FILE = "GPU_BURST_PROCESS_FILE"
"""Set by the local route: where the runtime says which process it is. Its scratch folder is the run's own then."""


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
    """
    Why the process must end, set from signal handlers and threads; the first reason counts.

    :param at: monotonic seconds when it came.
    """

    reason: GpuBurstError | None = None
    event: threading.Event = field(default_factory=threading.Event)
    at: float | None = None

    def because(self, reason: GpuBurstError) -> None:
        """Ask whoever waits to end."""
        if self.reason is None:
            self.reason, self.at = reason, time.monotonic()
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

    def check_after(self, grace_s: float) -> None:
        """
        For what is nearly done: there is some time yet after the reason came.

        :raises GpuBurstError: the reason, if it is older than `grace_s` seconds.
        """
        if self.at is not None and time.monotonic() - self.at > grace_s:
            self.check()

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
    def kept(self) -> Path | None:
        """Where this node keeps checkpoints that are in the store, for whichever pod comes next; None: nowhere."""
        return None if ENV_PROCESS_FILE in self.env else self.workspace.root.parent / "kept"

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone writes to the run log."""
        return self.identity.rank == 0

    @property
    def others(self) -> range:
        """The other ranks, seen from rank 0."""
        return range(1, self.context.world_size)
