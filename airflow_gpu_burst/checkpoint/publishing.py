"""
A saved tree under its own names, for those who know nothing of manifests: `<prefix>/config.json`, ..., and a marker.

Readers go by the marker: it is written last, and says what there is. Before anything else a claim is laid beside the
folder, so that two different trees never mix under one prefix: whoever finds the claim or the marker of another one
touches nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from airflow_gpu_burst.checkpoint.manifest import Entries, File
from airflow_gpu_burst.checkpoint.reading import read_manifest
from airflow_gpu_burst.checkpoint.together import Meter, Progress, silent, together
from airflow_gpu_burst.errors import CheckpointError, ObjectExists, ObjectMissing, PromotionConflict
from airflow_gpu_burst.store import Store, check_key
from airflow_gpu_burst.transfer.interface import Mover, Span

MARKER = "COMMIT"
"""Name of the marker in the folder: JSON, every file with size and CRC64NVME."""
CLAIM = ".claim"
"""End of the key of a claim; what stands before it is the folder."""
VERSION = 1
"""Of the form of the marker."""
_AT_ONCE = 4


def publish_tree(
    mover: Mover,
    manifest: tuple[str, str],
    *,
    to: Mover,
    store: Store,
    prefix: str,
    scratch: Path | None = None,
    progress: Progress = silent,
) -> int:
    """
    Make the files of a tree appear as `<prefix>/<path>` in a store; returns their bytes.

    May be repeated, also by another process at the same time: the same content is fine, and what was cut off is brought
    to its end. The server copies where it can; else, and for small files, the bytes go through this machine. Links
    become files of their own; empty folders, modes and holes have no place in an object store.

    :param mover: of the store where the tree is.
    :param manifest: its (key, SHA-256).
    :param to: of the store where it is to be published.
    :param store: that store; for the marker, which is created once.
    :param prefix: the folder, e.g. `models/yield-rca/3f2a-g1`.
    :param scratch: a folder for files that no server can copy; None: the system's for temporary files.
    :raises PromotionConflict: there is, or is about to be, something else.
    :raises CheckpointError: a file is called like the marker, or a link leads to no file.
    """
    files = _under_names(read_manifest(mover, *manifest))
    for path in files:
        check_key(f"{prefix}/{path}")
    marker = _marker(files)
    size = sum(file.size for file in files.values())
    if _is_there(store, f"{prefix}/{MARKER}", marker):
        return size
    claim = f"{prefix}{CLAIM}"
    _create(store, claim, marker)
    try:
        _is_there(store, f"{prefix}/{MARKER}", marker)  # a claim is lifted after the marker was written: look again
    except PromotionConflict:
        store.delete(claim)
        raise
    publisher = _Publisher(mover, to, prefix, scratch)
    meter = Meter(mover, size, progress)
    items = sorted(files.items(), key=lambda item: (item[1].key, item[1].offset or 0))
    groups = [list(group) for _, group in groupby(items, key=lambda item: item[1].key)]
    together([(_AT_ONCE, [partial(publisher.publish, group) for group in groups])], meter.tell)
    _create(store, f"{prefix}/{MARKER}", marker)
    store.delete(claim)
    meter.whole()
    return size


class _Publisher:
    def __init__(self, mover: Mover, to: Mover, prefix: str, scratch: Path | None) -> None:
        self._mover, self._to, self._prefix, self._scratch = mover, to, prefix, scratch

    def publish(self, group: Sequence[tuple[str, File]]) -> None:
        """The files of one object."""
        for path, file in group:
            target = f"{self._prefix}/{path}"
            if not file.size:
                self._to.put(target, b"")
            elif file.offset is not None:
                self._put(file, target)
            else:
                self._copy(file, target)

    def _put(self, file: File, target: str) -> None:
        fd = os.memfd_create("file", os.MFD_CLOEXEC)
        try:
            self._mover.fetch(file.key, [Span(file.offset or 0, file.size, fd, 0, file.crc64nvme)])
            self._to.put(target, os.pread(fd, file.size, 0))
        finally:
            os.close(fd)

    def _copy(self, file: File, target: str) -> None:
        try:
            self._mover.copy(file.key, target, file.size, to=self._to)
        except NotImplementedError:
            with tempfile.NamedTemporaryFile(dir=self._scratch) as part:
                self._mover.fetch(file.key, [Span(0, file.size, part.fileno(), 0, file.crc64nvme)])
                self._to.upload(target, Path(part.name))


def _under_names(entries: Entries) -> Mapping[str, File]:
    """Path → file, links followed."""
    files = {file.path: file for file in entries.files}
    files |= {path: files[same_as] for path, same_as in entries.same}
    links = dict(entries.links)
    for path in links:
        file = files.get(_led_to(path, links))
        if file is None:
            raise CheckpointError(
                f"link {path!r} of the model leads to {links[path]!r}, which is no file; put the files themselves there"
            )
        files[path] = file
    if MARKER in files:
        raise CheckpointError(
            f"a file of the model is called {MARKER!r}, like the marker of what is complete: rename it"
        )
    return files


def _led_to(path: str, links: Mapping[str, str]) -> str:
    """Where a link ends that leads through none but links to files."""
    for _ in range(len(links)):
        if path not in links:
            break
        path = os.path.normpath(f"{os.path.dirname(path)}/{links[path]}").lstrip("/")
    return path


def _marker(files: Mapping[str, File]) -> bytes:
    listed = [
        {"path": path, "size": file.size, "crc64nvme": f"{file.crc64nvme:016x}"} for path, file in sorted(files.items())
    ]
    return json.dumps({"version": VERSION, "files": listed}, ensure_ascii=False, separators=(",", ":")).encode()


def _create(store: Store, key: str, data: bytes) -> None:
    """:raises PromotionConflict: there is something else."""
    try:
        store.create(key, data)
    except ObjectExists:
        if not _is_there(store, key, data):
            _create(store, key, data)  # a claim that was lifted just now


def _is_there(store: Store, key: str, data: bytes) -> bool:
    """:raises PromotionConflict: there is something else."""
    try:
        found = store.get(key)
    except ObjectMissing:
        return False
    if found != data:
        raise PromotionConflict(
            f"{key} is of another content: that name and version is taken. Publish under another one, or, if nothing "
            "is being published there and nobody uses it, delete what lies there"
        )
    return True
