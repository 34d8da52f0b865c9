"""One object from the store: a large file, or several small ones that share it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from airflow_gpu_burst.checkpoint.manifest import Extent, File
from airflow_gpu_burst.checkpoint.placing import Placer
from airflow_gpu_burst.transfer.interface import Mover, Span


def extents(file: File) -> Sequence[Extent]:
    """Where a file has bytes, with the CRC of each piece."""
    if file.extents is not None:
        return file.extents
    return [(0, file.size, file.crc64nvme)] if file.size else []


def data_of(file: File) -> int:
    """Bytes of a file without its holes."""
    return sum(length for _, length, _ in extents(file))


class Fetcher:
    """
    :param tree: where files get their names.
    :param parts: where they are until they are whole; on the same file system.
    """

    def __init__(self, mover: Mover, tree: Path, parts: Path) -> None:
        self._mover, self._tree, self._parts = mover, tree, parts

    def fetch(self, files: Sequence[File], number: int) -> None:
        """
        Files of one object, verified.

        :param number: no other call has it.
        :raises ChecksumMismatch: they are not what was saved.
        :raises ObjectMissing: the store has lost the object.
        """
        part = self._parts / str(number)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with Placer(self._tree) as placer:
                if len(files) == 1 and files[0].offset is None:
                    self._whole(files[0], fd, part, placer)
                else:
                    self._several(files, fd, placer)
        finally:
            os.close(fd)
            part.unlink(missing_ok=True)

    def _whole(self, file: File, fd: int, part: Path, placer: Placer) -> None:
        os.ftruncate(fd, file.size)
        spans = [Span(start, length, fd, start, crc) for start, length, crc in extents(file)]
        if spans:
            self._mover.fetch(file.key, spans)
        os.fchmod(fd, file.mode)
        placer.move_in(part, file.path)

    def _several(self, files: Sequence[File], fd: int, placer: Placer) -> None:
        # Through one file on the disk: thousands of files could not all be open, and memory is the trainer's.
        spans = [Span(file.offset or 0, file.size, fd, file.offset or 0, file.crc64nvme) for file in files if file.size]
        if spans:
            self._mover.fetch(files[0].key, sorted(spans, key=lambda span: span.start))
        for file in sorted(files):
            target = placer.create(file.path)
            try:
                write(target, os.pread(fd, file.size, file.offset or 0), file.mode)
            finally:
                os.close(target)


def write(fd: int, data: bytes, mode: int) -> None:
    """A small file's content, then its mode."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fchmod(fd, mode)
