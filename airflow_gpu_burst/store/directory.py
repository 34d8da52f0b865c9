"""A store in a directory: for a laptop, a shared volume, and every test that needs no server."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote

from airflow_gpu_burst.errors import ObjectExists, ObjectMissing, StoreError
from airflow_gpu_burst.store import files
from airflow_gpu_burst.store.interface import TEMPORARY, Entry, check_key, check_prefix, is_key

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_ADVICE = "set GPU_BURST_STORE to another directory"
_TRIES = 20  # a writer against others that delete the last object of the same folder


class DirectoryStore:
    """
    Objects are files below one directory. Made when first written to.

    Unlike in S3, `a` and `a/b` cannot both exist. A process that is killed while it writes leaves a
    hidden file behind (`.gpu-burst-*`), never a half-written object. Symbolic links that lead out of the
    directory are refused.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    @property
    def uri(self) -> str:
        """`file:///...`."""
        return f"file://{quote(self._root)}"

    def get(self, key: str) -> bytes:
        """The whole object."""
        with self._opened(key, "get") as fd:
            return b"".join(iter(lambda: os.read(fd, files.CHUNK), b""))

    def put(self, key: str, data: bytes) -> None:
        """Write over whatever is there."""
        self._write(key, "put", lambda fd: files.write_all(fd, data), os.replace)

    def create(self, key: str, data: bytes) -> None:
        """Write if nothing is there: a hard link to a complete, synced file either comes to be or not."""
        self._write(key, "create", lambda fd: files.write_all(fd, data), self._link)

    def upload(self, key: str, path: str) -> None:
        """Copy a file into the store."""
        with files.reading(path) as (source, _size):
            self._write(key, "upload", lambda fd: files.copy(source, fd), os.replace)

    def download(self, key: str, path: str) -> None:
        """Copy an object to a file."""
        with self._opened(key, "download") as source, files.landing(path) as target:
            files.copy(source, target)

    def list(self, prefix: str) -> Iterator[Entry]:
        """Objects whose key begins with `prefix`, sorted by key."""
        folder = check_prefix(prefix).rpartition("/")[0]
        for entry in self._walk(folder):
            if entry.key.startswith(prefix):
                yield entry

    def delete(self, key: str) -> None:
        """Remove, together with the folders that it leaves empty."""
        path = self._path(key)
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return
            raise self._mapped(error, "delete", key) from error
        with suppress(OSError):
            files.sync_folder(os.path.dirname(path))
            while (path := os.path.dirname(path)) != self._root:
                os.rmdir(path)

    def _path(self, key: str) -> str:
        path = os.path.join(self._root, *check_key(key).split("/"))
        parent = os.path.realpath(os.path.dirname(path))
        if parent != self._root and not parent.startswith(self._root.rstrip("/") + "/"):
            raise StoreError(f"key {key!r} leads out of {self._root} by a symbolic link: remove the link")
        return path

    @contextmanager
    def _opened(self, key: str, action: str) -> Iterator[int]:
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _ABSENT:
                raise ObjectMissing(f"{action} {key!r}: not in {self._root}") from error
            raise self._mapped(error, action, key) from error
        try:
            yield fd
        except OSError as error:
            if error.errno in _ABSENT:  # a directory can be opened, but not read
                raise ObjectMissing(f"{action} {key!r}: not in {self._root}") from error
            raise self._mapped(error, action, key) from error
        finally:
            os.close(fd)

    def _write(self, key: str, action: str, fill: Callable[[int], None], publish: Callable[[str, str], None]) -> None:
        path = self._path(key)
        try:
            fd, temporary = self._temporary(os.path.dirname(path))
            try:
                try:
                    fill(fd)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                publish(temporary, path)
            finally:
                with suppress(FileNotFoundError):  # `os.replace` has taken it
                    os.unlink(temporary)
            files.sync_folder(os.path.dirname(path))
        except OSError as error:
            raise self._mapped(error, action, key) from error

    def _temporary(self, folder: str) -> tuple[int, str]:
        """A new hidden file in `folder`, which is made if need be (and perhaps again: see `delete`)."""
        for left in reversed(range(_TRIES)):
            temporary = os.path.join(folder, TEMPORARY + os.urandom(8).hex())
            try:
                self._make(folder)
                return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temporary
            except FileNotFoundError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _make(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        if parent != folder:
            self._make(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        else:
            files.sync_folder(parent)

    def _link(self, temporary: str, path: str) -> None:
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError as error:
            # NFS: a repeated request finds what the first one, whose answer was lost, has made.
            if os.stat(temporary).st_nlink == 1:
                raise ObjectExists(f"create {path}: there is an object already") from error
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreError(
                    f"create {path}: this file system has no hard links ({error.strerror}), so two writers "
                    f"could not be told apart; {_ADVICE}"
                ) from error
            raise

    def _walk(self, folder: str) -> Iterator[Entry]:
        path = os.path.join(self._root, folder) if folder else self._root
        try:
            with os.scandir(path) as found:
                names = [(e.name + "/" if e.is_dir(follow_symlinks=False) else e.name, e) for e in found]
        except OSError as error:
            if error.errno in _ABSENT:
                return
            raise self._mapped(error, "list", folder) from error
        # With their slash, folders sort among files as their keys do.
        for name, found_entry in sorted(names, key=lambda pair: pair[0]):
            key = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                yield from self._walk(key.removesuffix("/"))
            elif found_entry.is_file(follow_symlinks=False) and is_key(key):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield Entry(key, found_entry.stat(follow_symlinks=False).st_size)

    def _mapped(self, error: OSError, action: str, key: str) -> StoreError:
        return files.local_error(error, f"{action} {key!r} in {self._root}", _ADVICE)
