"""The pod template of a generated run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from airflow_gpu_burst import contract
from airflow_gpu_burst.platforms import Platform
from airflow_gpu_burst.workloads import identity
from airflow_gpu_burst.workloads.environment import TERMINATION_FILE, literal, variables
from airflow_gpu_burst.workloads.kinds import Kind
from airflow_gpu_burst.workloads.request import Request
from airflow_gpu_burst.workloads.snapshot import Object

TRAINER = "trainer"
RUNTIME = "gpu-burst-runtime"
"""Name of the init container that brings the runtime."""
RUNTIME_DIR = "/gpu-burst"
SCRATCH_DIR = "/scratch"
MASTER_PORT = 29500
"""What torchrun takes by default."""
FLUSH_S = 30
"""Seconds that a pod gets beyond what trainer and uploads take: for the spool and the last word. As long as Kubernetes
gives a pod as a whole by default."""


def template(kind: Kind, request: Request, nodes: int) -> Object:
    """
    The pod template: one pod per node.

    :param nodes: more than one: networks, NCCL environment and topology of the platform apply.
    """
    platform = request.platform
    notes = {identity.DEFAULT_CONTAINER: TRAINER}
    if nodes > 1 and platform.networks:
        notes["k8s.v1.cni.cncf.io/networks"] = ",".join(platform.networks)
    if nodes > 1 and request.spec.queue:
        notes |= {f"kueue.x-k8s.io/podset-{how}-topology": label for how, label in platform.topology.items()}
    return {
        "metadata": {"labels": identity.pod_labels(request), "annotations": notes},
        "spec": _pod_spec(kind, request, nodes),
    }


def termination_s(grace_s: float) -> int:
    """Seconds between a pod's SIGTERM and SIGKILL: the trainer's grace, as long again for its checkpoints, and some."""
    return math.ceil(2 * grace_s) + FLUSH_S


def _pod_spec(kind: Kind, request: Request, nodes: int) -> Object:
    platform = request.platform
    optional = {
        "serviceAccountName": request.service_account,
        # A trainer has no business with the API; who names an account wants it for something.
        "automountServiceAccountToken": None if request.service_account else False,
        "imagePullSecrets": [{"name": name} for name in request.image_pull_secrets],
        "nodeSelector": dict(platform.node_selector),
        "tolerations": [dict(toleration) for toleration in platform.tolerations],
        "runtimeClassName": platform.runtime_class,
        "initContainers": [_runtime_container(request)] if request.runtime_image else [],
    }
    return {
        # The runtime's exit code decides what comes next (`podFailurePolicy`), and the logs of a failed pod stay.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": termination_s(request.grace_s),
        # Otherwise every Service of the namespace is in every container's environment.
        "enableServiceLinks": False,
        **{name: value for name, value in optional.items() if value not in ("", None, [], {})},
        "containers": [_trainer(kind, request, nodes)],
        "volumes": _volumes(request),
    }


def _runtime_container(request: Request) -> Object:
    return {
        "name": RUNTIME,
        "image": request.runtime_image,
        **_pull_policy(request),
        "command": ["/opt/gpu-burst/install", RUNTIME_DIR],
        # A pod's request is the larger of its init containers' and its containers': this costs nothing.
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "runtime", "mountPath": RUNTIME_DIR}],
    }


def _trainer(kind: Kind, request: Request, nodes: int) -> Object:
    platform = request.platform
    start = ["python3", f"{RUNTIME_DIR}/run.py"] if request.runtime_image else ["gpu-burst"]
    mounts: list[Object] = [{"name": "scratch", "mountPath": SCRATCH_DIR}]
    if platform.shm:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if request.runtime_image:
        mounts.append({"name": "runtime", "mountPath": RUNTIME_DIR, "readOnly": True})
    security: dict[str, Any] = {"allowPrivilegeEscalation": False}
    if nodes > 1 and platform.capabilities:
        security["capabilities"] = {"add": list(platform.capabilities)}
    return {
        "name": TRAINER,
        "image": request.image,
        **_pull_policy(request),
        "command": [*start, "run", "--", *(literal(part) for part in request.spec.command)],
        "env": variables(kind, request, indexed=nodes > 1, plain=_environment(request, nodes)),
        "resources": resources(platform, request.spec.gpus, nodes),
        "securityContext": security,
        "terminationMessagePath": TERMINATION_FILE,
        "volumeMounts": mounts,
    }


def _environment(request: Request, nodes: int) -> dict[str, str]:
    platform, name = request.platform, request.name
    plain = {
        **platform.env,
        # Shared with other pods of the node, should it be a host path: the runtime makes its own folder in it, and
        # removes what killed pods left there.
        contract.ENV_SCRATCH: SCRATCH_DIR,
        contract.ENV_TERMINATION_FILE: TERMINATION_FILE,
    }
    if nodes == 1:
        return plain
    return {
        **plain,
        **platform.nccl_env,
        "MASTER_ADDR": f"{name}-node-0-0.{name}",
        "MASTER_PORT": str(MASTER_PORT),
    }


def resources(platform: Platform, gpus: int, nodes: int) -> Object:
    """What one pod asks for: its GPUs, their share of cores and memory, and devices for networks between nodes."""
    here = min(gpus, platform.gpus_per_node)
    share = max(here, 1)
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if platform.cpus_per_gpu:
        requests["cpu"] = str(platform.cpus_per_gpu * share)
    if platform.memory_per_gpu:
        requests["memory"] = limits["memory"] = _times(platform.memory_per_gpu, share)
    devices = {platform.gpu_resource: here} if here else {}
    devices |= platform.network_resources if nodes > 1 else {}
    for name, number in devices.items():
        requests[name] = limits[name] = str(number)
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _volumes(request: Request) -> list[Object]:
    volumes = [{"name": "scratch", **_scratch(request.platform.scratch)}]
    if request.platform.shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": request.platform.shm}})
    if request.runtime_image:
        volumes.append({"name": "runtime", "emptyDir": {}})
    return volumes


def _scratch(scratch: Mapping[str, Any]) -> Object:
    if "host_path" in scratch:
        return {"hostPath": {"path": scratch["host_path"], "type": "DirectoryOrCreate"}}
    if "storage_class" in scratch:
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": scratch["storage_class"],
            "resources": {"requests": {"storage": scratch["size"]}},
        }
        return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    size = (scratch.get("empty_dir") or {}).get("size_limit")
    return {"emptyDir": {"sizeLimit": size} if size else {}}


def _pull_policy(request: Request) -> dict[str, str]:
    return {"imagePullPolicy": request.image_pull_policy} if request.image_pull_policy else {}


def _times(quantity: str, count: int) -> str:
    number, unit = re.fullmatch(r"([0-9]+)(.*)", quantity).groups()  # type: ignore[union-attr]
    return f"{int(number) * count}{unit}"
