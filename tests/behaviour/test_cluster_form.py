"""The form of a `gpu_cluster` connection: every field that it shows is read, and none turns a name into asterisks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk._shared.secrets_masker import DEFAULT_SENSITIVE_FIELDS

from airflow_gpu_burst.hooks.gpu_cluster import GpuClusterHook
from airflow_gpu_burst.provider_info import get_provider_info

(FORM,) = (c for c in get_provider_info()["connection-types"] if c["connection-type"] == "gpu_cluster")
FIELDS: dict[str, dict[str, Any]] = FORM["conn-fields"]


def other(schema: dict[str, Any]) -> Any:
    """A value that this field takes and that is not its default."""
    if "enum" in schema:
        return next(value for value in schema["enum"] if value not in ("", "local"))
    return {"boolean": True, "number": 77, "integer": 77}.get(schema["type"][0], "other")


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    for store in ("object_store_default", "other"):
        monkeypatch.setenv(
            f"AIRFLOW_CONN_{store.upper()}", '{"conn_type": "object_store", "extra": {"uri": "file:///x"}}'
        )

    def read(**extra: Any) -> Any:
        monkeypatch.setenv("AIRFLOW_CONN_GPU", json.dumps({"conn_type": "gpu_cluster", "extra": extra}))
        hook = GpuClusterHook("gpu")
        # A route opens no connection, but reads what it is given: links and store are looked at over the local one.
        site = GpuClusterHook("gpu").site() if extra.get("route", "local") == "local" else None
        return hook.config(), site and (site.dashboard_url, site.logs_url, site.store_connection)

    return read


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "route"])
def test_every_field_of_the_form_is_read(connect: Any, name: str) -> None:
    assert connect(route="local", **{name: other(FIELDS[name]["schema"])}) != connect(route="local")


def test_the_route_is_read(connect: Any) -> None:
    assert connect(route="direct")[0].route == "direct"


@pytest.mark.parametrize("name", FIELDS)
def test_airflow_hides_the_values_of_secret_fields_only(name: str) -> None:
    """By the field's name: hidden values become *** in every log, and a Secret called gpu-burst would take it along."""
    hidden = any(word in name for word in DEFAULT_SENSITIVE_FIELDS)
    assert not hidden or FIELDS[name]["schema"].get("format") == "password"


def test_an_empty_form_is_the_local_route(connect: Any) -> None:
    defaults = {name: field["schema"].get("default") for name, field in FIELDS.items()}
    empty = {name: "" if default is None else default for name, default in defaults.items()}
    assert connect(**empty)[0] == connect()[0]
    assert connect()[0].route == "local"
