"""
Room on the node's NVMe, and the committed checkpoints that are kept there as long as there is some.

`<root>/<run>-<rank>/<SHA-256 of the manifest>/` is a kept copy; a lock beside it says that somebody restores from it.
The root is shared by all pods of a node. What lies there is in the store as well: it may go at any time.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from airflow_gpu_burst.errors import StoreFull

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOCK = ".lock"


def free(folder: Path) -> int:
    """Bytes that may still be written where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class Kept:
    """
    The kept copies of a node.

    :param root: their folder, on the file system of the pods' scratch folders. Made when first needed.
    """

    root: Path

    def keep(self, folder: Path, *, run: str, rank: int, sha256: str, most: int = 1) -> bool:
        """
        Move a checkpoint that is in the store and committed here, for whoever restores it next on this node.

        False: it could not be, and stays where it is. Nothing depends on it.

        :param run: names the run key, e.g. by its digest.
        :param sha256: of its manifest.
        :param most: so many of this run and rank stay, the newest.
        """
        group = self.root / f"{run}-{rank}"
        copy = group / sha256
        try:
            group.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove(copy)  # an older one of the same content
            _lock_file(copy).touch()
            folder.rename(copy)
        except (OSError, _InUse):
            return False
        for old in self._oldest_first([group])[:-most]:
            with suppress(_InUse):
                _remove(old)
        return True

    def folders(self, run: str) -> list[Path]:
        """Where copies of a run may be, for `restore(local=...)`."""
        return sorted(group for group in self._groups() if group.name.rpartition("-")[0] == run)

    def forget(self, run: str) -> None:
        """The run is over: its copies go."""
        for group in self.folders(run):
            for copy in self._oldest_first([group]):
                with suppress(_InUse):
                    _remove(copy)
            with suppress(OSError):
                group.rmdir()

    def make_room(self, need: int, where: Path) -> None:
        """
        See that `need` bytes can be written at `where`; copies go for it, the oldest of all runs first, but none that
        somebody restores from.

        :raises StoreFull: there is not enough room even so; says how much is missing.
        """
        copies = self._oldest_first(self._groups())
        while (left := free(where)) < need:
            if not copies:
                raise StoreFull(
                    f"{need} bytes are needed at {where}, and {left} are free: {need - left} are missing. Free space "
                    "there, give the pod a larger scratch volume, or save smaller checkpoints"
                )
            with suppress(_InUse, OSError):
                _remove(copies.pop(0))

    def _groups(self) -> list[Path]:
        try:
            return [group for group in self.root.iterdir() if group.is_dir() and not group.is_symlink()]
        except OSError:
            return []

    def _oldest_first(self, groups: list[Path]) -> list[Path]:
        found = []
        for group in groups:
            with suppress(OSError):  # another user's
                found += [(_kept_at(copy), copy) for copy in group.iterdir() if _SHA256.fullmatch(copy.name)]
        return [copy for _, copy in sorted(found)]


@contextmanager
def held(copy: Path) -> Iterator[bool]:
    """
    As long as it is held, a kept copy is not removed. Gives whether it is there.

    :param copy: a kept copy, or where one may be.
    """
    lock = None
    try:
        if copy.is_dir():
            with suppress(OSError):
                lock = _locked(copy, fcntl.LOCK_SH)
        yield lock is not None and copy.is_dir()
    finally:
        if lock is not None:
            os.close(lock)


class _InUse(Exception):
    """Somebody restores from it."""


def _remove(copy: Path) -> None:
    """:raises _InUse: it stays."""
    try:
        lock = _locked(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _InUse from error
    try:
        # Killed half way, it leaves half a copy: every file of one is checked before it is used.
        shutil.rmtree(copy, ignore_errors=True)
        _lock_file(copy).unlink(missing_ok=True)
    finally:
        os.close(lock)


def _locked(copy: Path, how: int) -> int:
    """A descriptor of the copy's lock; the file may be removed and made anew while one waits for it."""
    path = _lock_file(copy)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _lock_file(copy: Path) -> Path:
    return copy.with_name(copy.name + _LOCK)


def _kept_at(copy: Path) -> int:
    try:
        return _lock_file(copy).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
