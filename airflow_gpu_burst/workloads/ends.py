"""How one pod came to its end: every end has a name, and says what to do."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_gpu_burst.workloads import reading
from airflow_gpu_burst.workloads.pods import RUNTIME
from airflow_gpu_burst.workloads.snapshot import Object


@dataclass(frozen=True, kw_only=True)
class End:
    """
    Why a pod is over, or about to be.

    :param code: exit code of the runtime, if it ended by itself.
    :param at: seconds since the epoch, the server's clock; 0: unknown.
    :param disrupted: the cluster took the pod away; the run did not fail.
    """

    pod: str
    reason: str
    message: str
    code: int | None = None
    at: float = 0.0
    disrupted: bool = False


_DISRUPTIONS: Mapping[str, tuple[str, str]] = {
    "PreemptionByScheduler": ("Preempted", "a pod of higher priority took its place"),
    "EvictionByEvictionAPI": ("Evicted", "it was evicted, as when a node is drained"),
    "DeletionByTaintManager": ("NodeLost", "its node does not answer, or has got a taint that it does not tolerate"),
    "DeletionByPodGC": ("NodeLost", "its node is gone"),
    "TerminationByKubelet": ("Evicted", "its node ran short of memory or disk, or is shutting down"),
}
"""Reason of the condition DisruptionTarget → our name and words."""

_POD_REASONS: Mapping[str, str] = {
    "Evicted": "Ask for what the pod really uses (memory, ephemeral storage), or keep large files on /scratch",
    "NodeLost": "The cluster starts another pod once the node is known to be gone",
    "DeadlineExceeded": "Raise run_timeout, or look why it took so long",
}


def end_of(pod: Object) -> End | None:
    """Why this pod failed or is being taken away; None: neither."""
    name, status = reading.name(pod), reading.status(pod)
    own = str(status.get("reason") or "")
    if status.get("phase") in {"Failed", "Unknown"} and own and own != "Terminated":
        advice = _POD_REASONS.get(own, "See the pod's events")
        words = f"pod {name}: {own}: {_sentence(status.get('message'))} {advice}"
        return End(
            pod=name, reason=_word(own), message=words, at=_ended_at(pod), disrupted=own in {"Evicted", "NodeLost"}
        )
    disruption = reading.condition(pod, "DisruptionTarget")
    if disruption.get("status") == "True":
        return _disrupted(pod, disruption)
    return _failed_container(pod)


def _disrupted(pod: Object, disruption: Object) -> End:
    reason, words = _DISRUPTIONS.get(str(disruption.get("reason")), ("Evicted", "the cluster took it away"))
    node = (pod.get("spec") or {}).get("nodeName") or "no node"
    message = (
        f"pod {reading.name(pod)} on {node}: {words} ({disruption.get('message') or disruption.get('reason')}). "
        "When it is started again it goes on from the last checkpoint"
    )
    at = reading.when(disruption.get("lastTransitionTime")) or 0.0
    return End(pod=reading.name(pod), reason=reason, message=message, at=at, disrupted=True)


def _failed_container(pod: Object) -> End | None:
    main = reading.main_container(pod)
    ended = reading.state(reading.main_status(pod), "terminated") or {}
    if reading.status(pod).get("phase") != "Failed":
        # A sidecar or an init container may yet be started again; the run itself is over when it may not.
        restarts = (pod.get("spec") or {}).get("restartPolicy") != "Never"
        if restarts or not ended.get("exitCode"):
            return None
    # An init container first: nothing after it ran. Then the run itself, then whatever stands beside it.
    for init in (True, False):
        found = reading.containers(pod, init=init)
        for container in sorted(found, key=lambda c: (c.get("name") != main, str(c.get("name")))):
            end = reading.state(container, "terminated")
            if end and end.get("exitCode") != 0:
                return _container_end(pod, container, end, init=init)
    if reading.status(pod).get("phase") == "Failed":
        message = f"pod {reading.name(pod)} failed and does not say why. See its events and its node's"
        return End(pod=reading.name(pod), reason="Error", message=message, at=_ended_at(pod))
    return None


def _container_end(pod: Object, container: Object, ended: Object, *, init: bool) -> End:
    where = f"{'init ' if init else ''}container {container.get('name')} of pod {reading.name(pod)}"
    exit_code, why = int(ended.get("exitCode") or 0), str(ended.get("reason") or "")
    word = last_word(ended)
    by_itself = exit_code if exit_code < 128 and not init else None
    if why == "OOMKilled":
        # Also when the runtime lived on to say that its trainer was killed: this is why.
        reason, message = "OOMKilled", _out_of_memory(pod, container, where)
    elif word and not init:
        reason, message = word["reason"], word["message"] or f"{where} ended with exit code {exit_code}"
    elif why in {"StartError", "ContainerCannotRun"} or exit_code in {126, 127}:
        reason, message, by_itself = "StartError", _start_error(container, ended, where), None
    elif exit_code > 128:
        reason, message = "Killed", f"{where} was killed by {_signal_name(exit_code - 128)}. {_LAST_LINES}"
    else:
        reason = "InitContainerFailed" if init else "Error"
        message = f"{where} ended with exit code {exit_code}{_said(ended)}. {_LAST_LINES}"
    at = reading.when(ended.get("finishedAt")) or 0.0
    return End(pod=reading.name(pod), reason=reason, message=message, code=by_itself, at=at)


_LAST_LINES = "See its last lines"


def last_word(ended: Object) -> dict[str, str] | None:
    """What the runtime left as its termination message: reason and message; None: something else, or nothing."""
    try:
        found = json.loads(ended.get("message") or "")
        return {"reason": _word(str(found["reason"])), "message": str(found["message"])}
    except (ValueError, KeyError, TypeError):
        return None


def _out_of_memory(pod: Object, container: Object, where: str) -> str:
    specs = (pod.get("spec") or {}).get("containers") or []
    spec: Object = next((c for c in specs if c.get("name") == container.get("name")), {})
    limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
    had = f"its limit of {limit} (/dev/shm included)" if limit else "what its node has"
    return (
        f"{where} needed more memory than {had} and was killed. Raise its limit (memory_per_gpu of the "
        "platform), or let the trainer use less: fewer loader workers, smaller batches"
    )


def _start_error(container: Object, ended: Object, where: str) -> str:
    image = container.get("image")
    advice = f"The image {image} must hold the command; one without gpu-burst needs python3, and a runtime_image"
    if container.get("name") == RUNTIME:
        advice = f"The runtime image must hold /opt/gpu-burst/install: check runtime_image ({image})"
    return f"{where} could not start{_said(ended)}. {advice}"


def _said(ended: Object) -> str:
    text = str(ended.get("message") or "").strip()
    return f": {text[-500:].rstrip('.')}" if text and not last_word(ended) else ""


def _ended_at(pod: Object) -> float:
    states = [reading.state(c, "terminated") or {} for c in reading.containers(pod)]
    times = [reading.when(s.get("finishedAt")) for s in states]
    times.append(reading.when(reading.metadata(pod).get("creationTimestamp")))
    return max((t for t in times if t), default=0.0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _word(text: str) -> str:
    """One CamelCase word: `OutOfnvidia.com/gpu` becomes `OutOfNvidiaComGpu`."""
    parts = "".join(c if c.isalnum() else " " for c in text).split()
    return "".join(p[:1].upper() + p[1:] for p in parts) or "Error"


def _sentence(text: Any) -> str:
    words = str(text or "").strip().rstrip(".")
    return f"{words}." if words else ""
