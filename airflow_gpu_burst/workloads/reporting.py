"""The state of a run in a few lines, for an error: conditions, pods, what the cluster warned of."""

from __future__ import annotations

from airflow_gpu_burst.workloads import reading
from airflow_gpu_burst.workloads.ends import end_of
from airflow_gpu_burst.workloads.following import in_words
from airflow_gpu_burst.workloads.kinds import Kind
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot
from airflow_gpu_burst.workloads.troubles import trouble_of

MOST_PODS = 8
MOST_EVENTS = 12
"""Enough for one attempt of a few ranks; an error must stay readable."""
MOST_CHARACTERS = 400
"""Of one line: a scheduler on a large cluster writes pages."""


def report(kind: Kind, snapshot: Snapshot) -> str:
    """Conditions of the object and of its newest pods, and the newest warnings, oldest first; no secret is in it."""
    top = snapshot.object or snapshot.last
    lines = [f"{kind.name} {reading.name(top)}: {_conditions(top)}" if top else f"{kind.name}: gone"]
    events = reading.own_events(snapshot)
    pods = reading.own_pods(snapshot)
    if len(pods) > MOST_PODS:
        lines.append(f"({len(pods) - MOST_PODS} older pods are left out)")
    for pod in pods[-MOST_PODS:]:
        node = (pod.get("spec") or {}).get("nodeName") or "no node"
        phase = reading.status(pod).get("phase") or "Unknown"
        cause = end_of(pod) or (trouble_of(pod, events) if phase in {"Pending", "Running"} else None)
        why = f"{cause.reason}: {cause.message}" if cause else _conditions(pod)
        lines.append(f"pod {reading.name(pod)} on {node}: {phase}; {why}")
    warnings = [e for e in events if e.get("type") == "Warning"]
    lines += [in_words(event) for event in warnings[-MOST_EVENTS:]]
    return "\n".join(_short(" ".join(line.split())) for line in lines)


def _conditions(obj: Object) -> str:
    """What holds and why, and what does not hold although it should."""
    kinds = sorted({str(c.get("type")) for c in reading.status(obj).get("conditions") or []})
    found = []
    for kind in kinds:
        condition = reading.condition(obj, kind)
        words = ": ".join(str(w) for w in (condition.get("reason"), condition.get("message")) if w)
        found.append(f"{kind}={condition.get('status')}{f' ({words})' if words else ''}")
    return ", ".join(found) or "no conditions"


def _short(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"
