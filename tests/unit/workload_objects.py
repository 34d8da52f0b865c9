"""API objects as Kubernetes 1.34, JobSet 0.11 and Kueue 0.17 write them; only the parts that are read vary."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

from airflow_gpu_burst.platforms import load
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.workloads import Request, render
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot

T0 = 1_780_000_000.0
UID = "5a1f6d0e-3d2f-4a6a-9a64-2f8b6a3d8b11"
KEY = RunKey(dag_id="yield_rca", task_id="train", run_id="manual__2026-01-01T00:00:00+00:00")
PLAIN_ENV = {"GPU_BURST_STORE": "s3://checkpoints/fab", "GPU_BURST_CONTEXT": "runs/x/context/y.json"}


def at(seconds: float) -> str:
    """A time of the API, so many seconds after the object was created."""
    return datetime.fromtimestamp(T0 + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def request(**changes: Any) -> Request:
    spec = {"command": ("python", "train.py"), "gpus": 1, "platform": "b300", "queue": "gpu-batch"}
    own = set(RunSpec.__dataclass_fields__) - set(Request.__dataclass_fields__)
    spec |= {name: changes.pop(name) for name in list(changes) if name in own}
    values: dict[str, Any] = {
        "name": KEY.object_name(1),
        "namespace": "train",
        "run_key": KEY,
        "generation": 1,
        "try_number": 1,
        "spec": RunSpec(**spec),
        "platform": load("b300"),
        "image": "lab.local/base:1",
        "env": PLAIN_ENV,
        "secret_env": frozenset({"AWS_SECRET_ACCESS_KEY"}),
        "secret": "fab-store",
        "store_uri": "s3://checkpoints/fab",
    }
    return Request(**{**values, **changes})


def condition(kind: str, status: str = "True", reason: str = "", message: str = "", after: float = 1) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastProbeTime": at(after),
        "lastTransitionTime": at(after),
    }


def job(*conditions: Object, spec: Object | None = None, meta: Object | None = None, **status: Any) -> Object:
    """A Job that is not suspended, under the name and with the spec that we submit."""
    _, manifest = render(request())
    made = copy.deepcopy(manifest)
    made["metadata"] |= {"uid": UID, "creationTimestamp": at(0), "generation": 2, **(meta or {})}
    made["spec"] |= {"suspend": False, **(spec or {})}
    made["status"] = {"conditions": list(conditions), **status}
    return made


def jobset(*conditions: Object, spec: Object | None = None, meta: Object | None = None, **status: Any) -> Object:
    _, manifest = render(request(gpus=16))
    made = copy.deepcopy(manifest)
    made["metadata"] |= {"uid": UID, "creationTimestamp": at(0), "generation": 2, **(meta or {})}
    made["spec"] |= {"suspend": False, **(spec or {})}
    made["status"] = {"conditions": list(conditions), "restarts": 0, **status}
    return made


RESUMED = condition("Suspended", "False", "JobResumed", "Job resumed", after=5)


def pod(suffix: str = "abcde", *, phase: str = "Running", rank: int | None = None, **parts: Any) -> Object:
    """A pod of the Job, or with a rank of the JobSet. `trainer`, `init`: their states."""
    name = KEY.object_name(1)
    labels = {"gpu-burst/name": name, "batch.kubernetes.io/job-name": name, "batch.kubernetes.io/controller-uid": UID}
    annotations = {"kubectl.kubernetes.io/default-container": "trainer"}
    if rank is not None:
        labels |= {
            "batch.kubernetes.io/job-name": f"{name}-node-0",
            "batch.kubernetes.io/controller-uid": "child-uid",
            "batch.kubernetes.io/job-completion-index": str(rank),
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/jobset-uid": UID,
        }
        annotations["batch.kubernetes.io/job-completion-index"] = str(rank)
        name = f"{name}-node-0-{rank}"
    conditions = parts.pop("conditions", [condition("PodScheduled", after=6)])
    status: Object = {"phase": phase, "conditions": conditions, **parts.pop("status", {})}
    for key, container in (("init", "gpu-burst-runtime"), ("trainer", "trainer"), ("sidecar", "sidecar")):
        if key in parts:
            state = dict(parts.pop(key))
            entry = {
                "name": container,
                "image": "lab.local/base:1",
                "restartCount": state.pop("restartCount", 0),
                "lastState": state.pop("lastState", {}),
                "state": state,
            }
            status.setdefault("initContainerStatuses" if key == "init" else "containerStatuses", []).append(entry)
    meta = {
        "name": f"{name}-{suffix}",
        "namespace": "train",
        "uid": f"uid-{suffix}-{rank}",
        "labels": labels,
        "annotations": annotations,
        "creationTimestamp": at(6),
        **parts.pop("meta", {}),
    }
    _, manifest = render(request(runtime_image="lab.local/runtime:1"))
    spec = {**manifest["spec"]["template"]["spec"], "nodeName": "gpu-0", **parts.pop("spec", {})}
    assert not parts, parts
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}


def running(start: float = 10) -> Object:
    return {"running": {"startedAt": at(start)}}


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def ended(code: int, reason: str = "", message: str = "", start: float = 10, end: float = 20) -> Object:
    state = {
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "startedAt": at(start),
        "finishedAt": at(end),
        "containerID": "containerd://0f",
    }
    return {"terminated": {**state, **({"message": message} if message else {})}}


def word(code: int, reason: str, message: str) -> str:
    """The runtime's last word, as the kubelet hands it on."""
    return json.dumps({"code": code, "reason": reason, "message": message, "at": T0})


def event(
    about: Object,
    reason: str,
    message: str = "",
    *,
    kind: str = "Warning",
    after: float = 7,
    count: int = 1,
    uid: str = "",
) -> Object:
    involved = {
        "kind": about.get("kind"),
        "name": about["metadata"]["name"],
        "namespace": "train",
        "uid": about["metadata"].get("uid", ""),
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{involved['name']}.{reason}.{after}", "uid": uid or f"event-{reason}-{after}"},
        "involvedObject": involved,
        "reason": reason,
        "message": message,
        "type": kind,
        "count": count,
        "firstTimestamp": at(after),
        "lastTimestamp": at(after),
    }


def snap(obj: Object | None, *pods: Object, events: tuple[Object, ...] = (), last: Object | None = None) -> Snapshot:
    return Snapshot(object=obj, pods=tuple(pods), events=events, last=last)
