"""What a multipart upload leaves on NVMe, so that it goes on after this process was killed."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from airflow_gpu_burst.transfer.frozen import Identity

_VERSION = 1
_EVERY_S = 1.0
"""A kill loses the parts of so long; with 10,000 parts one writing takes 10 ms."""


@dataclass(kw_only=True)
class Progress:
    """
    A multipart upload half way.

    :param uri: of the store.
    :param checksums: the store took the checksum headers when it was begun.
    :param parts: ETag and CRC of each part that was sent, by number.
    """

    uri: str
    key: str
    upload_id: str
    part_size: int
    identity: Identity
    checksums: bool = True
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)


class StateFile:
    """
    Keeps a `Progress`. Safe for threads.

    A file that is torn, or of something else, counts as none: the upload then begins anew.

    :param path: None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._due = 0.0

    @property
    def kept(self) -> bool:
        """Whether there is a file at all."""
        return self._path is not None

    def load(self, uri: str, key: str) -> Progress | None:
        """What is kept of an upload of this key to this store."""
        if self._path is None:
            return None
        try:
            found = json.loads(self._path.read_bytes())
            device, inode, size, changed = map(int, found["identity"])
            progress = Progress(
                uri=str(found["uri"]),
                key=str(found["key"]),
                upload_id=str(found["upload_id"]),
                part_size=int(found["part_size"]),
                identity=(device, inode, size, changed),
                checksums=bool(found["checksums"]),
                parts={int(number): (str(etag), int(crc, 16)) for number, etag, crc in found["parts"]},
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        good = found.get("version") == _VERSION and progress.part_size > 0 and bool(progress.upload_id)
        return progress if good and (progress.uri, progress.key) == (uri, key) else None

    def save(self, progress: Progress, *, now: bool = False) -> None:
        """
        Write it down, but not more often than once a second unless `now`.

        A full disk is no reason to fail: uploads are what makes room on it. Only the going on is lost then.
        """
        if self._path is None or (not now and time.monotonic() < self._due):
            return
        with self._lock:
            parts = [[number, etag, f"{crc:x}"] for number, (etag, crc) in sorted(progress.parts.copy().items())]
            content = {
                "version": _VERSION,
                "uri": progress.uri,
                "key": progress.key,
                "upload_id": progress.upload_id,
                "part_size": progress.part_size,
                "identity": progress.identity,
                "checksums": progress.checksums,
                "parts": parts,
            }
            whole = self._path.with_name(f"{self._path.name}.new")
            # Without fsync: it is for a process that was killed. Torn by a power cut, it counts as none.
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                whole.write_text(json.dumps(content))
                os.replace(whole, self._path)
            except OSError:
                with suppress(OSError):
                    whole.unlink()
            self._due = time.monotonic() + _EVERY_S

    def drop(self) -> None:
        """The upload is over."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
