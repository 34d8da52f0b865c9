"""
What every store can do, and which keys it takes. Two implementations are shipped: a directory and S3.

Five verbs, chosen so that both can keep the promise: `create` is the only one with a condition, and
nothing is ever renamed or appended to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from airflow_gpu_burst.errors import StoreError

TEMPORARY = ".gpu-burst-"
"""Start of the names of unfinished files. Keys may not use it; listings never show it."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_KEY_BYTES = 900  # S3 takes 1024 with the store's own prefix; this leaves room for one
_SEGMENT_BYTES = 255  # of every common file system, and of MinIO


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing."""

    key: str
    size: int


class Store(Protocol):
    """
    An object store. Keys are relative, with `/` between segments; values are bytes or files.

    Errors are those of `airflow_gpu_burst.errors`: `ObjectMissing` only when the store has said that the
    key does not exist; `StoreForbidden` and `StoreUnavailable` say nothing about that.
    """

    @property
    def uri(self) -> str:
        """`file:///...` or `s3://bucket/prefix`."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectMissing."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write, over whatever is there. For hints only; what matters is created."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """
        Write if nothing is there, in one attempt. Raises ObjectExists when the key is taken.

        StoreUnavailable means "cannot tell": the write may have happened, or may still happen. Repeat
        with the same key and the same bytes until it returns or raises ObjectExists, then read to see
        whose bytes they are: an ObjectExists may be about one's own earlier attempt, or about one that a
        proxy repeated.
        """
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """All objects whose key begins with `prefix` (plain text), sorted by key. May be stale."""
        ...

    def delete(self, key: str) -> None:
        """Remove. A key that is not there is fine."""
        ...


def check_key(key: str) -> str:
    """The key itself, or StoreError: the same keys are good in every store, and none leads out of it."""
    _check(key, key.split("/"))
    return key


def check_prefix(prefix: str) -> str:
    """A listing's prefix: like a key, but it may be empty or end with a slash."""
    if prefix:
        _check(prefix, prefix.removesuffix("/").split("/"))
    return prefix


def _check(key: str, segments: list[str]) -> None:
    problem = ""
    if any(segment in ("", ".", "..") for segment in segments):
        problem = "has an empty, '.' or '..' segment"
    elif _CONTROL.search(key):
        problem = "has a backslash or a control character"
    elif any(segment.startswith(TEMPORARY) for segment in segments):
        problem = f"has a segment that begins with {TEMPORARY!r}, which marks unfinished files"
    else:
        try:
            longest = max(len(segment.encode()) for segment in segments)
        except UnicodeEncodeError:
            problem = "is not valid Unicode"
        else:
            if longest > _SEGMENT_BYTES or len(key.encode()) > _KEY_BYTES:
                problem = f"is longer than {_KEY_BYTES} bytes, or has a segment of over {_SEGMENT_BYTES}"
    if problem:
        raise StoreError(f"key {key!r} {problem}; use relative names such as 'runs/a/log/1.json'")


def is_key(key: str) -> bool:
    """Whether `check_key` takes it: listings leave out what somebody else put there under other names."""
    try:
        check_key(key)
    except StoreError:
        return False
    return True
