"""
What the API's answers mean: one observation from an object, its pods and events. Pure; no order matters.

By condition type and status "True" alone. `SuccessCriteriaMet` and `FailureTarget` are no ends: pods still run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from airflow_gpu_burst.state import Observation, Phase
from airflow_gpu_burst.workloads import reading
from airflow_gpu_burst.workloads.causes import deepest, final_codes
from airflow_gpu_burst.workloads.ends import End, end_of
from airflow_gpu_burst.workloads.identity import QUEUE
from airflow_gpu_burst.workloads.kinds import JOBSET, Kind
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot
from airflow_gpu_burst.workloads.troubles import creation_trouble, trouble_of


def interpret(kind: Kind, snapshot: Snapshot, clock_offset: float = 0.0) -> Observation:
    """
    Where the run is.

    :param clock_offset: the server's clock minus this machine's, in seconds; times are given by this machine's.
    """
    top = snapshot.object if snapshot.object is not None else snapshot.last
    if top is None:
        words = f"the {kind.name} is gone. {_AFTER_DELETION}"
        return Observation(phase=Phase.LOST, reason="Deleted", message=words)
    found = _ended(kind, top, snapshot)
    if found is None and snapshot.object is None:
        found = _deleted(kind, top)
    if found is None:
        found = _alive(kind, top, snapshot)
    submitted = reading.when(reading.metadata(top).get("creationTimestamp"))
    return replace(
        found,
        since=None if found.since is None else found.since - clock_offset,
        submitted=None if submitted is None else submitted - clock_offset,
    )


_AFTER_DELETION = "Someone deleted it, or its namespace; a retry goes on from the last checkpoint"


def _deleted(kind: Kind, top: Object) -> Observation:
    message = f"{kind.name} {reading.name(top)} is gone, and it had not ended. {_AFTER_DELETION}"
    return Observation(phase=Phase.LOST, reason="Deleted", message=message, since=reading.deleting(top))


def _ended(kind: Kind, top: Object, snapshot: Snapshot) -> Observation | None:
    """The verdict, if there is one."""
    success = "Completed" if kind is JOBSET else "Complete"
    state = reading.status(top).get("terminalState")
    succeeded = reading.is_true(top, success) or state == "Completed"
    failed = reading.is_true(top, "Failed") or state == "Failed"
    if succeeded and failed:
        # Never seen, but permitted: the later one holds, and a failure if they are of one time.
        succeeded = (reading.since(top, success) or 0.0) > (reading.since(top, "Failed") or 0.0)
        failed = not succeeded
    if succeeded:
        return Observation(phase=Phase.SUCCEEDED, reason="Succeeded", since=reading.since(top, success), code=0)
    if not failed:
        return None
    at, deletion = reading.since(top, "Failed"), reading.deleting(top)
    if deletion is not None and at is not None and at >= deletion:
        # What is deleted fails as its pods are ended: the deletion is the cause.
        return _deleted(kind, top)
    end = deepest(top, snapshot)
    return Observation(phase=Phase.FAILED, reason=end.reason, message=end.message, code=end.code, since=at)


def _alive(kind: Kind, top: Object, snapshot: Snapshot) -> Observation:
    pods, events = reading.own_pods(snapshot), reading.own_events(snapshot)
    ends = {reading.uid(pod): end_of(pod) for pod in pods}
    live = [p for p in pods if ends[reading.uid(p)] is None and reading.status(p).get("phase") != "Succeeded"]
    running = [p for p in live if reading.state(reading.main_status(p), "running") is not None]
    if reading.deleting(top) is not None:
        phase = Phase.RUNNING if running else Phase.STARTING
        message = f"{kind.name} {reading.name(top)} is being deleted, and not by this task; its pods are ending"
        return Observation(phase=phase, reason="Deleting", message=message, since=_first_start(pods))
    if _suspended(top):
        return _waiting(top, pods, events)
    trouble = next((t for p in live if p not in running if (t := trouble_of(p, events))), None)
    if running:
        found = Observation(phase=Phase.RUNNING, since=_first_start(pods))
    elif _ending(top, pods, [e for e in ends.values() if e]):
        words = "the trainer has ended; waiting for the cluster to say how"
        return Observation(phase=Phase.RUNNING, reason="Finishing", message=words, since=_first_start(pods))
    else:
        found = _not_running(top, pods, live, events, [e for e in ends.values() if e])
    return replace(found, reason=trouble.reason, message=trouble.message) if trouble else found


def _suspended(top: Object) -> bool:
    return bool((top.get("spec") or {}).get("suspend"))


def _waiting(top: Object, pods: Sequence[Object], events: Sequence[Object]) -> Observation:
    """
    Suspended: in the queue for the first time, or again.

    Every change of a spec raises `metadata.generation`, and the first change of an object that was created suspended is
    its start. A person's own edit of a waiting object reads the same; then a queued run is called preempted.
    """
    since = reading.since(top, "Suspended")
    generation = int(reading.metadata(top).get("generation") or 1)
    restarted = generation > 1 or any(reading.first_start(p) is not None for p in pods)
    if restarted:
        said = _newest_message(events, lambda e: e.get("reason") == "Stopped")
        message = f"taken out of the cluster, waiting to be admitted again{_colon(said)}"
        return Observation(phase=Phase.PREEMPTED, reason="Preempted", message=message, since=since)
    created = reading.when(reading.metadata(top).get("creationTimestamp"))
    queue = reading.label(top, QUEUE)
    if not queue:
        message = "suspended, and in no queue: nothing will start it. Set queue_name, or spec.suspend to false"
        return Observation(phase=Phase.QUEUED, reason="Suspended", message=message, since=created)
    said = _newest_message(events, lambda e: (e.get("involvedObject") or {}).get("kind") == "Workload")
    message = f"waiting in queue {queue}{_colon(said)}"
    return Observation(phase=Phase.QUEUED, reason="Queued", message=message, since=created)


def _ending(top: Object, pods: Sequence[Object], ends: Sequence[End]) -> bool:
    """Whether the cluster is about to say how it ended: then nothing restarts."""
    if reading.is_true(top, "SuccessCriteriaMet") or reading.is_true(top, "FailureTarget"):
        return True
    if pods and all(_succeeded(p) for p in pods):
        return True
    spec = top.get("spec") or {}
    failed = [e for e in ends if not e.disrupted]
    if any(e.code in final_codes(spec) for e in failed):
        return True
    limit = spec.get("backoffLimit")
    return limit is not None and len(failed) > int(limit)


def _succeeded(pod: Object) -> bool:
    """By its phase, or by its main container: the phase follows a second later."""
    ended = reading.state(reading.main_status(pod), "terminated")
    return reading.status(pod).get("phase") == "Succeeded" or (ended is not None and ended.get("exitCode") == 0)


def _not_running(
    top: Object, pods: Sequence[Object], live: Sequence[Object], events: Sequence[Object], ends: Sequence[End]
) -> Observation:
    status = reading.status(top)
    again = any(reading.main_status(p).get("restartCount") for p in live)
    if ends or again or status.get("failed") or status.get("restarts") or reading.is_true(top, "RestartingJobSet"):
        last = max(ends, key=lambda e: (e.at, e.pod), default=None)
        message = f"starting again: {last.message}" if last else "starting again after a failure"
        reason = last.reason if last else "Restarting"
        # The run's clock goes on: from the first start that can still be seen.
        since = _first_start(pods) or _resumed(top)
        return Observation(phase=Phase.RESTARTING, reason=reason, message=message, since=since)
    if not live:
        refused = creation_trouble(events)
        if refused:
            return Observation(
                phase=Phase.STARTING, reason=refused.reason, message=refused.message, since=_resumed(top)
            )
        if not pods and not any(status.get(k) for k in ("conditions", "startTime", "replicatedJobsStatus")):
            created = reading.when(reading.metadata(top).get("creationTimestamp"))
            return Observation(phase=Phase.SUBMITTED, reason="Submitted", since=created)
    return Observation(phase=Phase.STARTING, reason=_step(live), since=_resumed(top))


def _step(live: Sequence[Object]) -> str:
    """How far the pod that is furthest behind has come: one word."""
    if not live:
        return "CreatingPods"
    if any(not reading.is_true(p, "PodScheduled") for p in live):
        return "Scheduling"
    waiting = [reading.state(c, "running") for p in live for c in reading.containers(p, init=True)]
    return "Initializing" if any(waiting) else "ContainerCreating"


def _resumed(top: Object) -> float | None:
    """When it was let go: out of the queue, else by the controller, else created."""
    times = (
        reading.since(top, "Suspended") if reading.is_false(top, "Suspended") else None,
        reading.when(reading.status(top).get("startTime")),
        reading.when(reading.metadata(top).get("creationTimestamp")),
    )
    return next((t for t in times if t is not None), None)


def _first_start(pods: Sequence[Object]) -> float | None:
    return min((t for t in map(reading.first_start, pods) if t is not None), default=None)


def _newest_message(events: Sequence[Object], wanted: Callable[[Any], bool]) -> str:
    found = [str(e.get("message") or "") for e in events if wanted(e)]
    return found[-1] if found else ""


def _colon(text: str) -> str:
    return f": {text.strip().rstrip('.')}" if text.strip() else ""
