"""The environment of a run's containers: the contract, secrets by reference, and who the pod is."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_gpu_burst import contract
from airflow_gpu_burst.workloads.kinds import JOBSET, Kind
from airflow_gpu_burst.workloads.request import Request
from airflow_gpu_burst.workloads.snapshot import Object

TERMINATION_FILE = "/dev/termination-log"
INDEX = "batch.kubernetes.io/job-completion-index"
OWNER_LABELS: Mapping[str, str] = {
    "Job": "batch.kubernetes.io/controller-uid",
    JOBSET.name: "jobset.sigs.k8s.io/jobset-uid",
}
"""The label by which a pod knows the UID of its top object. On a MultiKueue worker it is the copy's, which is
what tells two copies of one run apart."""


def variables(kind: Kind, request: Request, *, indexed: bool, plain: Mapping[str, str]) -> list[Object]:
    """
    The container's `env` list.

    :param indexed: the pods have a completion index, which is their rank; otherwise the rank is 0.
    :param plain: variables beside the request's, which win over these.
    """
    rank = _field(contract.ENV_RANK, f"metadata.annotations['{INDEX}']") if indexed else _value(contract.ENV_RANK, "0")
    own = [
        _field(contract.ENV_POD_UID, "metadata.uid"),
        _field(contract.ENV_OWNER, f"metadata.labels['{OWNER_LABELS[kind.name]}']"),
        rank,
        _value(contract.ENV_GRACE, f"{request.grace_s:g}"),
    ]
    # Optional: a run without a session token has a Secret without that key.
    secrets = [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": request.secret, "key": name, "optional": True}},
        }
        for name in sorted(request.secret_env)
    ]
    merged = {**plain, **request.env}
    # Own ones first: `$(NAME)` in a user's variable is filled in only from what stands before it.
    return [*own, *(_value(name, literal(merged[name])) for name in sorted(merged)), *secrets]


def literal(text: str) -> str:
    """Text in which the kubelet fills in nothing: `$(NAME)` is the trainer's own affair."""
    return text.replace("$", "$$")


def _value(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
