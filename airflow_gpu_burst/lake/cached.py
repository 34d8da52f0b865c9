"""
Data files of a pin by way of the node's cache: fetched ahead of use, shared by the ranks of a node.

The cache is never in the way: a file that it has no room for, or that could not be fetched, is read as without it. A
file is fetched whole, whatever columns are read of it. That is worth it where files are read again (epochs, several
ranks), so there is a cache only where one is asked for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_gpu_burst.errors import GpuBurstError, SpecError
from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.store.interface import is_key
from airflow_gpu_burst.transfer import MIB, Mover, Span, open_mover
from airflow_gpu_burst.transfer.cache import Ahead, NodeCache, Wanted, half_of_free

if TYPE_CHECKING:
    from pyiceberg.io import FileIO, InputFile
    from pyiceberg.table import FileScanTask

ENV_FOLDER, ENV_SIZE = "GPU_BURST_CACHE", "GPU_BURST_CACHE_SIZE"

_log = logging.getLogger(__name__)


def cache_of(environ: Mapping[str, str]) -> NodeCache | None:
    """
    The cache that GPU_BURST_CACHE (a folder) and GPU_BURST_CACHE_SIZE (bytes; default: half of the free space) ask for.

    :raises SpecError: the size is no number.
    """
    folder, size = environ.get(ENV_FOLDER, ""), environ.get(ENV_SIZE, "")
    if not folder:
        return None
    if size and not size.isdecimal():
        raise SpecError(f"{ENV_SIZE}={size!r}: give a number of bytes, or leave it out for half of the free space")
    try:
        return NodeCache(Path(folder), int(size) if size else half_of_free(Path(folder)))
    except OSError as error:
        _log.warning("no cache in %s (%s): data is read without one. Name a folder that can be written", folder, error)
        return None


class DataFiles:
    """
    How to read the files of these tasks, in their order. To be closed.

    :param io: the way to the storage; asked for each time, since its credentials are renewed.
    """

    def __init__(self, cache: NodeCache, tasks: Sequence[FileScanTask], io: Callable[[], FileIO]) -> None:
        self._io = io
        self._paths = [task.file.file_path for task in tasks]
        self._movers: dict[StoreConfig, Mover] = {}
        self._lock = threading.Lock()
        self._ahead = Ahead(cache, [self._wanted(task) for task in tasks])
        self._warned = False

    def close(self) -> None:
        """Fetch no more."""
        self._ahead.close()
        for mover in self._movers.values():
            mover.close()

    @contextmanager
    def reading(self, number: int) -> Iterator[Any]:
        """A FileIO that finds the number-th file in the cache, and everything else where it was."""
        try:
            found = self._ahead.take(number)
        except (OSError, GpuBurstError) as error:
            if not self._warned:
                _log.warning(
                    "%s did not come into the cache, and is read from the storage: %s", self._paths[number], error
                )
            self._warned, found = True, None
        if found is None:
            yield self._io()
            return
        with closing(found):
            yield _Redirected(self._io(), self._paths[number], found.path)

    def _wanted(self, task: FileScanTask) -> Wanted:
        location, size = task.file.file_path, task.file.file_size_in_bytes
        return Wanted(location, size, lambda fd: self._fetch(location, size, fd))

    def _fetch(self, location: str, size: int, fd: int) -> None:
        io = self._io()
        ours = place(location, io.properties)
        if ours is None:
            _copy(io.new_input(location), fd)
        elif size:
            config, key = ours
            self._mover_for(config).fetch(key, [Span(0, size, fd)])

    def _mover_for(self, config: StoreConfig) -> Mover:
        with self._lock:  # another one after each renewal of the credentials
            if config not in self._movers:
                self._movers[config] = open_mover(config)
            return self._movers[config]


class _Redirected:
    """A FileIO in which one location is a file of this node."""

    def __init__(self, io: FileIO, location: str, path: Path) -> None:
        self._io, self._location, self._path = io, location, path
        self.properties = io.properties

    def new_input(self, location: str) -> InputFile:
        from pyiceberg.io.pyarrow import PyArrowFileIO

        return (
            PyArrowFileIO().new_input(str(self._path)) if location == self._location else self._io.new_input(location)
        )


def place(location: str, properties: Mapping[str, Any]) -> tuple[StoreConfig, str] | None:
    """Where this package's own engine finds a file; None: leave it to pyiceberg (other schemes, other signatures)."""
    parts = urlsplit(location)
    key = parts.path.removeprefix("/")
    other = ("s3.signer", "s3.role-arn", "s3.proxy-uri", "s3.anonymous", "s3.force-virtual-addressing")
    remote = str(properties.get("s3.remote-signing-enabled", "")).lower() == "true"
    plain = parts.scheme in ("s3", "s3a", "s3n") and not parts.query and not parts.fragment and is_key(key)
    if not plain or not properties.get("s3.endpoint") or remote or any(properties.get(name) for name in other):
        return None
    config = StoreConfig(
        uri=f"s3://{parts.netloc}",
        endpoint_url=str(properties["s3.endpoint"]),
        region=str(properties.get("s3.region", "")),
        ca_bundle=os.environ.get("AWS_CA_BUNDLE", ""),
        access_key_id=str(properties.get("s3.access-key-id", "")),
        secret_access_key=str(properties.get("s3.secret-access-key", "")),
        session_token=str(properties.get("s3.session-token", "")),
    )
    return config, key


def _copy(source: InputFile, fd: int) -> None:
    at = 0
    with source.open() as stream:
        while block := stream.read(MIB):
            view = memoryview(block)
            while view:
                count = os.pwrite(fd, view, at)
                view, at = view[count:], at + count
    os.ftruncate(fd, at)
