"""Sparse files: only where they have data is it fetched, so that holes come back as holes, whatever their size."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from airflow_gpu_burst.checkpoint.manifest import Extent
from airflow_gpu_burst.checkpoint.walking import Found, changed, unreadable
from airflow_gpu_burst.transfer import crc

_MIN_HOLE = 1 << 16  # smaller holes are read as data: one request is dearer than 64 KiB
_MAX_EXTENTS = 4096  # a file with more is treated as one without holes


def extents_of(path: Path, found: Found) -> tuple[Extent, ...] | None:
    """Where a sparse file has data, with the CRC of each piece; None: it has hardly any holes, or too many."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise unreadable(found.path, error) from error
    try:
        pieces = _pieces(fd, found.size)
        if pieces is None or sum(length for _, length in pieces) > found.size - _MIN_HOLE:
            return None
        extents = []
        for start, length in pieces:
            extents.append((start, length, crc.of_range(fd, start, length)))
        return tuple(extents)
    except crc.FileEnded as error:
        raise changed(found.path) from error
    finally:
        os.close(fd)


def combined(extents: Sequence[Extent], size: int) -> int:
    """CRC64NVME of a file of `size` bytes that holds these extents, and zeros around them."""

    def parts() -> Iterator[tuple[int, int]]:
        end = 0
        for start, length, part in (*extents, (size, 0, 0)):
            if start > end:
                yield _zeros(start - end), start - end
            if length:
                yield part, length
            end = start + length

    return crc.joined(parts())


@lru_cache(maxsize=1024)
def _zeros(length: int) -> int:
    """Of that many zeros, by doubling: no byte is read."""
    if length <= 64:
        return crc.of_bytes(bytes(length))
    half = (_zeros(length // 2), length // 2)
    return crc.joined([half, half, (_zeros(1), 1)] if length % 2 else [half, half])


def _pieces(fd: int, size: int) -> list[tuple[int, int]] | None:
    """Start and length of what is not a hole; None: more than are worth it."""
    pieces: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            return None
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start >= size:
            break
        if pieces and start - sum(pieces[-1]) < _MIN_HOLE:
            first = pieces.pop()[0]
            pieces.append((first, end - first))
        else:
            pieces.append((start, end - start))
        if len(pieces) > _MAX_EXTENTS:
            return None
    return pieces
