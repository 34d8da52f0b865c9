"""
What the API last said about the runs of one namespace: in memory, by run, a change touching one run only.

Objects are kept as trimmed JSON text: a fifth of the memory of parsed ones, and nobody can change them by accident.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu_burst.workloads.identity import NAME
from airflow_gpu_burst.workloads.kinds import EVENT, POD, Kind
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot

EVENTS_PER_RUN = 50
UNKNOWN_UIDS, EVENTS_PER_UNKNOWN = 500, 10
"""Events can come before the pod that they are about; of how many such objects, and how many of each, are kept."""
CUTS = 4
"""How many dashes are tried, from the end of a child job's name (`<jobset>-<replicated job>-<index>`), for a JobSet."""

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_BULKY = frozenset(
    {"env", "envFrom", "volumeMounts", "volumes", "command", "args", "lifecycle"}
    | {"livenessProbe", "readinessProbe", "startupProbe"}
)
"""Of pod specs and templates: most of their size, of no use to tell where a run is, and maybe secret."""
_OF_EVENT = (
    "involvedObject",
    "reason",
    "message",
    "type",
    "count",
    "firstTimestamp",
    "lastTimestamp",
    "eventTime",
    "series",
    "source",
    "reportingComponent",
)


def trimmed(item: Object) -> Object:
    """The object without what only its creator needs."""
    about = {key: value for key, value in (item.get("metadata") or {}).items() if key != "managedFields"}
    notes = about.get("annotations") or {}
    if _LAST_APPLIED in notes:
        about["annotations"] = {key: value for key, value in notes.items() if key != _LAST_APPLIED}
    if item.get("kind") == EVENT.name:
        kept = {key: item[key] for key in _OF_EVENT if item.get(key) is not None}
        return {"apiVersion": item.get("apiVersion"), "kind": EVENT.name, "metadata": about, **kept}
    return {**item, "metadata": about, "spec": _lean(item.get("spec") or {})}


def _lean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lean(inner) for key, inner in value.items() if key not in _BULKY}
    if isinstance(value, list):
        return [_lean(inner) for inner in value]
    return value


@dataclass
class _Run:
    """Texts by UID; `gone` are objects' last states, as long as someone wants them."""

    objects: dict[str, bytes] = field(default_factory=dict)
    pods: dict[str, bytes] = field(default_factory=dict)
    gone: dict[str, bytes] = field(default_factory=dict)
    events: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    uids: set[str] = field(default_factory=set)
    wanted: int = 0
    version: int = 0


