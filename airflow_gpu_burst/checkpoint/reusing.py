"""A file from this node instead of the store: taken only if it has the size and the CRC that the manifest says."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from airflow_gpu_burst.checkpoint.fetching import extents
from airflow_gpu_burst.checkpoint.manifest import File
from airflow_gpu_burst.checkpoint.placing import Placer
from airflow_gpu_burst.store.files import CHUNK, write_all
from airflow_gpu_burst.transfer import crc

_NO_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}


def reuse(placer: Placer, file: File, copies: Sequence[Path]) -> bool:
    """
    Whether the file is in its place now, from what an earlier restore has left there, or from one of the copies.

    What was placed is verified, not what was read: it is the same bytes then, whatever happened meanwhile.
    """
    there = placer.existing(file.path)
    if there is not None:
        try:
            if _is(there, file):
                os.fchmod(there, file.mode)
                return True
        finally:
            os.close(there)
    return any(_copied(placer, file, copy) for copy in copies)


def _copied(placer: Placer, file: File, copy: Path) -> bool:
    try:
        source = os.open(copy / file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
            return False
        target = placer.create(file.path)
        try:
            os.ftruncate(target, file.size)
            for start, length, _ in extents(file):
                _copy(source, target, start, length)
            os.fchmod(target, file.mode)
            return _is(target, file)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _is(fd: int, file: File) -> bool:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
        return False
    with suppress(crc.FileEnded, OSError):  # also a bad block of the NVMe: the store has another copy
        return all(crc.of_range(fd, start, length) == expected for start, length, expected in extents(file))
    return False


def _copy(source: int, target: int, start: int, length: int) -> None:
    """Within the file system, without its bytes where that has reflinks; else through memory."""
    end = start + length
    while start < end:
        try:
            n = os.copy_file_range(source, target, end - start, start, start)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            _copy_by_hand(source, target, start, end)
            return
        if n == 0:  # it has become shorter: its CRC will say so
            return
        start += n


def _copy_by_hand(source: int, target: int, start: int, end: int) -> None:
    os.lseek(target, start, os.SEEK_SET)
    while start < end and (data := os.pread(source, min(CHUNK, end - start), start)):
        write_all(target, data)
        start += len(data)
