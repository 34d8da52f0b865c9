"""Why an object failed: the deepest cause that can still be seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_gpu_burst.workloads import reading
from airflow_gpu_burst.workloads.ends import End, end_of
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot

_OWN: Mapping[str, str] = {
    "DeadlineExceeded": "Its activeDeadlineSeconds have passed. Raise run_timeout, or look why it took so long",
    "FailedIndexes": "See the pods' events",
    "MaxFailedIndexesExceeded": "See the pods' events",
    "BackoffLimitExceeded": "Its pods failed more often than they may be restarted, and are gone; see the run's output",
    "PodFailurePolicy": "Its pod ended with an exit code after which nothing is started again; see the run's output",
    "ReachedMaxRestarts": "It was restarted as often as it may be; see the run's output",
}
_CHILD = {"DeadlineExceeded", "BackoffLimitExceeded", "PodFailurePolicy"}
"""Reasons of a JobSet's child job that say more than the JobSet's own; they are seen in its events."""


def deepest(top: Object, snapshot: Snapshot) -> End:
    """
    The cause of a failure: the pod that made it fail, if its state is still there, else what the job says.

    :param top: the failed object.
    """
    condition = reading.condition(top, "Failed")
    reason = str(condition.get("reason") or "Failed")
    if reason not in _OWN:
        reason = _child_reason(reading.own_events(snapshot)) or reason
    culprit = None if reason == "DeadlineExceeded" else _culprit(top, reading.own_pods(snapshot))
    if culprit is not None:
        return culprit
    said = str(condition.get("message") or "").strip().rstrip(".")
    message = f"{reading.name(top)}: {said or reason}. {_OWN.get(reason, 'See its events')}"
    return End(pod="", reason=reason, message=message, at=reading.since(top, "Failed") or 0.0)


def _culprit(top: Object, pods: Sequence[Object]) -> End | None:
    """The pod that failed last of its own. Those that the job ended when it failed carry a deletion time."""
    ends = [(pod, end) for pod in pods if (end := end_of(pod))]
    final = final_codes(top.get("spec") or {})
    fatal = [end for _, end in ends if end.code in final]
    if fatal:
        # The job fails with the first of them; later ones are ranks that lost their peer.
        return min(fatal, key=lambda end: (end.at, end.pod))

    def weight(found: tuple[Object, End]) -> tuple[Any, ...]:
        pod, end = found
        return (not end.disrupted, reading.deleting(pod) is None, end.at, end.pod)

    return max(ends, key=weight)[1] if ends else None


def final_codes(spec: Object) -> set[Any]:
    """Exit codes after which the job itself says that nothing is started again."""
    jobs = [spec, *((r.get("template") or {}).get("spec") or {} for r in spec.get("replicatedJobs") or [])]
    rules = [rule for job in jobs for rule in (job.get("podFailurePolicy") or {}).get("rules") or []]
    return {
        code
        for rule in rules
        if rule.get("action") == "FailJob"
        for code in (rule.get("onExitCodes") or {}).get("values") or []
    }


def _child_reason(events: Sequence[Object]) -> str:
    found = [
        str(e.get("reason"))
        for e in events
        if (e.get("involvedObject") or {}).get("kind") == "Job" and e.get("reason") in _CHILD
    ]
    return found[-1] if found else ""
