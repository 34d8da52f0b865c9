"""
One trainer at a time: on the local route, where no kubelet ends what a dead runtime leaves behind, and in a pod that
starts its trainer anew.

The trainer and all that it starts inherit the descriptor of a locked file: as long as the lock is held one of
them lives, whatever became of its parent. Which processes they are, the kernel tells: they carry the run's
environment (`/proc/<pid>/environ`), also after they have left group and session. A recorded process id would
prove nothing, since ids are used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from airflow_gpu_burst.contract import ENV_OWNER
from airflow_gpu_burst.errors import RunLogError
from airflow_gpu_burst.runtime.process import start_ticks
from airflow_gpu_burst.runtime.workspace import ENV_WORKSPACE

ENV_TRAINER_LOCK = "GPU_BURST_TRAINER_LOCK"
"""Set by the local route: the file whose lock tells that a trainer of this run key lives."""


class TrainerLock:
    """The lock of a run key's trainer; `fd` is handed down to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self, *, wait_s: float = 15.0) -> bool:
        """
        Take the lock; trainers that hold it are ended. Returns whether there was one.

        To be called by the present epoch only: whoever was superseded would end its successor's trainer.

        :raises RunLogError: it could not be had.
        """
        deadline = time.monotonic() + wait_s
        found = False
        while not self._try():
            found = True
            end_trainers(self.path)
            if time.monotonic() > deadline:
                raise RunLogError(
                    f"an earlier trainer of this run still holds {self.path}; end it (`fuser {self.path}` names it)"
                )
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """Let go."""
        os.close(self.fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def end_trainers(lock: Path, owner: str | None = None, *, wait_s: float = 10.0) -> None:
    """
    SIGKILL every process of the trainers that inherited a lock file.

    :param owner: only those of this submitted object. Whoever cancels an old generation must not hit its successor.
    """
    wanted = [f"{ENV_TRAINER_LOCK}={lock}".encode()]
    if owner is not None:
        wanted.append(f"{ENV_OWNER}={owner}".encode())
    _end(wanted, wait_s)


def end_workspace(root: Path, *, wait_s: float = 10.0) -> None:
    """SIGKILL every process of the trainers that have this workspace, also those that lead sessions of their own."""
    _end([f"{ENV_WORKSPACE}={root}".encode()], wait_s)


def _end(wanted: list[bytes], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while (pids := list(_trainers(wanted))) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                # The descriptor names the process, not the number: what is killed is what was looked at.
                descriptor = os.pidfd_open(pid)
                try:
                    if _is_trainer(pid, wanted):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                finally:
                    os.close(descriptor)
        time.sleep(0.02)


def _trainers(wanted: list[bytes]) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _is_trainer(int(entry.name), wanted):
            yield int(entry.name)


def _is_trainer(pid: int, wanted: list[bytes]) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    # Only a trainer has a workspace in its environment; its runtime, which shares the rest, does not.
    trainer = any(variable.startswith(f"{ENV_WORKSPACE}=".encode()) for variable in variables)
    return trainer and all(variable in variables for variable in wanted) and start_ticks(pid) is not None
