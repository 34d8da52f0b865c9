"""
One watch per cluster and namespace in a process, however many runs: three or four threads, under one request a minute.

A subscriber is woken when anything of its run changed, and then looks at a snapshot from memory. The threads begin
with the first subscription and end with the last.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.routes.kube import Kube
from airflow_gpu_burst.routes.mirror import Mirror
from airflow_gpu_burst.routes.reflector import Pace, Reflector
from airflow_gpu_burst.workloads.identity import MANAGED_BY, MANAGER
from airflow_gpu_burst.workloads.kinds import EVENT, JOB, POD, Kind
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot

__all__ = ["Pace", "Subscription", "Watcher", "watcher_of"]

log = logging.getLogger(__name__)

NEVER = float("-inf")


class Subscription:
    """One run's view of the watch. Made by `Watcher.subscribe`; no method asks the server."""

    def __init__(self, session: _Session, kind: Kind, name: str, uid: str, wake: Callable[[], None]) -> None:
        self._session = session
        self._seen: tuple[int, Snapshot] | None = None
        self._told: set[tuple[str, str]] = set()
        self.kind, self.name, self.uid = kind, name, uid
        self.wake = wake
        self.since = time.monotonic()
        self.closed = False

    def snapshot(self) -> Snapshot | None:
        """
        The run as the API last said it is: the same object until something changed, not to be written to.

        None: not known yet. An object that the watch has not brought is called gone only after a list that was asked
        for later than this subscription: the watch lags behind a create.
        """
        if not self._session.knows(self):
            return None
        version = self._session.mirror.version(self.name)
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._session.mirror.snapshot(self.name, self.uid))
        return self._seen[1]

    @property
    def trouble(self) -> GpuBurstError | None:
        """Why the run's object or its pods cannot be seen now; None: what is known is fresh."""
        return self._session.trouble(self.kind) or self._session.trouble(POD)

    def notes(self) -> list[str]:
        """What people should know about this watch and have not been told by this subscription."""
        notes = [note for note in self._session.notes() if note not in self._told]
        self._told.update(notes)
        return [text for _, text in notes]

    def close(self) -> None:
        """No more calls of `wake` from now on, but for one that may be under way. Any number of times."""
        self._session.leave(self)


class Watcher:
    """See the module. Shared by all who ask `watcher_of`."""

    def __init__(self, kube: Kube, namespace: str, pace: Pace | None = None) -> None:
        self._kube, self._namespace, self._pace = kube, namespace, pace or Pace()
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def subscribe(self, kind: Kind, name: str, uid: str, wake: Callable[[], None]) -> Subscription:
        """
        Follow one object with its pods and events.

        :param name: the object's, and the value of the label `gpu-burst/name` on it and on its pods.
        :param uid: another object of that name is not this run.
        :param wake: called from a thread of the watch after each change; must be quick, and not wait for a lock
            that is held around calls of this subscription.
        """
        with self._lock:
            while True:
                if self._session is None or self._session.over:
                    self._session = _Session(self._kube, self._namespace, self._pace)
                if (found := self._session.join(kind, name, uid, wake)) is not None:
                    return found


