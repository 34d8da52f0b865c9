"""A request as a Kubernetes object: a Job for one node, a JobSet for several."""

from __future__ import annotations

import math

from airflow_gpu_burst.errors import FINAL_CODES, SpecError
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.workloads import identity
from airflow_gpu_burst.workloads.kinds import JOB, JOBSET, Kind
from airflow_gpu_burst.workloads.pods import TRAINER, template, termination_s
from airflow_gpu_burst.workloads.request import Request
from airflow_gpu_burst.workloads.snapshot import Object

DEADLINE_SLACK_S = 300
"""Seconds by which the server's deadline comes after the trigger's, so that the trigger, which can say more,
comes first."""
LONGEST_NAME = 63


def render(request: Request) -> tuple[Kind, Object]:
    """
    The object to create.

    :raises SpecError: GPUs that are no whole nodes, no image, or a name that is too long for so many nodes.
    """
    nodes = request.platform.check_gpus(request.spec.gpus)
    if not request.image:
        raise SpecError("image is empty: a cluster runs containers, e.g. image='registry/team/train:1'")
    _check_name(request.name, nodes)
    kind = JOB if nodes == 1 else JOBSET
    metadata = {
        "name": request.name,
        "namespace": request.namespace,
        "labels": identity.object_labels(request),
        "annotations": identity.object_annotations(request),
    }
    # Kueue's webhook sets it as well; where that is down, nothing must start past the queue.
    suspend = {"suspend": True} if request.spec.queue else {}
    job = _job_spec(kind, request, nodes)
    ttl = {"ttlSecondsAfterFinished": request.keep_finished_s}
    spec = {**suspend, **ttl, **(job if nodes == 1 else _jobset_spec(job))}
    return kind, {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "spec": spec}


def _job_spec(kind: Kind, request: Request, nodes: int) -> Object:
    deadline = deadline_s(request.spec.timeouts, request.grace_s)
    ranks = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes} if nodes > 1 else {}
    return {
        **ranks,
        # Counted over all ranks: `restarts` rounds in which every rank fails.
        "backoffLimit": (request.restarts + 1) * nodes - 1,
        **({"activeDeadlineSeconds": deadline} if deadline else {}),
        # Only when the old pod is certainly over, so that two pods of one rank do not overlap.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # Preempted, drained, evicted, its node gone: no failure of the run, however often; the run timeout
                # still bounds it. First, since a trainer that is told to end may well fail while it does.
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                # Everything else counts: exit code 4 (a retry may help), 137 and 143 (killed).
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": TRAINER,
                        "operator": "In",
                        "values": sorted(FINAL_CODES),
                    },
                },
            ]
        },
        "template": template(kind, request, nodes),
    }


def _jobset_spec(job: Object) -> Object:
    # No failure policy: the child job starts ranks again by itself, and the runtime brings the others together.
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }


def deadline_s(timeouts: Timeouts, grace_s: float) -> int:
    """
    Seconds after which the cluster ends the run by itself, should nobody else; 0: never.

    Counted while the job is not suspended: time in the queue is not in it. Without a limit for the start there is none
    for the whole.
    """
    if timeouts.run_s is None or timeouts.start_s is None:
        return 0
    return math.ceil(timeouts.start_s + timeouts.run_s) + termination_s(grace_s) + DEADLINE_SLACK_S


def _check_name(name: str, nodes: int) -> None:
    # What the controllers make of it: a pod is NAME-xxxxx, or in a JobSet NAME-node-0-INDEX-xxxxx.
    longest = f"{name}-node-0-{nodes - 1}-xxxxx" if nodes > 1 else f"{name}-xxxxx"
    if len(longest) > LONGEST_NAME:
        raise SpecError(
            f"name {name!r} is too long for {nodes} nodes: pods would be called {longest}, and {LONGEST_NAME} "
            f"characters are the limit. Use one that is {len(longest) - LONGEST_NAME} shorter"
        )
