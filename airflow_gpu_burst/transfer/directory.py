"""
Bulk bytes to and from a store in a directory: a laptop's disk, or a volume that all nodes mount.

An upload copies through one buffer per thread, whose CRC is taken between reading and writing: it is that of the bytes
that were written, for one read and one write of each. Reading them back would only show the page cache. A file appears
under its name when it is whole and synced. After a kill the copy begins anew, over what was left half way.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from airflow_gpu_burst.errors import ChecksumMismatch, StoreUnavailable
from airflow_gpu_burst.store import files
from airflow_gpu_burst.store.directory import DirectoryStore
from airflow_gpu_burst.store.places import Places
from airflow_gpu_burst.transfer import crc, ranges
from airflow_gpu_burst.transfer.flow import Flow, Halted, Stopped
from airflow_gpu_burst.transfer.frozen import Frozen, frozen
from airflow_gpu_burst.transfer.interface import MIB, Buffer, Mover, Settings, Span, Stored, Tally
from airflow_gpu_burst.transfer.pace import TokenBucket
from airflow_gpu_burst.transfer.ranges import NotWritten, Piece
from airflow_gpu_burst.transfer.together import all_of

_NO_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_QUIET_S = 10.0  # after so long without a transfer, the next one is a new beginning, of all ranks at once


class DirectoryMover:
    """
    See `Mover`. Files are read and written in pieces by up to `connections` threads, which live until `close`.

    :param root: the store's directory.
    """

    def __init__(self, root: str, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._places, self._store = Places(root), DirectoryStore(root)
        self.tally = Tally()
        self._flow = Flow(TokenBucket(self._settings.cap), self.tally)
        self._pool = ThreadPoolExecutor(self._settings.connections, thread_name_prefix="gpu-burst-transfer")
        self._lock = threading.Lock()
        self._under_way, self._ended_at = 0, 0.0

    @property
    def uri(self) -> str:
        """`file:///...`."""
        return self._store.uri

    def upload(self, key: str, path: Path, *, state: Path | None = None) -> Stored:
        """See `Mover.upload`. `state` is not needed."""

        def fill(target: int) -> tuple[int, int]:
            sum_ = self._copied(source, target)
            source.check()
            return sum_, source.size

        with self._transfer(), frozen(path) as source:
            return self._written(key, "upload", fill)

    def put(self, key: str, data: Buffer) -> Stored:
        """See `Mover.put`."""

        def fill(target: int) -> tuple[int, int]:
            view = memoryview(data)
            for at in range(0, len(view), self._flow.slice):
                files.write_all(target, self._let(view[at : at + self._flow.slice], sending=True))
            return crc.of_bytes(data), len(data)

        with self._transfer():
            return self._written(key, "put", fill)

    def fetch(self, key: str, spans: Sequence[Span], *, etag: str = "") -> None:
        """See `Mover.fetch`."""
        what = f"{key!r} in {self.uri}"
        with self._transfer(), self._places.opened(key, "fetch") as source:
            if etag and _etag(os.fstat(source)) != etag:
                raise ChecksumMismatch(f"{what} is another object than was asked for: read what it belongs to anew")

            def some(wanted: Sequence[Span]) -> Sequence[Piece]:
                found = ranges.pieces(wanted, gap=0)
                all_of(self._pool, found, lambda piece, halted: self._read(source, piece, what, halted))
                return found

            ranges.verified(what, spans, some, lambda count: self._flow.count(retries=count))

    def copy(self, source: str, target: str, size: int, *, to: Mover | None = None) -> None:
        """See `Mover.copy`. The kernel copies; some file systems then only share the blocks."""
        other = self if to is None else to
        if not isinstance(other, DirectoryMover):
            raise NotImplementedError("not the same kind of store: fetch and upload")

        with self._transfer(), self._places.opened(source, "copy") as fd:
            found = os.fstat(fd).st_size
            if found != size:
                raise ChecksumMismatch(
                    f"{source!r} in {self.uri} has {found} bytes, and was to have {size}: see what else writes there"
                )
            other._written(target, "copy", lambda out: (self._copied_by_kernel(fd, out, size), size))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Mover.delete`."""
        with self._transfer():
            for key in keys:
                self._store.delete(key)

    def abandon(self, key: str) -> None:
        """See `Mover.abandon`."""
        with self._transfer():
            self._places.abandon(key)

    def close(self) -> None:
        """Ends what is under way with StoreUnavailable."""
        self._flow.closed.set()
        self._pool.shutdown(cancel_futures=True)

    def _copied(self, source: Frozen, target: int) -> int:
        """All bytes of a file. Their CRC."""
        sum_ = at = 0
        block = memoryview(bytearray(min(self._flow.slice, MIB, max(source.size, 1))))
        while at < source.size:
            count = os.preadv(source.fd, [block[: source.size - at]], at)
            if not count:
                raise source.changed("was truncated")
            view = self._let(block[:count], sending=True)
            sum_ = crc.of_bytes(view, sum_)
            files.write_all(target, view)
            at += count
        return sum_

    def _copied_by_kernel(self, source: int, target: int, size: int) -> int:
        left = size
        while left:
            want = min(left, self._flow.slice)
            self._flow.take(want)
            self._flow.check(_never)
            try:
                count = os.copy_file_range(source, target, want)
            except OSError as error:
                if error.errno not in _NO_COPY:
                    raise
                count = os.sendfile(target, source, None, want)
            if not count:
                raise ChecksumMismatch(f"an object in {self.uri} became shorter while it was copied: copy it again")
            left -= count
        return 0

    def _read(self, source: int, piece: Piece, what: str, halted: Halted) -> None:
        block = memoryview(bytearray(min(self._flow.slice, MIB, piece.end - piece.start)))
        while not piece.done:
            count = os.preadv(source, [block[: piece.end - piece.at]], piece.at)
            if not count:
                raise ranges.too_short(what, piece.at, piece.end)
            self._flow.check(halted)
            try:
                piece.take(self._let(block[:count]))
            except NotWritten as error:
                raise ranges.not_written(error, what) from error

    def _let(self, view: memoryview, *, sending: bool = False) -> memoryview:
        """The same bytes, when they may go."""
        self._flow.check(_never)
        self._flow.take(len(view))
        self._flow.count(**{"bytes_sent" if sending else "bytes_received": len(view)})
        return view

    def _written(self, key: str, action: str, fill: Callable[[int], tuple[int, int]]) -> Stored:
        """
        :param fill: writes an object's bytes, tells their CRC and number.
        """
        with self._places.appearing(key, action) as fd:
            sum_, size = fill(fd)
            found = os.fstat(fd)
            if found.st_size != size:
                raise ChecksumMismatch(
                    f"{action} {key!r} in {self.uri}: {found.st_size} bytes are there, {size} were written. Look at "
                    "the file system's health"
                )
        self._flow.count(requests=1)
        return Stored(key=key, size=size, crc64nvme=sum_, etag=_etag(found))

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        try:
            with self._lock:
                quiet = not self._under_way and time.monotonic() - self._ended_at > _QUIET_S
                self._under_way += 1
            if quiet:
                self._flow.pause(self._settings.stagger_s, _never)
            self._flow.check(_never)
            yield
        except Stopped as stopped:
            raise StoreUnavailable(f"{self.uri}: given up, the mover is closed. Open another") from stopped
        finally:
            with self._lock:
                self._under_way -= 1
                self._ended_at = time.monotonic()


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"


def _never() -> bool:
    return False
