"""Following a run from a shell, beside whoever else follows it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from airflow_gpu_burst.errors import ObjectMissing
from airflow_gpu_burst.runs import Follower, Step
from airflow_gpu_burst.store import Store
from airflow_gpu_burst.store.interface import Entry

POLL_S = 0.5
"""Between two looks at a route that does not say by itself that something changed: somebody sits in front of it."""


def steps(follower: Callable[[Callable[[], None]], Follower]) -> Iterator[Step]:
    """
    One look after the other, until the run is over or a timeout has passed.

    :param follower: makes it, given what it calls when there is something new.
    """
    news = threading.Event()
    following = follower(news.set)
    try:
        while True:
            news.clear()
            step = following.step()
            yield step
            if step.done:
                return
            news.wait(max(step.wait_s, 0.1))
    finally:
        following.close()


def show(step: Step, *, lines_to: Any = None) -> None:
    """Output to standard output, what happens to the run beside it."""
    for note in step.notes:
        print(f"gpu-burst: {note}", file=sys.stderr, flush=True)
    for line in step.lines:
        print(line, file=lines_to or sys.stdout)
    (lines_to or sys.stdout).flush()


class Aside:
    """
    A store in which whoever looks keeps a place in the output of their own.

    In the run's store that place is the triggerer's: moving it would have its successor print lines twice, or not.

    :param cursor: the place to begin at; None: the beginning.
    """

    def __init__(self, store: Store, cursor: Mapping[str, Any] | None = None) -> None:
        self._store = store
        self._cursor = b"" if cursor is None else json.dumps(cursor).encode()

    @property
    def uri(self) -> str:
        """The store's."""
        return self._store.uri

    def get(self, key: str) -> bytes:
        """The store's, but for the place."""
        if not _is_place(key):
            return self._store.get(key)
        if not self._cursor:
            raise ObjectMissing(f"{key} is not there: this reader begins at the start")
        return self._cursor

    def put(self, key: str, data: bytes) -> None:
        """The store's, but for the place."""
        if _is_place(key):
            self._cursor = data
        else:
            self._store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        """The store's."""
        self._store.create(key, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        """The store's."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """The store's."""
        self._store.delete(key)


def _is_place(key: str) -> bool:
    return key.rpartition("/")[2].startswith("cursor-g") and "/output/" in key
