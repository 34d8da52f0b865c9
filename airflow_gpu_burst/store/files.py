"""Local files on either side of a store: read one that must not change, let one appear whole, map errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from airflow_gpu_burst.errors import StoreError, StoreForbidden, StoreFull, StoreUnavailable

CHUNK = 1 << 20  # bytes per read; larger ones gain nothing against the page cache

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EINTR}
_SHAPE = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


def local_error(error: OSError, doing: str, advice: str) -> StoreError:
    """The one place where an OSError gets a meaning. `advice` completes "free space there, or ..."."""
    text = f"{doing}: {error.strerror or error}"
    if error.errno in _FULL:
        return StoreFull(f"{text}. Nothing was left half-written; free space there, or {advice}")
    if error.errno in _FORBIDDEN:
        return StoreForbidden(f"{text}. Give user {os.getuid()} access there, or {advice}")
    if error.errno in _PASSING:
        return StoreUnavailable(f"{text}. Check the disk or the mount, then try again")
    if error.errno in _SHAPE:
        return StoreError(f"{text}: a name is used both as a file and as a folder. Choose another name")
    return StoreError(f"{text}. Correct the path, or {advice}")


@contextmanager
def reading(path: str) -> Iterator[tuple[int, int]]:
    """(file descriptor, size) of a file that must be the same at the end; else StoreError."""
    advice = "name a readable file"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise local_error(error, f"read {path}", advice) from error
    try:
        before = os.fstat(fd)
        yield fd, before.st_size
        after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StoreError(f"{path} changed while it was read: hand over files that are closed")
    finally:
        os.close(fd)


@contextmanager
def landing(path: str) -> Iterator[int]:
    """A file descriptor whose bytes appear under `path` when all went well; else nothing is left."""
    part = f"{path}.part"
    advice = "choose another folder"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise local_error(error, f"write {path}", advice) from error
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(part, path)
        sync_folder(os.path.dirname(path) or ".")
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise local_error(error, f"write {path}", advice) from error
        raise


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` until all is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def copy(source: int, target: int) -> None:
    """All bytes from the source's position on."""
    while chunk := os.read(source, CHUNK):
        write_all(target, chunk)


def sync_folder(path: str) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
