"""What a save has brought into the store so far, on the node's disk, for the save that goes on after it was killed."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path

from airflow_gpu_burst.checkpoint.manifest import File
from airflow_gpu_burst.checkpoint.walking import Found


class Journal:
    """
    A line for every finished file. Nothing is synced: it need only outlive a process, and a node that loses power loses
    the checkpoint on its NVMe as well. A disk that is full costs the lines, not the save, which is what makes room.

    :param folder: where it is kept, made if need be; None: nowhere, and nothing is gone on with.
    :param prefix: of the save: lines of another one do not count.
    """

    def __init__(self, folder: Path | None, prefix: str) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._done: dict[tuple[object, ...], File] = {}
        if folder is None:
            return
        self._path = folder / "done.jsonl"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for line in self._path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is half a line
                self._take(line, prefix)

    def done(self, found: Found) -> File | None:
        """The entry of a file that is in the store exactly as it is now."""
        file = self._done.get((found.path, *found.identity))
        return None if file is None else file._replace(mode=found.mode)

    def note(self, pairs: Sequence[tuple[Found, File]]) -> None:
        """These are in the store."""
        if self._folder is None:
            return
        lines = [json.dumps([*found.identity, *file]).encode() + b"\n" for found, file in pairs]
        with self._lock, contextlib.suppress(OSError), self._path.open("ab") as out:
            out.write(b"".join(lines))

    def upload_state(self, name: str) -> Path | None:
        """Where the state of a large file's upload is kept."""
        return None if self._folder is None else self._folder / f"{name}.upload"

    def _take(self, line: bytes, prefix: str) -> None:
        with contextlib.suppress(ValueError, TypeError):  # a torn line: its file is sent again
            device, inode, size, mtime_ns, *fields = json.loads(line)
            *rest, extents = fields
            pieces = None if extents is None else tuple((start, length, crc) for start, length, crc in extents)
            file = File._make([*rest, pieces])
            if file.key.startswith(f"{prefix}/") or not file.size:
                self._done[file.path, device, inode, size, mtime_ns] = file
