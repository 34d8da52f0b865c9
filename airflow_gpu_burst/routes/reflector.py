"""
One kind of object of one namespace, kept up to date in a thread: list, then watch, then list again.

The watch is an optimisation, the list is the truth: at least every ten minutes, after a 410, and when watching is
not allowed. Whatever the server does, it is never asked in a tight loop.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from airflow_gpu_burst.errors import ClusterForbidden, ClusterUnreachable, GpuBurstError
from airflow_gpu_burst.routes.kube import Expired, Kube, Stream, Throttled
from airflow_gpu_burst.routes.mirror import trimmed
from airflow_gpu_burst.workloads.kinds import EVENT, Kind
from airflow_gpu_burst.workloads.snapshot import Object

HOLLOW = 3
"""Watches in a row that end at once and bring nothing, after which the version is taken for stale (an events watch
with an old version is answered 200 and closed at once, kubernetes#104171)."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """
    How often the server is asked; seconds.

    :param watch_s: after which the server ends a watch.
    :param relist_s: at least so often everything is listed.
    :param poll_s: between lists where watching is forbidden.
    :param space_s: at least between two lists, and between two watches.
    :param backoff_s: at most between two tries while there is no answer.
    :param forbidden_s: between tries for events that may not be read.
    :param late_s: how long a subscriber waits for the watch to bring its object before a list is asked for.
    """

    watch_s: float = 240.0
    relist_s: float = 600.0
    poll_s: float = 10.0
    space_s: float = 1.0
    backoff_s: float = 15.0
    forbidden_s: float = 300.0
    late_s: float = 2.0


class Sink(Protocol):
    """Where a reflector reports to, from its own thread."""

    def listed(self, kind: Kind, items: Iterable[Object], begun: float) -> None:
        """A whole list, asked for at that time of the monotonic clock."""

    def changed(self, kind: Kind, what: str, item: Object) -> None:
        """One event of the watch: ADDED, MODIFIED or DELETED."""

    def fresh(self, kind: Kind) -> None:
        """The server answers."""

    def stale(self, kind: Kind, error: GpuBurstError) -> None:
        """The server does not answer, or refuses."""

    def said(self, kind: Kind, note: str) -> None:
        """Something that people should know, once. An empty note takes it back."""


class Reflector:
    """See the module. `start` once; `stop` from any thread, and from the sink's own calls."""

    def __init__(self, kube: Kube, namespace: str, kind: Kind, labels: str, sink: Sink, pace: Pace) -> None:
        self._kube, self._namespace, self._kind, self._labels = kube, namespace, kind, labels
        self._sink, self._pace = sink, pace
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._list_now = True
        self._stream: Stream[Any] | None = None
        self._version = ""
        self._due = 0.0
        self._no_watch_until = 0.0
        self._failures = self._hollow = 0
        self._last = {"list": float("-inf"), "watch": float("-inf")}
        self._thread = threading.Thread(
            target=self._run, name=f"gpu-burst-watch-{namespace}-{kind.plural}", daemon=True
        )

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End within a moment; a list that is under way ends by itself, within its 30 s, and is thrown away."""
        self._stopping.set()
        self.list_now()

    def list_now(self) -> None:
        """List as soon as may be, whatever the watch says."""
        with self._lock:
            self._list_now = True
            stream = self._stream
        if stream is not None:
            stream.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
                self._failures = 0
            except Expired:
                self._version = ""
                self._empty_handed()
            except GpuBurstError as error:
                self._failed(error)
            except Exception as error:  # a thread that died silently would leave all runs waiting for ever
                wrapped = ClusterUnreachable(f"watching {self._kind.plural} failed: {error!r}. Please report this")
                wrapped.__cause__ = error
                self._failed(wrapped)

    def _turn(self) -> None:
        now = time.monotonic()
        if self._list_now or not self._version or now >= self._due:
            self._list()
        elif now >= self._no_watch_until:
            self._watch()
        else:
            self._wait(self._pace.poll_s)
            self._list()

    def _list(self) -> None:
        self._space("list")
        if self._stopping.is_set():
            return
        with self._lock:
            self._list_now = False
        begun = time.monotonic()
        listing = self._kube.list(self._kind, self._namespace, labels=self._labels, keep=trimmed)
        self._version = listing.resource_version
        self._due = begun + self._pace.relist_s * random.uniform(0.9, 1.0)
        self._sink.fresh(self._kind)
        self._sink.listed(self._kind, listing.items, begun)
        if time.monotonic() >= self._no_watch_until:
            self._sink.said(self._kind, "")

    def _watch(self) -> None:
        self._space("watch")
        begun = time.monotonic()
        lasts = max(1.0, min(self._pace.watch_s * random.uniform(0.9, 1.0), self._due - begun))
        stream = self._kube.watch(
            self._kind, self._namespace, resource_version=self._version, labels=self._labels, timeout_s=lasts
        )
        with self._lock:
            if self._list_now:
                return
            self._stream = stream
        try:
            news = self._follow(stream)
        except ClusterForbidden as error:
            self._no_watch_until = time.monotonic() + self._pace.relist_s
            self._sink.said(self._kind, f"asking every {self._pace.poll_s:.0f} s instead of watching: {error}")
            return
        finally:
            with self._lock:
                self._stream = None
        if news or self._list_now or time.monotonic() - begun > 2 * self._pace.space_s:
            self._hollow = 0
        else:
            self._empty_handed()

    def _follow(self, stream: Stream[tuple[str, Object]]) -> int:
        """Pass on what the watch brings; returns how much that was. A break in the middle is like its end."""
        news, opened = 0, False
        try:
            with stream:
                stream.open()
                opened = True
                self._sink.fresh(self._kind)
                for what, item in stream:
                    self._version = str(item["metadata"].get("resourceVersion") or self._version)
                    news += 1
                    if self._stopping.is_set():
                        break
                    if what != "BOOKMARK":
                        self._sink.changed(self._kind, what, trimmed(item))
        except Throttled:
            raise
        except ClusterUnreachable:
            if not opened:
                raise
        return news

    def _empty_handed(self) -> None:
        """The version leads nowhere: a fresh one, and more and more time."""
        self._hollow += 1
        if self._hollow >= HOLLOW:
            self._version = ""
            self._wait(min(self._pace.backoff_s, self._pace.space_s * 2.0 ** (self._hollow - HOLLOW)))

    def _failed(self, error: GpuBurstError) -> None:
        self._failures += 1
        if self._stopping.is_set():
            return
        if self._kind == EVENT and isinstance(error, ClusterForbidden):
            self._sink.said(self._kind, f"events cannot be read, going on without them: {error}")
            self._wait(self._pace.forbidden_s)
            return
        self._sink.stale(self._kind, error)
        longest = min(self._pace.backoff_s, self._pace.space_s * 2.0 ** min(self._failures - 1, 10))
        pause = longest * random.uniform(0.5, 1.0)
        if isinstance(error, Throttled):
            pause = max(pause, min(error.retry_after, 60.0))
        self._wait(pause)

    def _space(self, what: str) -> None:
        self._wait(self._last[what] + self._pace.space_s - time.monotonic())
        self._last[what] = time.monotonic()

    def _wait(self, seconds: float) -> None:
        """A wish for a list does not shorten it: the server asked for peace."""
        if seconds > 0:
            self._stopping.wait(seconds)
