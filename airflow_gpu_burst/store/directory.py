"""A store in a directory: for a laptop, a shared volume, and every test that needs no server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote

from airflow_gpu_burst.store import files
from airflow_gpu_burst.store.interface import Entry, check_prefix, is_key
from airflow_gpu_burst.store.places import ABSENT, Places


class DirectoryStore:
    """
    Objects are files below one directory. Made when first written to.

    Unlike in S3, `a` and `a/b` cannot both exist. A process that is killed while it writes leaves a
    hidden file behind (`.gpu-burst-*`), never a half-written object. Symbolic links that lead out of the
    directory are refused.
    """

    def __init__(self, root: str) -> None:
        self._places = Places(root)
        self._root = self._places.root

    @property
    def uri(self) -> str:
        """`file:///...`."""
        return f"file://{quote(self._root)}"

    def get(self, key: str) -> bytes:
        """The whole object."""
        with self._places.opened(key, "get") as fd:
            return b"".join(iter(lambda: os.read(fd, files.CHUNK), b""))

    def put(self, key: str, data: bytes) -> None:
        """Write over whatever is there."""
        with self._places.appearing(key, "put") as fd:
            files.write_all(fd, data)

    def create(self, key: str, data: bytes) -> None:
        """Write if nothing is there: a hard link to a complete, synced file either comes to be or not."""
        with self._places.appearing(key, "create", once=True) as fd:
            files.write_all(fd, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        """Objects whose key begins with `prefix`, sorted by key."""
        folder = check_prefix(prefix).rpartition("/")[0]
        for entry in self._walk(folder):
            if entry.key.startswith(prefix):
                yield entry

    def delete(self, key: str) -> None:
        """Remove, together with the folders that it leaves empty."""
        path = self._places.path(key)
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno in ABSENT:
                return
            raise self._places.error(error, "delete", key) from error
        with suppress(OSError):
            files.sync_folder(os.path.dirname(path))
            while (path := os.path.dirname(path)) != self._root:
                os.rmdir(path)

    def _walk(self, folder: str) -> Iterator[Entry]:
        path = os.path.join(self._root, folder) if folder else self._root
        try:
            with os.scandir(path) as found:
                names = [(e.name + "/" if e.is_dir(follow_symlinks=False) else e.name, e) for e in found]
        except OSError as error:
            if error.errno in ABSENT:
                return
            raise self._places.error(error, "list", folder) from error
        # With their slash, folders sort among files as their keys do.
        for name, found_entry in sorted(names, key=lambda pair: pair[0]):
            key = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                yield from self._walk(key.removesuffix("/"))
            elif found_entry.is_file(follow_symlinks=False) and is_key(key):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield Entry(key, found_entry.stat(follow_symlinks=False).st_size)
