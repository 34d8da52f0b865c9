"""Lineage: names that meet those of other tools, versions that are snapshots, and nothing at all without a provider."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from airflow_gpu_burst.operators import lineage
from airflow_gpu_burst.spec import TablePin
from tests.unit.test_spec import PIN

OUTCOME = {"model_name": "yield-rca", "model_version": "abc-g1", "model_key": "models/yield-rca/versions/abc-g1.json"}


@pytest.mark.parametrize(
    ("properties", "namespace"),
    [
        ({"uri": "https://polaris:8181/api/catalog", "warehouse": "fab"}, "https://polaris:8181/api/catalog"),
        ({"uri": "https://id:secret@polaris/api/", "warehouse": "s3://b/w"}, "https://polaris/api"),
        ({"uri": "sqlite:////data/catalog.db", "warehouse": "file:///data/w"}, "file:///data/w"),
        ({"uri": "postgresql+psycopg2://u:p@db:5432/iceberg", "warehouse": "s3://b/w/"}, "s3://b/w"),
        ({"uri": "postgresql+psycopg2://u:p@db:5432/iceberg"}, "postgresql+psycopg2://db:5432/iceberg"),
        ({"uri": "postgresql://u:p%40@db/iceberg?password=x", "warehouse": "name"}, "postgresql://db/iceberg"),
        ({}, ""),
    ],
)
def test_namespaces_of_tables(properties: dict[str, str], namespace: str) -> None:
    assert lineage.namespace_of(properties) == namespace


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ("s3://bucket/a/b/", ("s3://bucket", "a/b/models/m/n")),
        ("s3://bucket", ("s3://bucket", "models/m/n")),
        ("file:///var/store", ("file", "/var/store/models/m/n")),
    ],
)
def test_names_of_models(store: str, expected: tuple[str, str]) -> None:
    assert lineage.model_dataset(store, "m/n") == expected


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"uri": "https://polaris/api/catalog", "warehouse": "fab"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps({"conn_type": "iceberg_lake", "extra": extra}))


def test_tables_of_a_connection_that_is_gone_still_have_a_name(lake: None) -> None:
    assert lineage.catalog_namespace("lake") == "https://polaris/api/catalog"
    assert lineage.catalog_namespace("nowhere") == "iceberg://nowhere"


@pytest.mark.parametrize("missing", ["airflow.providers.openlineage.extractors", "openlineage.client.event_v2"])
def test_without_openlineage_there_is_no_lineage_and_no_error(missing: str) -> None:
    program = f"""
import os, sys, tempfile
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp()
from airflow_gpu_burst.operators import lineage
sys.modules[{missing!r}] = None
print(lineage.facets([]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["None"], done.stderr


class Operator:
    """As an operator of ours answers the provider."""

    task_type = "GpuJobOperator"

    def __init__(self, *inputs: Any, outcome: dict[str, Any] | None = None) -> None:
        self._inputs, self._outcome = inputs, outcome

    def get_openlineage_facets_on_start(self) -> Any:
        return lineage.facets(self._inputs)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        return lineage.facets(self._inputs, outcome=self._outcome, store_uri="s3://bucket/prefix")


def extracted(operator: Operator, how: str) -> tuple[list[Any], list[Any]]:
    """What the provider's own extractor makes of it: (namespace, name, version, type) of inputs and outputs."""
    extractors = pytest.importorskip("airflow.providers.openlineage.extractors.base")
    extractor = extractors.DefaultExtractor(operator)
    found = extractor.extract() if how == "start" else getattr(extractor, f"extract_on_{how}")(None)

    def shown(datasets: Any) -> list[Any]:
        return [
            (d.namespace, d.name, d.facets["version"].datasetVersion, d.facets["datasetType"].datasetType)
            for d in datasets
        ]

    return shown(found.inputs), shown(found.outputs)


TABLE = ("https://polaris/api/catalog", "fab.wafers", "4007696190872148070", "TABLE")


@pytest.mark.usefixtures("lake")
@pytest.mark.parametrize("how", ["start", "complete", "failure"])
def test_the_extractor_sees_each_pin_once_at_its_snapshot(how: str) -> None:
    older = {**PIN.to_dict(), "snapshot_id": "11"}
    inputs, outputs = extracted(Operator(PIN, PIN.to_dict(), older, "{{ not rendered }}", {"no": "pin"}), how)
    assert inputs == [(*TABLE[:2], "11", "TABLE"), TABLE]
    assert outputs == []


@pytest.mark.usefixtures("lake")
def test_the_extractor_sees_the_model_when_there_is_one() -> None:
    assert extracted(Operator(PIN, outcome=OUTCOME), "complete") == (
        [TABLE], [("s3://bucket", "prefix/models/yield-rca", "abc-g1", "MODEL")],
    )  # fmt: skip
    assert extracted(Operator(PIN, outcome={**OUTCOME, "model_name": ""}), "complete")[1] == []


def test_events_can_be_sent_as_they_are() -> None:
    pytest.importorskip("openlineage.client")
    from importlib import import_module

    serde = import_module("openlineage.client.serde").Serde
    pin = TablePin.from_dict(PIN.to_dict())
    data = json.loads(serde.to_json(lineage.facets([pin]).inputs[0]))
    assert data["facets"]["version"]["datasetVersion"] == "4007696190872148070"
