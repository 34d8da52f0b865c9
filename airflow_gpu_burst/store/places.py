"""
Where the objects of a store in a directory lie, and how one comes to be: whole or not at all.

An object is written under a hidden name that follows from its own, and locked meanwhile. So what a killed process left
half way is found by the next one that writes the same object, and there is never more than one such file of each.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from airflow_gpu_burst.errors import ObjectExists, ObjectMissing, StoreError, StoreUnavailable
from airflow_gpu_burst.store import files
from airflow_gpu_burst.store.interface import TEMPORARY, check_key

ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
ADVICE = "set GPU_BURST_STORE to another directory"
_TRIES = 20  # a writer against others that delete the last object of the same folder


class Places:
    """
    :param root: of the store; made with the first object.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def path(self, key: str) -> str:
        """
        The file of an object.

        :raises StoreError: no key, or a symbolic link leads out of the store.
        """
        path = os.path.join(self.root, *check_key(key).split("/"))
        parent = os.path.realpath(os.path.dirname(path))
        if parent != self.root and not parent.startswith(self.root.rstrip("/") + "/"):
            raise StoreError(f"key {key!r} leads out of {self.root} by a symbolic link: remove the link")
        return path

    @contextmanager
    def opened(self, key: str, action: str) -> Iterator[int]:
        """
        An object, to read. Errors of the file system in the body become the store's.

        :raises ObjectMissing: it is not there.
        """
        path = self.path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in ABSENT:  # a directory can be opened, but not read
                raise ObjectMissing(f"{action} {key!r}: not in {self.root}") from error
            raise self.error(error, action, key) from error

    @contextmanager
    def appearing(self, key: str, action: str, *, once: bool = False) -> Iterator[int]:
        """
        An empty file whose bytes are the object when the body ends well; else nothing is left.

        Errors of the file system in the body become the store's.

        :param once: only if nothing is there: a hard link either comes to be or not.
        :raises ObjectExists: then, when something is.
        """
        path = self.path(key)
        try:
            fd, half = self._begun(path)
            try:
                yield fd
                os.fsync(fd)
                if once:
                    _link(half, path)
                    os.unlink(half)
                else:
                    os.replace(half, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(half)
                raise
            finally:
                os.close(fd)
            files.sync_folder(os.path.dirname(path))
        except OSError as error:
            raise self.error(error, action, key) from error

    def abandon(self, key: str) -> None:
        """Remove what was left half way, unless somebody is still at it."""
        half = _unfinished(self.path(key))
        try:
            fd = os.open(half, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _locked(fd, half):
                    os.unlink(half)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in ABSENT:
                raise self.error(error, "abandon", key) from error

    def _begun(self, path: str) -> tuple[int, str]:
        """The unfinished file of an object, empty; by a name of its own when somebody else is at that object."""
        folder, half = os.path.dirname(path), _unfinished(path)
        for left in reversed(range(_TRIES)):
            try:
                self._make(folder)
                fd = os.open(half, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:
                if not left:
                    raise
                continue
            if _locked(fd, half):
                os.truncate(fd, 0)
                return fd, half
            os.close(fd)
            half = os.path.join(folder, TEMPORARY + os.urandom(8).hex())
        raise StoreUnavailable(f"{path}: something removes it while it is written. See what writes to {self.root}")

    def _make(self, folder: str) -> None:
        """A folder and those above it, so that they outlive a power cut."""
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

    def error(self, error: OSError, action: str, key: str) -> StoreError:
        """An error of the file system, as the store's."""
        return files.local_error(error, f"{action} {key!r} in {self.root}", ADVICE)


def _link(half: str, path: str) -> None:
    try:
        os.link(half, path, follow_symlinks=False)
    except FileExistsError as error:
        # NFS: a repeated request finds what the first one, whose answer was lost, has made.
        if os.stat(half).st_nlink == 1:
            raise ObjectExists(f"create {path}: there is an object already") from error
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise StoreError(
                f"create {path}: this file system has no hard links ({error.strerror}), so two writers "
                f"could not be told apart; {ADVICE}"
            ) from error
        raise


def _unfinished(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, TEMPORARY + hashlib.sha256(name.encode()).hexdigest()[:32])


def _locked(fd: int, path: str) -> bool:
    """Take a file that nobody writes to. A kill releases it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False
