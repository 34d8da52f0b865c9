"""
Reading objects as the API writes them: conditions, times, container states, whose a pod is.

By type and name, never by position: the API promises no order.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from airflow_gpu_burst.workloads.environment import INDEX, OWNER_LABELS
from airflow_gpu_burst.workloads.identity import DEFAULT_CONTAINER
from airflow_gpu_burst.workloads.pods import TRAINER
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot


def when(text: Any) -> float | None:
    """A time of the API as seconds since the epoch, by the server's clock; None: not there, or not a time."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else None


def condition(obj: Object, kind: str) -> Object:
    """The condition of that type, whatever its status; empty: none."""
    found = [c for c in status(obj).get("conditions") or [] if c.get("type") == kind]
    # One per type is the rule; should there be more, the latest counts.
    return max(found, key=lambda c: (when(c.get("lastTransitionTime")) or 0.0, _order(c)), default={})


def is_true(obj: Object, kind: str) -> bool:
    """Whether the condition of that type holds: its status is the word True ("False" is a non-empty text)."""
    return condition(obj, kind).get("status") == "True"


def is_false(obj: Object, kind: str) -> bool:
    """Whether the condition is there and denied."""
    return condition(obj, kind).get("status") == "False"


def since(obj: Object, kind: str) -> float | None:
    """When the condition of that type last changed."""
    return when(condition(obj, kind).get("lastTransitionTime"))


def metadata(obj: Object) -> Object:
    """An object's metadata."""
    found: Object = obj.get("metadata") or {}
    return found


def name(obj: Object) -> str:
    """An object's name."""
    return str(metadata(obj).get("name", ""))


def uid(obj: Object) -> str:
    """An object's UID."""
    return str(metadata(obj).get("uid", ""))


def label(obj: Object, key: str) -> str:
    """An object's label; empty: none."""
    return str((metadata(obj).get("labels") or {}).get(key, ""))


def annotation(obj: Object, key: str) -> str:
    """An object's annotation; empty: none."""
    return str((metadata(obj).get("annotations") or {}).get(key, ""))


def deleting(obj: Object) -> float | None:
    """When its deletion was asked for; None: it was not."""
    return when(metadata(obj).get("deletionTimestamp"))


def status(obj: Object) -> Object:
    """An object's status."""
    found: Object = obj.get("status") or {}
    return found


def main_container(pod: Object) -> str:
    """The container that is the run: named by the usual annotation, else `trainer`, else the first."""
    names = [str(c.get("name")) for c in (pod.get("spec") or {}).get("containers") or []]
    wanted = annotation(pod, DEFAULT_CONTAINER) or TRAINER
    if wanted in names or not names:
        return wanted
    return names[0]


def containers(pod: Object, *, init: bool = False) -> list[Object]:
    """States of a pod's (init) containers, by name."""
    found = status(pod).get("initContainerStatuses" if init else "containerStatuses") or []
    return sorted(found, key=lambda c: str(c.get("name")))


def main_status(pod: Object) -> Object:
    """State of the main container; empty: there is none yet."""
    wanted = main_container(pod)
    return next((c for c in containers(pod) if c.get("name") == wanted), {})


def state(container: Object, what: str) -> Object | None:
    """`running`, `waiting` or `terminated` of a container's state; None: it is in another."""
    found: Object | None = (container.get("state") or {}).get(what)
    return found


def first_start(pod: Object) -> float | None:
    """When the pod's main container first started, as far as its state still says."""
    main = main_status(pod)
    states = [s.get(what) or {} for s in (main.get("state") or {}, main.get("lastState") or {}) for what in _STARTED]
    return min((t for t in (when(s.get("startedAt")) for s in states) if t), default=None)


_STARTED = ("running", "terminated")


def rank(pod: Object) -> int | None:
    """The pod's rank; None: it has none."""
    text = annotation(pod, INDEX) or label(pod, INDEX)
    return int(text) if text.isdigit() else None


def own_pods(snapshot: Snapshot) -> list[Object]:
    """Pods of the object itself, not of one before it under the same name; by age, then UID."""
    owner = uid(snapshot.object or snapshot.last or {})
    pods = [p for p in snapshot.pods if owner in {"", *_owners(p)} or not _owners(p)]
    return sorted(pods, key=lambda p: (when(metadata(p).get("creationTimestamp")) or 0.0, uid(p)))


def own_events(snapshot: Snapshot) -> list[Object]:
    """Events of the object and its pods, not of an object before it under the same name; oldest first."""
    top = snapshot.object or snapshot.last or {}
    events = [e for e in snapshot.events if not _of_predecessor(e.get("involvedObject") or {}, top)]
    return sorted(events, key=lambda e: (event_time(e), uid(e), int(e.get("count") or 0)))


def event_time(event: Object) -> float:
    """When an event last happened; 0: it does not say."""
    series = event.get("series") or {}
    times = [
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        metadata(event).get("creationTimestamp"),
    ]
    return next((t for t in map(when, times) if t), 0.0)


def events_about(events: Iterable[Object], obj: Object) -> list[Object]:
    """Those of the events that are about this object, in their order."""
    wanted = uid(obj)
    return [e for e in events if (e.get("involvedObject") or {}).get("uid") == wanted]


def _owners(pod: Object) -> set[str]:
    return {value for key in OWNER_LABELS.values() if (value := label(pod, key))}


def _of_predecessor(involved: Object, top: Object) -> bool:
    same_name = involved.get("name") == name(top) and involved.get("kind") == top.get("kind")
    return bool(top) and same_name and involved.get("uid") not in {None, "", uid(top)}


def _order(obj: Object) -> str:
    return repr(sorted(obj.items(), key=lambda item: item[0]))