class _Session:
    """From the first subscription to the last. The sink of its reflectors."""

    def __init__(self, kube: Kube, namespace: str, pace: Pace) -> None:
        self._kube, self._namespace, self._pace = kube, namespace, pace
        self._lock = threading.Lock()
        self._subscribers: dict[str, list[Subscription]] = {}
        self._reflectors: dict[str, Reflector] = {}
        self._listed: dict[str, float] = {}
        self._troubles: dict[str, GpuBurstError] = {}
        self._notes: dict[str, str] = {}
        self._late: threading.Timer | None = None
        self.mirror = Mirror()
        self.over = False

    def join(self, kind: Kind, name: str, uid: str, wake: Callable[[], None]) -> Subscription | None:
        """See `Watcher.subscribe`. None: the last subscriber has just left, and the threads with it."""
        subscription = Subscription(self, kind, name, uid, wake)
        self.mirror.want(name, 1)
        with self._lock:
            if self.over:
                return None
            self._subscribers.setdefault(name, []).append(subscription)
            for wanted in (JOB, POD, kind):
                self._begin(wanted)
        if not self.mirror.sees(name, uid):
            self._look_later()
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """See `Subscription.close`."""
        with self._lock:
            if subscription.closed:
                return
            subscription.closed = True
            others = self._subscribers[subscription.name]
            others.remove(subscription)
            if not others:
                del self._subscribers[subscription.name]
            self.over = not self._subscribers
            ending = list(self._reflectors.values()) if self.over else []
            if self.over and self._late is not None:
                self._late.cancel()
        self.mirror.want(subscription.name, -1)
        for reflector in ending:
            reflector.stop()

    def knows(self, subscription: Subscription) -> bool:
        """Whether a snapshot would be the truth: see `Subscription.snapshot`."""
        with self._lock:
            pods = self._listed.get(POD.name, NEVER)
            own = self._listed.get(subscription.kind.name, NEVER)
        if pods == NEVER or own == NEVER:
            return False
        return own >= subscription.since or self.mirror.sees(subscription.name, subscription.uid)

    def trouble(self, kind: Kind) -> GpuBurstError | None:
        """Why that kind cannot be seen now."""
        with self._lock:
            error = self._troubles.get(kind.name)
        # callers raise it, again and again: each time would lengthen its traceback
        return error.with_traceback(None) if error else None

    def notes(self) -> list[tuple[str, str]]:
        """Kind and text of what people should know."""
        with self._lock:
            return list(self._notes.items())

    def _begin(self, kind: Kind) -> None:
        if kind.name not in self._reflectors and not self.over:
            labels = "" if kind == EVENT else f"{MANAGED_BY}={MANAGER}"
            reflector = Reflector(self._kube, self._namespace, kind, labels, self, self._pace)
            self._reflectors[kind.name] = reflector
            reflector.start()

    def _begin_events(self) -> None:
        """Only when objects and pods are known (or cannot be): an event of something unknown is soon forgotten."""
        if all(kind in self._listed or kind in self._troubles for kind in self._reflectors):
            self._begin(EVENT)

    def _look_later(self) -> None:
        """An object that the watch does not bring soon may be gone: only a list tells. One for all who wait."""
        with self._lock:
            if self._late is None and not self.over:
                self._late = threading.Timer(self._pace.late_s, self._look)
                self._late.name, self._late.daemon = "gpu-burst-watch-late", True
                self._late.start()

    def _look(self) -> None:
        with self._lock:
            self._late = None
            waiting = [s for group in self._subscribers.values() for s in group]
        kinds = {s.kind.name for s in waiting if not self.knows(s)}
        for kind in kinds:
            if self._listed.get(kind, NEVER) != NEVER:  # else its first list is under way
                self._reflectors[kind].list_now()
        if kinds:
            self._look_later()

    # ---- Sink

    def listed(self, kind: Kind, items: Iterable[Object], begun: float) -> None:
        """See `Sink`. Wakes the runs that changed, and those that this list has told that their object is gone."""
        touched = self.mirror.replace(kind, items)
        with self._lock:
            before = self._listed.get(kind.name, NEVER)
            self._listed[kind.name] = begun
            self._begin_events()
            if kind != EVENT:
                touched |= {
                    name
                    for name, group in self._subscribers.items()
                    if before == NEVER or any(before < s.since <= begun for s in group)
                }
        self._wake(touched)

    def changed(self, kind: Kind, what: str, item: Object) -> None:
        """See `Sink`."""
        self._wake(self.mirror.change(kind, what, item))

    def fresh(self, kind: Kind) -> None:
        """See `Sink`."""
        with self._lock:
            over = self._troubles.pop(kind.name, None)
            names = list(self._subscribers) if over is not None else []
        self._wake(names)

    def stale(self, kind: Kind, error: GpuBurstError) -> None:
        """See `Sink`."""
        if kind == EVENT:  # without events a run is still seen
            return
        with self._lock:
            known = self._troubles.get(kind.name)
            self._troubles[kind.name] = error
            self._begin_events()
            names = [] if type(known) is type(error) else list(self._subscribers)
        self._wake(names)

    def said(self, kind: Kind, note: str) -> None:
        """See `Sink`."""
        with self._lock:
            known = self._notes.pop(kind.name, "")
            if note:
                self._notes[kind.name] = known or note  # the first wording: nobody is told twice
            names = list(self._subscribers) if note and not known else []
        self._wake(names)

    def _wake(self, names: Iterable[str]) -> None:
        with self._lock:
            waking = [s for name in names for s in self._subscribers.get(name, ())]
        for subscription in waking:
            try:
                subscription.wake()
            except Exception:  # one subscriber's fault (a closed event loop) is not the others'
                log.warning("wake of %s failed", subscription.name, exc_info=True)


_watchers: dict[tuple[Kube, str], Watcher] = {}
_watchers_lock = threading.Lock()


def watcher_of(kube: Kube, namespace: str) -> Watcher:
    """The watcher of that cluster and namespace in this process."""
    with _watchers_lock:
        return _watchers.setdefault((kube, namespace), Watcher(kube, namespace))


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _watchers_lock
    _watchers_lock = threading.Lock()
    _watchers.clear()


os.register_at_fork(after_in_child=_forget)
