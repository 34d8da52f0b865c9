"""What Airflow shows of this provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import airflow
import jsonschema
import pytest

from airflow_gpu_burst.provider_info import get_provider_info


@pytest.fixture(scope="module")
def listings() -> dict[str, str]:
    """What `airflow providers list|hooks|links|widgets` print."""
    env = {**os.environ, "COLUMNS": "300"}
    processes = {
        what: subprocess.Popen(
            [sys.executable, "-m", "airflow", "providers", what, "--output", "json"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True,
        )
        for what in ("list", "hooks", "links", "widgets")
    }  # fmt: skip
    return {what: process.communicate()[0] for what, process in processes.items()}


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("list", ["airflow-gpu-burst"]),
        ("hooks", ["gpu_cluster", "object_store", "iceberg_lake", "GpuClusterHook", "StoreHook", "LakeHook"]),
        ("links", ["airflow_gpu_burst.operators.links.RunInStoreLink"]),
        ("widgets", ["extra__gpu_cluster__route", "extra__object_store__uri", "extra__iceberg_lake__warehouse"]),
    ],
)
def test_airflow_lists_it(listings: dict[str, str], what: str, texts: list[str]) -> None:
    for text in texts:
        assert text in listings[what]


def test_the_metadata_fits_airflows_schemas() -> None:
    info = get_provider_info()
    folder = Path(airflow.__file__).parent
    jsonschema.validate(info, json.loads((folder / "provider_info.schema.json").read_text()))
    full: Any = json.loads((folder / "provider.yaml.schema.json").read_text())
    jsonschema.validate(info["connection-types"], full["properties"]["connection-types"])


def test_every_class_that_is_named_exists() -> None:
    from airflow.sdk._shared.module_loading import import_string

    info = get_provider_info()
    for connection in info["connection-types"]:
        hook = import_string(connection["hook-class-name"])
        assert (hook.conn_type, hook.hook_name) == (connection["connection-type"], connection["hook-name"])
    for link in info["extra-links"]:
        import_string(link)
    for kind in ("operators", "hooks", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                __import__(module)


def test_secret_fields_are_masked_in_the_form() -> None:
    for connection in get_provider_info()["connection-types"]:
        for name, field in connection["conn-fields"].items():
            if (
                any(word in name for word in ("secret", "token", "password", "access_key"))
                and name != "oauth2_server_uri"
            ):
                assert field["schema"].get("format") == "password", name
