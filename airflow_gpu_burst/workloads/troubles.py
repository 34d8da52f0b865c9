"""What keeps a pod from starting and will not heal by itself: named, with what to do. The start clock decides."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from airflow_gpu_burst.workloads import reading
from airflow_gpu_burst.workloads.snapshot import Object


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One word and a sentence."""

    reason: str
    message: str


_PULL = "check the image's name and tag, and image_pull_secrets of the connection if its registry wants a login"
_WAITING: Mapping[str, tuple[str, str]] = {
    # The two alternate while the kubelet tries again; one name, so that a log does not flicker.
    "ErrImagePull": ("ImagePullBackOff", _PULL),
    "ImagePullBackOff": ("ImagePullBackOff", _PULL),
    "InvalidImageName": ("InvalidImageName", "write it as registry/path/name:tag"),
    "ErrImageNeverPull": ("ErrImageNeverPull", "load it onto the node, or set image_pull_policy to IfNotPresent"),
    "RegistryUnavailable": ("RegistryUnavailable", "the registry does not answer; ask whoever runs it"),
    "ImageInspectError": ("ImageInspectError", "the image on the node is damaged; pull it again under another tag"),
    "CreateContainerConfigError": ("CreateContainerConfigError", "create what is missing in this namespace"),
    "CreateContainerError": ("CreateContainerError", "check command, mounts and security settings"),
    "RunContainerError": ("RunContainerError", "check that the image holds the command"),
    "CrashLoopBackOff": ("CrashLoopBackOff", "see the last lines of the run before"),
}
"""Why a container waits → our name and what to do. What is not here (ContainerCreating, PodInitializing) is normal."""

_SETUP_EVENTS: Mapping[str, str] = {
    "FailedMount": "create the volume, Secret or ConfigMap that it names",
    "FailedAttachVolume": "check the volume and its storage class",
    "FailedCreatePodSandBox": "look at the node's network and container runtime",
    "NetworkNotReady": "look at the node's network",
}
"""Warnings that hold a scheduled pod up while its container says no more than ContainerCreating."""


def trouble_of(pod: Object, events: Sequence[Object]) -> Trouble | None:
    """
    What holds this pod up; None: nothing that is known.

    :param events: of the run, oldest first.
    """
    scheduled = reading.condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        said = str(scheduled.get("message") or "") or _newest(pod, events, {"FailedScheduling"})
        return Trouble(
            reason="Unschedulable", message=f"pod {reading.name(pod)} fits on no node: {unschedulable(said)}"
        )
    creating = False
    for container in [*reading.containers(pod, init=True), *reading.containers(pod)]:
        waiting = reading.state(container, "waiting")
        if waiting is None:
            continue
        found = _waiting(pod, container, waiting)
        if found:
            return found
        creating = creating or waiting.get("reason") == "ContainerCreating"
    return _held_up(pod, events) if creating else None


def creation_trouble(events: Sequence[Object]) -> Trouble | None:
    """
    Why a job gets no pods at all: quota, admission webhooks, a missing service account.

    :param events: of the run, oldest first.
    """
    told = [e for e in events if e.get("reason") in {"FailedCreate", "JobCreationFailed", "SuccessfulCreate"}]
    if not told or not _is_warning(told[-1]):
        return None
    message = str(told[-1].get("message") or "").rstrip(".")
    return Trouble(
        reason="FailedCreate",
        message=f"the cluster refuses the pods: {message}. Free or raise the quota, or change what the policy names",
    )


def unschedulable(message: str) -> str:
    """
    The scheduler's words, and what they ask for: which resource or taint.

    :param message: such as `0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: ...`
    """
    # What follows is why preempting others would not help: it repeats the same reasons.
    words = message.split(" preemption: ")[0].strip().rstrip(".")
    advice = [say(found) for pattern, say in _ADVICE for found in dict.fromkeys(re.findall(pattern, words))]
    return f"{words or 'the scheduler does not say why'}. {'; '.join(advice) or 'Look at the pod and at the nodes'}"


_ADVICE: Sequence[tuple[str, Callable[[str], str]]] = (
    (r"Insufficient ([\w./-]*\w)", lambda what: f"{what}: wait until some is free, or ask for less"),
    (r"(Too many pods)", lambda _: "the nodes take no more pods"),
    (
        r"untolerated taint(?:\(s\))? ?(\{[^}]*\})",
        lambda taint: f"taint {taint}: add it to the platform's tolerations, or choose other nodes",
    ),
    (
        r"(node affinity/selector|node selector)",
        lambda _: "no node has the labels of the platform's node_selector: compare `kubectl get nodes --show-labels`",
    ),
    (r"(unschedulable)", lambda _: "nodes are cordoned: `kubectl uncordon`, once they may be used"),
    (r"(persistentvolumeclaim|volume node affinity|PersistentVolumes)", lambda _: "its volume fits no node"),
)


def _waiting(pod: Object, container: Object, waiting: Object) -> Trouble | None:
    known = _WAITING.get(str(waiting.get("reason")))
    if known is None:
        return None
    reason, advice = known
    image = f" (image {container.get('image')})" if "Image" in reason or "Registry" in reason else ""
    said = str(waiting.get("message") or "no more is said").strip().rstrip(".")
    where = f"container {container.get('name')} of pod {reading.name(pod)}{image}"
    return Trouble(reason=reason, message=f"{where} cannot start: {said}; {advice}")


def _held_up(pod: Object, events: Sequence[Object]) -> Trouble | None:
    about = reading.events_about(events, pod)
    # Only the newest: a warning that something else came after has healed.
    if not about or about[-1].get("reason") not in _SETUP_EVENTS or not _is_warning(about[-1]):
        return None
    reason, message = str(about[-1]["reason"]), str(about[-1].get("message") or "").rstrip(".")
    return Trouble(reason=reason, message=f"pod {reading.name(pod)} cannot start: {message}; {_SETUP_EVENTS[reason]}")


def _newest(pod: Object, events: Sequence[Object], reasons: set[str]) -> str:
    found = [str(e.get("message") or "") for e in reading.events_about(events, pod) if e.get("reason") in reasons]
    return found[-1] if found else ""


def _is_warning(event: Object) -> bool:
    return event.get("type") == "Warning"
