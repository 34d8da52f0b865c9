"""What a follower of a run needs of its pods and events: whose log to read, and lines for a task's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from airflow_gpu_burst.workloads import reading
from airflow_gpu_burst.workloads.ends import last_word
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot


@dataclass(frozen=True, kw_only=True)
class PodFacts:
    """
    One container whose log is worth following: a pod's main one, or an init container that failed.

    :param rank: None: the pod has no rank.
    :param restarts: how often the container was started again; with `uid` and `container` it names one log.
    :param started: it runs or ran: there is a log.
    :param terminated: it writes no more.
    :param orderly: the runtime left its last word: it ended by itself, and what it had to say is in the spool.
    """

    name: str
    uid: str
    rank: int | None
    container: str
    restarts: int
    started: bool
    terminated: bool
    orderly: bool
    labels: Mapping[str, str]


def pods_of(snapshot: Snapshot) -> list[PodFacts]:
    """Every container to follow, of the pods that are there now; the oldest pod first."""
    return [facts for pod in reading.own_pods(snapshot) for facts in _containers(pod)]


def _containers(pod: Object) -> list[PodFacts]:
    failed = [c for c in reading.containers(pod, init=True) if _failed(c)]
    main = reading.main_status(pod) or {"name": reading.main_container(pod)}
    return [_facts(pod, c) for c in (*failed, main)]


def _failed(container: Object) -> bool:
    states = (container.get("state") or {}, container.get("lastState") or {})
    return any((s.get("terminated") or {}).get("exitCode") for s in states)


def _facts(pod: Object, container: Object) -> PodFacts:
    running, ended = reading.state(container, "running"), reading.state(container, "terminated")
    over = reading.status(pod).get("phase") in {"Succeeded", "Failed"}
    # A container that never began has no container id, though it may read as terminated.
    began = running is not None or bool((ended or {}).get("containerID") or (ended or {}).get("startedAt"))
    return PodFacts(
        name=reading.name(pod),
        uid=reading.uid(pod),
        rank=reading.rank(pod),
        container=str(container.get("name")),
        restarts=int(container.get("restartCount") or 0),
        started=began,
        terminated=ended is not None or (over and running is None),
        orderly=ended is not None and last_word(ended) is not None,
        labels=dict(reading.metadata(pod).get("labels") or {}),
    )


_NORMAL = {"Scheduled", "Pulling", "Pulled", "Killing", "Preempted", "Preempting"}
"""Normal events of pods worth a line. Created and Started are left out: a container's first line says as much."""
_TOP = {
    "Suspended",
    "Resumed",
    "Stopped",
    "Started",
    "Admitted",
    "QuotaReserved",
    "CreatedWorkload",
    "Pending",
    "Completed",
}
"""Normal events of anything else (the object, its child job, its Workload) worth a line."""


def events_in_words(snapshot: Snapshot, since_seen: set[str]) -> list[str]:
    """
    Lines for a task's log: every warning, and of the rest what tells how far the run is; oldest first, each once.

    :param since_seen: which were told before (UID and count); those told now are added to it.
    """
    lines = []
    short = _short_names(snapshot)
    for event in reading.own_events(snapshot):
        key = f"{reading.uid(event) or reading.name(event)}:{_count(event)}"
        if key in since_seen or not _worth_a_line(event):
            continue
        since_seen.add(key)
        lines.append(in_words(event, short))
    return lines


def in_words(event: Object, short: Mapping[str, str] | None = None) -> str:
    """
    One event as `pod node-0-0-abcde: FailedScheduling: 0/1 nodes are available (3 times)`.

    :param short: object name → what to call it.
    """
    about = event.get("involvedObject") or {}
    name = str(about.get("name") or "")
    what = str(about.get("kind") or "object")
    times = f" ({_count(event)} times)" if _count(event) > 1 else ""
    message = " ".join(str(event.get("message") or "").split())
    return f"{what[:1].lower()}{what[1:]} {(short or {}).get(name, name)}: {event.get('reason')}: {message}{times}"


def _short_names(snapshot: Snapshot) -> dict[str, str]:
    """A pod without its object's name before it: the log is that object's."""
    prefix = f"{reading.name(snapshot.object or snapshot.last or {})}-"
    names = {str((e.get("involvedObject") or {}).get("name") or "") for e in snapshot.events}
    return {n: n.removeprefix(prefix) for n in names if n.startswith(prefix)}


def _worth_a_line(event: Object) -> bool:
    if event.get("type") != "Normal":
        return True
    is_pod = (event.get("involvedObject") or {}).get("kind") == "Pod"
    return event.get("reason") in (_NORMAL if is_pod else _TOP)


def _count(event: Object) -> int:
    return int(event.get("count") or (event.get("series") or {}).get("count") or 1)
