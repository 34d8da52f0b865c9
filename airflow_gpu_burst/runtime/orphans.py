"""
One trainer at a time on the local route, where no kubelet ends what a dead runtime leaves behind.

The trainer inherits the descriptor of a locked file. As long as the lock is held a trainer of this run key
lives, whatever became of its parent; a new epoch ends it first. A process id alone proves nothing: it is
used again, so it is compared with the process's start time and the machine's boot.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from airflow_gpu_burst.errors import RunLogError
from airflow_gpu_burst.runtime.process import boot_id, kill_group, start_ticks
from airflow_gpu_burst.runtime.workspace import write_json


class TrainerLock:
    """The lock of a run key's trainer; `fd` is handed down to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record = path.with_suffix(".json")
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self, *, wait_s: float = 15.0) -> bool:
        """
        Take the lock; an orphan that holds it is ended. Returns whether there was one.

        :raises RunLogError: it could not be ended.
        """
        if self._try():
            return False
        end_orphan(self.path)
        deadline = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() > deadline:
                raise RunLogError(
                    f"an earlier trainer of this run still holds {self.path}; end it (`fuser {self.path}` names it)"
                )
            time.sleep(0.05)
        return True

    def record(self, pid: int, owner: str) -> None:
        """Remember which process is the trainer, and of which submitted object."""
        write_json(
            self._record,
            {"pid": pid, "ticks": start_ticks(pid), "boot": boot_id(), "owner": owner, "at": time.time()},
        )

    def close(self) -> None:
        """Let go."""
        os.close(self.fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def end_orphan(path: Path, owner: str | None = None) -> None:
    """
    End the trainer that the record beside the lock names, if it still is that process.

    :param owner: only if it is this object's. Whoever cancels an old generation must not hit its successor.
    """
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if owner not in (None, record["owner"]):
        return
    if record["boot"] == boot_id() and record["ticks"] is not None:
        kill_group(int(record["pid"]), int(record["ticks"]))
