"""A file that is being uploaded, and must not change meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from airflow_gpu_burst.errors import CheckpointError
from airflow_gpu_burst.store.files import local_error

Identity = tuple[int, int, int, int]
"""Device, inode, size, time of the last change in ns."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """
    An open file, and what it was when it was opened.

    :param identity: see `Identity`.
    """

    path: Path
    fd: int
    identity: Identity

    @property
    def size(self) -> int:
        """Bytes, when it was opened."""
        return self.identity[2]

    def check(self) -> None:
        """
        :raises CheckpointError: under its name there is not the same file any more, or it was written to.
        """
        try:
            same = _identity(os.stat(self.path)) == self.identity
        except OSError:
            same = False
        if not same:
            raise self.changed()

    def changed(self, what: str = "changed") -> CheckpointError:
        """The error that says so."""
        return CheckpointError(
            f"{self.path.name} {what} while it was uploaded; write the whole checkpoint before saying that it is "
            "ready, and leave it alone from then on"
        )


@contextmanager
def frozen(path: Path) -> Iterator[Frozen]:
    """
    Open a file to upload it.

    :raises CheckpointError: there is none, or it is a folder or the like.
    :raises StoreError: it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is gone before it was uploaded; leave a checkpoint alone") from error
    except OSError as error:
        raise local_error(error, f"read {path}", "name a readable file") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path.name} is no plain file; save plain files only")
        yield Frozen(path, fd, _identity(found))
    finally:
        os.close(fd)


def _identity(found: os.stat_result) -> Identity:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
