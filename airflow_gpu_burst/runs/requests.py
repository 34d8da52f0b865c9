"""What was asked for, kept beside the run: to say what differs, and what a run is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from airflow_gpu_burst.errors import ObjectMissing
from airflow_gpu_burst.runlog import History, Open
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, RunKey
from airflow_gpu_burst.store import Store


def remember(store: Store, run_key: RunKey, spec: RunSpec) -> None:
    """Keep a request by its digest."""
    store.put(_spec_key(run_key, spec.digest), json.dumps(spec.to_dict(), ensure_ascii=False).encode())


def recall(store: Store, run_key: RunKey, opened: Open) -> Mapping[str, Any]:
    """The request that a generation was opened for, as `RunSpec.to_dict` gave it; empty when it is not there."""
    try:
        spec: Mapping[str, Any] = json.loads(store.get(_spec_key(run_key, opened.spec_digest)))
    except (ObjectMissing, ValueError):
        return {}
    return spec


def is_raw(store: Store, history: History, handle: Handle) -> bool:
    """Whether it is a manifest of the user's own, whose pods need not know the run log."""
    return bool(recall(store, handle.run_key, history.opens[handle.generation]).get("manifest"))


def _spec_key(run_key: RunKey, digest: str) -> str:
    return f"{run_key.prefix}/spec/{digest}.json"
