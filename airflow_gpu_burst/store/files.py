"""Local files: writing, syncing, and what an error of theirs means to a store."""

from __future__ import annotations

import errno
import os

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


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` until all is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(path: str) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