class Mirror:
    """See the module. Every change returns the names of the runs that it touched. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._by_kind: dict[str, dict[str, str]] = {}  # kind -> UID -> run
        self._owners: dict[str, str] = {}  # UID of an object, a pod or what stands between -> run
        self._unknown: OrderedDict[str, list[Object]] = OrderedDict()

    def want(self, name: str, by: int) -> None:
        """One subscriber more (`by` 1) or less (-1): for a wanted run the last state is kept when it goes."""
        with self._lock:
            run = self._runs.setdefault(name, _Run())
            run.wanted += by
            if run.wanted <= 0:
                run.gone.clear()
                self._drop_if_empty(name, run)

    def replace(self, kind: Kind, items: Iterable[Object]) -> set[str]:
        """A whole list: what is not in it any more has been deleted."""
        touched: set[str] = set()
        with self._lock:
            if kind == EVENT:  # events expire; that is no news
                return touched.union(*map(self._event, items))
            left = dict(self._by_kind.get(kind.name, {}))
            for item in items:
                left.pop(str(item["metadata"]["uid"]), None)
                touched.update(self._put(kind, item))
            for uid in left:
                touched.update(self._remove(kind, uid))
        return touched

    def change(self, kind: Kind, what: str, item: Object) -> set[str]:
        """One event of a watch."""
        with self._lock:
            if kind == EVENT:
                return set() if what == "DELETED" else self._event(item)
            if what != "DELETED":
                return self._put(kind, item)
            self._put(kind, item)  # the last state, as the API had it
            return self._remove(kind, str(item["metadata"]["uid"]))

    def sees(self, name: str, uid: str) -> bool:
        """Whether that very object is, or was, there."""
        with self._lock:
            run = self._runs.get(name)
            return run is not None and (uid in run.objects or uid in run.gone)

    def version(self, name: str) -> int:
        """Rises with every change of that run."""
        with self._lock:
            run = self._runs.get(name)
            return run.version if run else 0

    def snapshot(self, name: str, uid: str) -> Snapshot:
        """The run as it is now, as objects of the caller's own."""
        with self._lock:
            run = self._runs.get(name) or _Run()
            top, last = run.objects.get(uid), run.gone.get(uid)
            pods, events = list(run.pods.values()), list(run.events.values())
        return Snapshot(
            object=json.loads(top) if top else None,
            pods=tuple(map(json.loads, pods)),
            events=tuple(map(json.loads, events)),
            last=json.loads(last) if last and not top else None,
        )

    def _put(self, kind: Kind, item: Object) -> set[str]:
        name = str((item["metadata"].get("labels") or {}).get(NAME) or "")
        if not name:
            return set()
        uid = str(item["metadata"]["uid"])
        run = self._runs.setdefault(name, _Run())
        place = run.pods if kind == POD else run.objects
        text = json.dumps(item, separators=(",", ":")).encode()
        if place.get(uid) == text:
            return set()
        place[uid] = text
        self._by_kind.setdefault(kind.name, {})[uid] = name
        run.version += 1
        for known in (uid, *_owners_of(item)):
            self._learn(name, run, known)
        return {name}

    def _remove(self, kind: Kind, uid: str) -> set[str]:
        name = self._by_kind.get(kind.name, {}).pop(uid, "")
        run = self._runs.get(name)
        if run is None:
            return set()
        text = (run.pods if kind == POD else run.objects).pop(uid, b"")
        if kind != POD and run.wanted:
            run.gone[uid] = text
        run.version += 1
        self._drop_if_empty(name, run)
        return {name}

    def _drop_if_empty(self, name: str, run: _Run) -> None:
        if not (run.objects or run.pods or run.wanted > 0):
            del self._runs[name]
            for uid in run.uids:
                self._owners.pop(uid, None)

    def _learn(self, name: str, run: _Run, uid: str) -> None:
        if uid in run.uids:
            return
        run.uids.add(uid)
        self._owners[uid] = name
        for event in self._unknown.pop(uid, ()):
            _note(run, event)

    def _event(self, item: Object) -> set[str]:
        about = item.get("involvedObject") or {}
        uid = str(about.get("uid") or "")
        name = self._owners.get(uid) or self._parent(about)
        if name:
            return {name} if _note(self._runs[name], item) else set()
        waiting = self._unknown.setdefault(uid, [])
        self._unknown.move_to_end(uid)
        waiting.append(item)
        del waiting[:-EVENTS_PER_UNKNOWN]
        while len(self._unknown) > UNKNOWN_UIDS:
            self._unknown.popitem(last=False)
        return set()

    def _parent(self, about: Object) -> str:
        """The run of a JobSet's child job: such a job carries no label of ours, and may never get a pod."""
        if about.get("kind") != "Job":
            return ""
        return next((name for name in _stems(str(about.get("name") or "")) if name in self._runs), "")


def _note(run: _Run, event: Object) -> bool:
    """Keep an event, the newest of them; False if it is known already."""
    key = str(event["metadata"].get("uid") or event["metadata"].get("name"))
    text = json.dumps(event, separators=(",", ":")).encode()
    if run.events.get(key) == text:
        return False
    run.events[key] = text
    run.events.move_to_end(key)
    while len(run.events) > EVENTS_PER_RUN:
        run.events.popitem(last=False)
    run.version += 1
    return True


def _owners_of(item: Object) -> list[str]:
    return [str(owner["uid"]) for owner in item["metadata"].get("ownerReferences") or [] if owner.get("uid")]


def _stems(name: str) -> Iterator[str]:
    for _ in range(CUTS):
        name = name.rpartition("-")[0]
        yield name
