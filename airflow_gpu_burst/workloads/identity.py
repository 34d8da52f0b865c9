"""Whose an object is: its labels and annotations, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from airflow_gpu_burst.workloads.request import Request

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "airflow-gpu-burst"
MANAGED = f"{MANAGED_BY}={MANAGER}"
"""Label selector of everything that is ours."""
NAME = "gpu-burst/name"
RUN_KEY = "gpu-burst/run-key"
GENERATION = "gpu-burst/generation"
SPEC_DIGEST = "gpu-burst/spec-digest"
STORE = "gpu-burst/store"
TRY_NUMBER = "gpu-burst/try-number"
DAG = "gpu-burst/dag"
TASK = "gpu-burst/task"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def pod_labels(request: Request) -> dict[str, str]:
    """Labels of the object and of its pods. Never the queue's: pods with it may be queued a second time."""
    return {MANAGED_BY: MANAGER, NAME: request.name}


def object_labels(request: Request) -> dict[str, str]:
    """Labels of the object: what to select by, what Kueue reads, and some for people."""
    optional = {
        DAG: label_value(request.run_key.dag_id),
        TASK: label_value(request.run_key.task_id),
        QUEUE: request.spec.queue,
        PRIORITY: request.spec.priority,
    }
    found = {name: value for name, value in optional.items() if value}
    return {**pod_labels(request), GENERATION: str(request.generation), **found}


def object_annotations(request: Request) -> dict[str, str]:
    """Who the object is, in full: a label takes neither 250 characters nor Unicode."""
    return {
        RUN_KEY: run_key_text(request.run_key.to_dict()),
        GENERATION: str(request.generation),
        SPEC_DIGEST: request.spec.digest,
        STORE: request.store_uri,
        TRY_NUMBER: str(request.try_number),
    }


def run_key_text(run_key: Mapping[str, Any]) -> str:
    """A run key (`RunKey.to_dict`) as canonical JSON: equal text means equal run key."""
    return json.dumps(dict(run_key), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def label_value(text: str) -> str:
    """Text as a label takes it: for people, never for identity; may be empty."""
    return _UNSAFE.sub("-", text).strip("-_.")[:63].strip("-_.")
