"""
Publishing a model: its files lie under keys of the epoch, the run log's `finish` names their manifest. They are brought
to a folder of their own, `<name>/<version>/` under their own names with a marker last, and one small record makes that
a version of the name. Done by the pod, and again by whoever collects: both write the same bytes.

`models/<name>/versions/<version>.json` is the list of versions; the folder is `PodResult.model_uri`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from airflow_gpu_burst.contract import PodContext, PodResult
from airflow_gpu_burst.errors import ObjectExists, PromotionConflict
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import Store, StoreConfig, open_store

ENV_MODELS = "GPU_BURST_MODELS_STORE"
"""In the pod: where models are published, `s3://bucket/prefix` with the store's keys; by default `models/` there."""


def model_version(run_key: RunKey, generation: int) -> str:
    """A version names the run that made it; the same run cleared and run again makes another."""
    return f"{run_key.digest[:16]}-g{generation}"


def version_key(name: str, version: str) -> str:
    """Where the record of a model version lies."""
    return f"models/{name}/versions/{version}.json"


def model_uri(env: Mapping[str, str], store: Store, context: PodContext) -> str:
    """The folder of this run's model, to be noted in its result: whoever collects that has not this environment."""
    models = env.get(ENV_MODELS, "").rstrip("/") or f"{store.uri.rstrip('/')}/models"
    return f"{models}/{context.publish}/{model_version(context.run_key, context.generation)}"


def publish(
    store: Store,
    config: StoreConfig,
    run_key: RunKey,
    generation: int,
    result: PodResult,
    *,
    scratch: Path | None = None,
) -> str | None:
    """
    Make the model of a finished run a version; returns the record's key, None when there is no model.

    :param config: of the store.
    :param scratch: a folder for what no server can copy; None: the system's for temporary files.
    :raises PromotionConflict: that version exists with another content.
    """
    if result.model is None:
        return None
    if result.model_uri:
        _bring(store, config, result, scratch)
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


def _bring(store: Store, config: StoreConfig, result: PodResult, scratch: Path | None) -> None:
    """The model's files to their folder, by the server itself where it can."""
    # Most runs publish nothing, and their collector needs none of this.
    from airflow_gpu_burst.checkpoint.publishing import publish_tree
    from airflow_gpu_burst.transfer import open_mover

    assert result.model is not None
    manifest = (result.model.key, result.model.sha256)
    own = f"{config.uri.rstrip('/')}/"
    with closing(open_mover(config)) as mover:
        if result.model_uri.startswith(own):
            prefix = result.model_uri.removeprefix(own)
            publish_tree(mover, manifest, to=mover, store=store, prefix=prefix, scratch=scratch)
            return
        prefix = f"{result.model_name}/{result.model_version}"
        models = replace(config, uri=result.model_uri.removesuffix(f"/{prefix}"))
        with closing(open_mover(models)) as to:
            publish_tree(mover, manifest, to=to, store=open_store(models), prefix=prefix, scratch=scratch)
