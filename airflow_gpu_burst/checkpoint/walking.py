"""A folder as it is on disk: what is to be saved, in a stable order, and whether it still is what it was."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from airflow_gpu_burst.checkpoint.manifest import Same
from airflow_gpu_burst.checkpoint.paths import Link, check_links, safe_path
from airflow_gpu_burst.errors import CheckpointError
from airflow_gpu_burst.store.files import local_error

SPARSE_FROM = 1 << 20
"""Bytes: below, a hole saves nothing worth a request."""


class Identity(NamedTuple):
    """By this a file is known to be the one that it was. Not its content: a writer that resets the mtime escapes."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Identity:
        """Of a stat."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Found(NamedTuple):
    """
    A regular file.

    :param mode: permission bits.
    :param sparse: whether it has fewer blocks than bytes.
    """

    path: str
    identity: Identity
    mode: int
    sparse: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return self.identity.size


@dataclass(frozen=True)
class Walked:
    """What lies under a folder. See `Entries`."""

    files: tuple[Found, ...]
    folders: tuple[str, ...]
    links: tuple[Link, ...]
    same: tuple[Same, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def walk(folder: Path) -> Walked:
    """
    Everything under a folder. Links are not followed; a file with several names is found once.

    :raises CheckpointError: a link that leaves the folder, a special file, or a name that is not good everywhere.
    """
    files: list[Found] = []
    folders: list[str] = []
    links: list[Link] = []
    same: list[Same] = []
    first: dict[tuple[int, int], str] = {}
    for path, found, target in _each(os.fspath(folder)):
        safe_path(path)
        if target is not None:
            links.append(Link(path, _target(path, target)))
        elif stat.S_ISDIR(found.st_mode):
            folders.append(path)
        elif not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path!r} is a special file (a pipe, socket or device): move it out of the folder")
        elif found.st_nlink > 1 and (found.st_dev, found.st_ino) in first:
            same.append(Same(path, first[found.st_dev, found.st_ino]))
        else:
            if found.st_nlink > 1:
                first[found.st_dev, found.st_ino] = path
            sparse = SPARSE_FROM <= found.st_size > found.st_blocks * 512
            files.append(Found(path, Identity.of(found), stat.S_IMODE(found.st_mode) & 0o777, sparse))
    check_links(tuple(links))
    return Walked(*(tuple(sorted(kind)) for kind in (files, folders, links, same)))  # type: ignore[arg-type]


def check_unchanged(folder: Path, files: tuple[Found, ...]) -> None:
    """
    :raises CheckpointError: one of them is not what it was when the folder was walked.
    """
    root = os.fspath(folder)
    for file in files:
        try:
            now = Identity.of(os.lstat(f"{root}/{file.path}"))
        except OSError as error:
            raise unreadable(file.path, error) from error
        if now != file.identity:
            raise changed(file.path)


def check_same(folder: Path, walked: Walked) -> None:
    """
    :raises CheckpointError: something is not what it was, is gone or has come since the folder was walked.
    """
    check_unchanged(folder, walked.files)
    now = walk(folder)
    for before, after in ((walked.files, now.files), (walked.links, now.links), (walked.same, now.same)):
        if differing := sorted({found.path for found in before} ^ {found.path for found in after}):
            raise changed(differing[0])
    if differing := sorted(set(walked.folders) ^ set(now.folders)):
        raise changed(differing[0])


def changed(path: str) -> CheckpointError:
    """What to say of a file that was written to while it was saved."""
    return CheckpointError(
        f"{path} changed while it was uploaded; write the whole checkpoint before saying that it is ready"
    )


def unreadable(path: str, error: OSError) -> CheckpointError:
    """What to say of a file that cannot be read."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return changed(path)
    return CheckpointError(str(local_error(error, f"read {path}", "let the trainer write it as the pod's user")))


def _each(root: str) -> Iterator[tuple[str, os.stat_result, str | None]]:
    """(path, stat, target of a link) of all files and links, and of folders that are empty."""
    todo = [""]
    while todo:
        folder = todo.pop()
        try:
            with os.scandir(f"{root}/{folder}" if folder else root) as entries:
                empty = True
                for entry in sorted(entries, key=lambda entry: entry.name):
                    empty = False
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(path)
                        continue
                    found = entry.stat(follow_symlinks=False)
                    yield path, found, os.readlink(entry.path) if entry.is_symlink() else None
            if empty and folder:
                yield folder, os.lstat(f"{root}/{folder}"), None
        except OSError as error:
            raise unreadable(folder or "the folder", error) from error


def _target(path: str, target: str) -> str:
    try:
        target.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"link {path!r} points to {target!r}, which is no UTF-8. Rename what it names") from error
    return target
