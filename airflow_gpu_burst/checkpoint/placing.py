"""Files into a folder, by its open descriptors: no symbolic link on the way is ever followed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Placer:
    """
    For one thread. Folders are made as they are needed. Quick for paths in their order: it stays where it was.

    :param root: the folder; made if need be.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._open = [("", os.open(root, _FOLDER))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self._leave(0)

    def folder(self, path: str) -> int:
        """The descriptor of a folder, good until the next call."""
        parts = path.split("/") if path else []
        depth = 0
        while depth < len(parts) and depth + 1 < len(self._open) and self._open[depth + 1][0] == parts[depth]:
            depth += 1
        self._leave(depth + 1)
        for part in parts[depth:]:
            above = self._open[-1][1]
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=above)
            self._open.append((part, os.open(part, _FOLDER, dir_fd=above)))
        return self._open[-1][1]

    def existing(self, path: str) -> int | None:
        """The descriptor of a regular file that is there, for reading."""
        above, name = self._at(path)
        try:
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
        except OSError:
            return None

    def create(self, path: str) -> int:
        """The descriptor of a new, empty file in the place of whatever is there."""
        above, name = self._at(path)
        with suppress(FileExistsError):
            return os.open(name, _NEW, 0o600, dir_fd=above)
        os.unlink(name, dir_fd=above)
        return os.open(name, _NEW, 0o600, dir_fd=above)

    def move_in(self, source: Path, path: str) -> None:
        """A file of the same file system gets its place."""
        above, name = self._at(path)
        os.rename(source, name, dst_dir_fd=above)

    def symlink(self, path: str, target: str) -> None:
        """A symbolic link in the place of whatever is there."""
        above, name = self._cleared(path)
        os.symlink(target, name, dir_fd=above)

    def link(self, path: str, other: Placer, same_as: str) -> None:
        """
        A further name of a file.

        :param other: another placer of the same folder.
        """
        source, source_name = other._at(same_as)
        above, name = self._cleared(path)
        os.link(source_name, name, src_dir_fd=source, dst_dir_fd=above, follow_symlinks=False)

    def _at(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self.folder(folder), name

    def _cleared(self, path: str) -> tuple[int, str]:
        above, name = self._at(path)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=above)
        return above, name

    def _leave(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])
