"""Names in a tree, and links between them: which are good on every file system and in every store. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from airflow_gpu_burst.errors import CheckpointError

MAX_PATH = 1024
"""Bytes of a path in a tree: what S3 takes for a key, so that every tree can be published under its own names."""


_BAD = re.compile(r"[\x00-\x1f\x7f\\]|(?:^|/)\.{0,2}(?:/|\Z)")
_MAX_HOPS = 40  # Linux's own limit for links that lead to links


class Link(NamedTuple):
    """A symbolic link. Where it points to is inside the tree."""

    path: str
    target: str


def safe_path(path: str) -> str:
    """
    The path itself, if it stays in its folder on every file system and in every store.

    :raises CheckpointError: it does not; says why and what to do.
    """
    problem = ""
    if _BAD.search(path):
        problem = "is absolute, has a backslash, a control character, or an empty, '.' or '..' segment"
    elif not path.isascii():
        try:
            data = path.encode()
        except UnicodeEncodeError:
            problem = "is no UTF-8"
        else:
            problem = "" if len(data) <= MAX_PATH else f"is longer than {MAX_PATH} bytes"
    elif len(path) > MAX_PATH:
        problem = f"is longer than {MAX_PATH} bytes"
    if problem:
        shown = path if len(path) < 200 else f"{path[:200]}…"
        raise CheckpointError(f"path {shown!r} {problem}: neither saved nor restored. Rename the file")
    return path


def stays_inside(link: Link, links: Mapping[str, str]) -> bool:
    """
    Whether a link, followed through any others of its tree, stays in the tree.

    One that leads nowhere or in a circle is harmless: nothing of ours follows it.

    :param links: path → target of all links of the tree.
    """
    if link.target.startswith("/"):
        return False
    here = link.path.split("/")[:-1]
    todo = link.target.split("/")[::-1]
    hops = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not here:
                return False
            here.pop()
            continue
        here.append(part)
        onward = links.get("/".join(here))
        if onward is None:
            continue
        hops += 1
        if hops > _MAX_HOPS:
            return True
        if onward.startswith("/"):
            return False
        here.pop()
        todo.extend(onward.split("/")[::-1])
    return True


def check_links(links: tuple[Link, ...]) -> None:
    """
    :raises CheckpointError: one of them leaves its tree.
    """
    targets = dict(links)
    for link in links:
        if not stays_inside(link, targets):
            raise CheckpointError(
                f"link {link.path!r} points out of the tree, to {link.target!r}: neither saved nor restored. "
                "Put the file itself there, or link to it by a relative path inside the tree"
            )
