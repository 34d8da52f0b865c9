"""
A pod's own folder below the scratch folder, which it may share with other pods of the node (a host path on NVMe).

The runtime holds a lock beside its folder as long as it lives. So whoever comes later can tell what a killed pod left
behind from what a living one uses, without any clock or list of pods, and make room on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from airflow_gpu_burst.runtime.workspace import unwritable

_LOCK = ".gpu-burst-lock"
"""No other program's, in whatever folder we were told to use."""


class PodFolder:
    """
    The folder of this pod: `<scratch>/<pod UID>`, its lock beside it.

    :raises SpecError: the scratch folder cannot be written.
    """

    def __init__(self, scratch: Path, pod_uid: str) -> None:
        self.path = scratch / pod_uid
        self._lock_path = scratch / f"{pod_uid}{_LOCK}"
        self._lock: int | None = None
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            self._lock = self._hold()
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._let_go()
            raise unwritable(scratch, error) from error
        _sweep(scratch)

    def close(self, *, keep: bool = False, unsent: bool = False) -> None:
        """
        The run is over: nothing of it stays.

        :param keep: but for a person to look at: without a lock file nobody sweeps it.
        :param unsent: but until the next pod comes: it holds what the store did not take.
        """
        if not keep and not unsent:
            shutil.rmtree(self.path, ignore_errors=True)
        if keep or not unsent:
            with contextlib.suppress(OSError):
                self._lock_path.unlink()
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> int | None:
        """The locked descriptor; None where the file system has no locks, so that nobody sweeps there either."""
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Waits for a sweeper, which holds it for a moment and then removes the file.
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                os.close(lock)
                self._lock_path.unlink(missing_ok=True)
                return None
            if _is_at(lock, self._lock_path):
                return lock
            os.close(lock)


def _sweep(scratch: Path) -> None:
    """Remove the folders of pods that are dead. What is not ours to remove (another user's) stays."""
    for path in scratch.glob(f"*{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(lock, path):
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                    path.unlink()
            finally:
                os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
