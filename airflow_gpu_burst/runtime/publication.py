"""
Publishing a model: its files lie under keys of the epoch, the run log's `finish` names their manifest, and
one small record makes it a version of that name. Written by the pod, and again by whoever collects: the
record is created once, and both write the same bytes.

`models/<name>/versions/<version>.json` is the list of versions; a reader follows `manifest` to the files.
"""

from __future__ import annotations

import json

from airflow_gpu_burst.contract import PodResult
from airflow_gpu_burst.errors import ObjectExists, PromotionConflict
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import Store


def model_version(run_key: RunKey, generation: int) -> str:
    """A version names the run that made it; the same run cleared and run again makes another."""
    return f"{run_key.digest[:16]}-g{generation}"


def version_key(name: str, version: str) -> str:
    """Where the record of a model version lies."""
    return f"models/{name}/versions/{version}.json"


def publish(store: Store, run_key: RunKey, generation: int, result: PodResult) -> str | None:
    """
    Make the model of a finished run a version; returns the record's key, None when there is no model.

    :raises PromotionConflict: that version exists with another content.
    """
    if result.model is None:
        return None
    record = {
        "name": result.model_name,
        "version": result.model_version,
        "manifest": {"key": result.model.key, "sha256": result.model.sha256},
        "run_key": run_key.to_dict(),
        "generation": generation,
    }
    data = json.dumps(record, sort_keys=True, ensure_ascii=False).encode()
    key = version_key(result.model_name, result.model_version)
    try:
        store.create(key, data)
    except ObjectExists as error:
        if store.get(key) != data:
            raise PromotionConflict(
                f"{key} exists with another content; choose another name with publish=, or remove it"
            ) from error
    return key
