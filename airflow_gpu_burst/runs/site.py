"""Where a run goes, and what comes back of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu_burst.routes import Route
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import Store, StoreConfig

RESULT_LIMIT = 48 * 1024
"""Largest result, in bytes of JSON, that is returned inline; a larger one stays in the store."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """
    Where a run goes and what it is given there.

    :param connection: connection id of the cluster.
    :param store_connection: connection id of the store.
    :param catalogs: catalog → properties without secrets.
    :param catalog_secrets: catalog → secret properties.
    :param console_url: where people browse the store, up to its keys; empty: nowhere.
    :param dashboard_url: template of the address where people see a submitted object.
    :param logs_url: template of the address where people read its pods' logs.
    """

    route: Route
    store: Store
    store_config: StoreConfig
    connection: str
    store_connection: str
    catalogs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    catalog_secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    console_url: str = ""
    dashboard_url: str = ""
    logs_url: str = ""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """
    What a finished run made.

    :param result: the trainer's own result; None when it gave none or it is larger than RESULT_LIMIT.
    :param result_key: where the result lies in the store.
    :param model_key: the model version's record in the store, or empty.
    :param model_uri: the folder of the published model, its files under their own names; or empty.
    :param checkpoints: what checkpoints cost, numbers by name (`PodResult.checkpoints`), or None.
    """

    run_key: RunKey
    generation: int
    seconds: float
    result: Any
    result_key: str
    model_key: str
    model_name: str
    model_version: str
    model_uri: str = ""
    checkpoints: Mapping[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, as it travels through XCom."""
        return {**self.__dict__, "run_key": self.run_key.to_dict()}
