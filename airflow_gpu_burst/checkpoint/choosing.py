"""Which entries of several trees come into one folder: what an earlier tree has, wins. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from airflow_gpu_burst.checkpoint.manifest import Entries, File, Same
from airflow_gpu_burst.checkpoint.paths import Link, check_links
from airflow_gpu_burst.errors import CheckpointError


class Placed(NamedTuple):
    """
    A file that is to be restored.

    :param tree: which of the trees it is from.
    """

    file: File
    tree: int


@dataclass
class Chosen:
    """What is to be restored. Nothing of it stands in another's way, and none lies behind a link."""

    files: list[Placed] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    same: list[Same] = field(default_factory=list)


def choose(trees: Sequence[Entries]) -> Chosen:
    """
    The entries to restore.

    Where two trees have the same path, or one a file where the other has a folder, the earlier one wins, and what loses
    is not even fetched.

    :param trees: the most important one first.
    :raises CheckpointError: links that leave the folder, or a hard link to what is no file.
    """
    chosen, taken = Chosen(), _Taken()
    for number, tree in enumerate(trees):
        chosen.files += [Placed(file, number) for file in tree.files if taken.take(file.path)]
        chosen.links += [link for link in tree.links if taken.take(link.path)]
        for placed in _further_names(tree, number, chosen, taken):
            chosen.files.append(placed)
        chosen.folders += [path for path in tree.folders if taken.take_folder(path)]
    check_links(tuple(chosen.links))
    return chosen


def _further_names(tree: Entries, number: int, chosen: Chosen, taken: _Taken) -> Iterator[Placed]:
    """Hard links to what is restored; the first name of a file whose own was taken by another tree becomes a file."""
    if not tree.same:
        return
    content = {file.path: file for file in tree.files}
    holder = {placed.file.path: placed.file.path for placed in chosen.files if placed.tree == number}
    for path, same_as in tree.same:
        if same_as not in content:
            raise CheckpointError(f"{path!r} is a further name of {same_as!r}, which is no file: restore another one")
        if not taken.take(path):
            continue
        if same_as in holder:
            chosen.same.append(Same(path, holder[same_as]))
        else:
            holder[same_as] = path
            yield Placed(content[same_as]._replace(path=path), number)


class _Taken:
    """Names that are files or links, and names that are folders."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def take(self, path: str) -> bool:
        """Whether a file or link of this name is in nobody's way; from now on it is there."""
        if path in self._files or path in self._folders or not self._take_above(path):
            return False
        self._files.add(path)
        return True

    def take_folder(self, path: str) -> bool:
        """Likewise for a folder."""
        if path in self._files or not self._take_above(path):
            return False
        self._folders.add(path)
        return True

    def _take_above(self, path: str) -> bool:
        above = []
        while (end := path.rfind("/")) >= 0:
            path = path[:end]
            if path in self._files:
                return False
            if path in self._folders:  # then so are all above it
                break
            above.append(path)
        self._folders.update(above)
        return True
