"""
Immutable files on the node's NVMe, fetched once and shared by its ranks.

What a file is called in the cache follows from its name and size, so that one which changed is another. Processes agree
by locks of files alone: who fills one holds its `.part`, who reads one holds it shared, and only what nobody holds is
removed, the longest unused first. A kill releases the locks; what it left half way is filled anew, or swept.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PART = ".part"
_LOCK = "lock"
DEPTH = 2
"""Files that are fetched ahead: while one is read, the next comes, and one more makes up for a slow one."""

Fill = Callable[[int], None]
"""Writes a whole file to a descriptor; an error means that there is no such file."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    A file that never changes.

    :param name: e.g. its URI.
    :param size: in bytes.
    """

    name: str
    size: int
    fill: Fill

    @property
    def digest(self) -> str:
        """Its name in the cache."""
        return hashlib.sha256(f"{self.size} {self.name}".encode()).hexdigest()


class Held:
    """A file of the cache, which stays until it is let go of."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    def close(self) -> None:
        """It may be removed from now on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class NodeCache:
    """
    Safe for threads and processes.

    :param root: a folder of this node, made if need be; nothing else may lie there.
    :param limit: bytes that it may hold, files half way included.
    :raises OSError: the folder cannot be used.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root, self._limit = root, limit
        root.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def take(self, wanted: Wanted) -> Held | None:
        """
        The file, fetched if it is not there; None: there is no room, since all the rest is in use.

        Waits while another process fetches the same one.

        :raises OSError: the disk does not take it; and whatever `fill` raises.
        """
        path = self._root / wanted.digest
        while True:
            held = self._held(path, wanted.size)
            if held is not None:
                return held
            part = _locked(path.with_suffix(_PART), wait=True)
            if part is None:  # whoever had it is done with it
                continue
            placed = False
            try:
                if not path.exists():
                    placed = self._filled(part, path, wanted)
                    if not placed:
                        return None
            finally:
                if not placed:
                    path.with_suffix(_PART).unlink(missing_ok=True)
                os.close(part)

    def _filled(self, fd: int, path: Path, wanted: Wanted) -> bool:
        """Whether there was room."""
        if not self._reserve(fd, wanted.size):
            return False
        wanted.fill(fd)
        size = os.fstat(fd).st_size
        if size != wanted.size:
            raise OSError(f"{wanted.name} has {size} bytes, and was to have {wanted.size}")
        os.fdatasync(fd)  # a file of zeros after a power cut would be taken for the real one
        os.rename(path.with_suffix(_PART), path)
        return True

    def _held(self, path: Path, size: int) -> Held | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_at(fd, path) and os.fstat(fd).st_size == size:
            os.utime(fd)  # used now
            return Held(path, fd)
        os.close(fd)
        return None

    def _reserve(self, fd: int, size: int) -> bool:
        """Make room, and occupy it: by its size, so that others count it."""
        with self._alone():
            files = sorted(self._files())
            used = sum(length for _, length, _ in files)
            for _, length, path in files:
                if used + size <= self._limit:
                    break
                if path.suffix != _PART and _removed(path):
                    used -= length
            if used + size > self._limit:
                return False
            os.ftruncate(fd, size)
            return True

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """When it was last used, how large it is."""
        for path in self._root.iterdir():
            with suppress(FileNotFoundError):  # placed or given up at this moment
                found = path.stat()
                yield found.st_mtime_ns, found.st_size, path

    def _sweep(self) -> None:
        with self._alone():
            for path in self._root.glob(f"*{_PART}"):
                _removed(path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fd = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


class Ahead:
    """
    Files in the order of their use, of which the next ones are fetched ahead. To be closed.

    :param depth: how many.
    """

    def __init__(self, cache: NodeCache, files: Sequence[Wanted], *, depth: int = DEPTH) -> None:
        self._cache, self._files, self._depth = cache, files, depth
        self._pool = ThreadPoolExecutor(max(1, depth), thread_name_prefix="gpu-burst-prefetch")
        self._coming: dict[int, Future[Held | None]] = {}

    def take(self, index: int) -> Held | None:
        """
        A file, to be closed after use; None: there is no room for it. Each is taken once, in their order.

        :raises OSError: the disk does not take it; and whatever its `fill` raises.
        """
        for number in range(index, min(index + self._depth + 1, len(self._files))):
            if number not in self._coming:
                self._coming[number] = self._pool.submit(self._cache.take, self._files[number])
        # Fetched ahead, it may have found no room before its predecessor was let go of.
        return self._coming.pop(index).result() or self._cache.take(self._files[index])

    def close(self) -> None:
        """Fetch no more, let go of what was fetched."""
        self._pool.shutdown(cancel_futures=True)
        for future in self._coming.values():
            if not future.cancelled() and not future.exception() and (held := future.result()):
                held.close()


def half_of_free(root: Path) -> int:
    """Half of what the disk has free, or would have without this cache."""
    root.mkdir(parents=True, exist_ok=True)
    held = 0
    for path in root.iterdir():
        with suppress(FileNotFoundError):
            held += path.stat().st_size
    return (shutil.disk_usage(root).free + held) // 2


def _removed(path: Path) -> bool:
    """Remove a file unless somebody holds it."""
    fd = _locked(path, wait=False, create=False)
    if fd is None:
        return False
    try:
        os.unlink(path)
    finally:
        os.close(fd)
    return True


def _locked(path: Path, *, wait: bool, create: bool = True) -> int | None:
    """A file for oneself; None: it is held, or has got another name since."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if _is_at(fd, path):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
