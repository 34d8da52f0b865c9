"""A folder into the store: data first, in parallel and able to go on; then the manifest that names it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path

from airflow_gpu_burst.checkpoint.journal import Journal
from airflow_gpu_burst.checkpoint.manifest import Entries, File, Manifest, encode
from airflow_gpu_burst.checkpoint.packing import AT_ONCE, PACK, SMALL, batches, object_name, read_pack
from airflow_gpu_burst.checkpoint.sparse import combined, extents_of
from airflow_gpu_burst.checkpoint.together import Meter, Progress, Task, silent, together
from airflow_gpu_burst.checkpoint.walking import Found, Walked, changed, check_same, walk
from airflow_gpu_burst.store import Store
from airflow_gpu_burst.transfer import crc
from airflow_gpu_burst.transfer.interface import Mover

LARGE_AT_ONCE = 4
"""Large files under way together: while one is completed, the others keep the connections busy."""


def save(
    mover: Mover, folder: Path, prefix: str, *, state: Path | None = None, progress: Progress = silent
) -> Manifest:
    """
    Bring everything under `folder` below `prefix`, the manifest last.

    Nothing is copied on the way: the folder must stay as it is until this returns, which is checked. Modification times
    and owners are not kept; permission bits, links, hard links, holes and empty folders are.

    :param prefix: one that no other folder uses. The same folder again goes on where a killed save came to; a file that
        was written anew meanwhile gets a key of its own.
    :param state: a folder for what is needed to go on. It is the caller's to remove, with the folder.
    :param progress: told bytes done and bytes in all, a few times a second, in this thread.
    :raises CheckpointError: a file that changed meanwhile, a link that leaves the folder, a special file, or a name
        that is not good everywhere.
    """
    walked = walk(folder)
    journal = Journal(state, prefix)
    saving = _Saving(mover, folder, prefix, journal)
    meter = Meter(mover, walked.size, progress)
    files: list[File] = []
    missing: list[Found] = []
    for found in walked.files:
        if (file := journal.done(found)) is not None:
            files.append(file)
            meter.free += file.size
        else:
            missing.append(found)
    large, packs = saving.tasks(missing, files.extend)
    together([(LARGE_AT_ONCE, large), (AT_ONCE, packs)], meter.tell)
    check_same(folder, walked)
    manifest, data = encode(_entries(files, walked), prefix)
    mover.put(manifest.key, data)
    meter.whole()
    return manifest


def save_bytes(store: Store, data: bytes, prefix: str, name: str) -> Manifest:
    """A tree of one file, given as bytes. For what is small, and by a process that has no `Mover`."""

    key = f"{prefix}/data/{name}"
    if data:
        store.put(key, data)
    file = File(name, len(data), crc.of_bytes(data), key if data else "")
    manifest, encoded = encode(Entries(files=(file,)), prefix)
    store.put(manifest.key, encoded)
    return manifest


class _Saving:
    """How files of one folder get below one prefix."""

    def __init__(self, mover: Mover, folder: Path, prefix: str, journal: Journal) -> None:
        self._mover, self._folder, self._prefix, self._journal = mover, folder, prefix, journal
        self._buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()

    def tasks(self, missing: list[Found], saved: Callable[[list[File]], None]) -> tuple[list[Task], list[Task]]:
        """For large files, the largest first, since they take longest; and for packs of small ones."""
        small = [found for found in missing if found.size < SMALL]
        large = sorted((found for found in missing if found.size >= SMALL), key=lambda found: -found.size)
        buffer_size = min(PACK, sum(found.size for found in small))
        for _ in range(AT_ONCE):
            self._buffers.put(bytearray(buffer_size))
        return (
            [partial(self._large, found, saved) for found in large],
            [partial(self._pack, batch, saved) for batch in batches(small)],
        )

    def _large(self, found: Found, saved: Callable[[list[File]], None]) -> None:
        name = object_name([found])
        path = self._folder / found.path
        stored = self._mover.upload(f"{self._prefix}/data/{name}", path, state=self._journal.upload_state(name))
        extents = extents_of(path, found) if found.sparse else None
        if stored.size != found.size or (extents is not None and combined(extents, found.size) != stored.crc64nvme):
            raise changed(found.path)
        file = File(found.path, found.size, stored.crc64nvme, stored.key, None, found.mode, extents)
        self._journal.note([(found, file)])
        saved([file])

    def _pack(self, batch: list[Found], saved: Callable[[list[File]], None]) -> None:
        buffer = self._buffers.get()
        try:
            key = f"{self._prefix}/data/{object_name(batch)}"
            files = read_pack(self._folder, batch, key, memoryview(buffer))
            size = sum(file.size for file in files)
            if size:
                self._mover.put(key, memoryview(buffer)[:size])
        finally:
            self._buffers.put(buffer)
        self._journal.note(list(zip(batch, files, strict=True)))
        saved(files)


def _entries(files: list[File], walked: Walked) -> Entries:
    return Entries(files=tuple(sorted(files)), folders=walked.folders, links=walked.links, same=walked.same)
