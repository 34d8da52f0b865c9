"""
Lineage for the Airflow OpenLineage provider: which tables at which snapshots went in, which model came out.

Everything of OpenLineage is imported here and only when it asks; without the provider there is no lineage and no
error. Tables are named as OpenLineage's Spark integration names those of a REST catalog, so that a table written by
Spark and read here is one dataset: namespace the catalog's URI, name `namespace.table`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.hooks.lake import LakeHook
from airflow_gpu_burst.spec import TablePin

log = logging.getLogger(__name__)


def facets(inputs: Iterable[Any], *, outcome: Mapping[str, Any] | None = None, store_uri: str = "") -> Any:
    """
    For `get_openlineage_facets_on_start` and `…_on_complete`: an `OperatorLineage`; None without the provider.

    :param inputs: pins, as TablePin or as what PinSnapshotOperator returned; anything else is left out.
    :param outcome: what the operator returned, if it has ended well: its `model_name` and `model_version` are the
        output.
    :param store_uri: `s3://…` or `file:///…`: where models are published.
    """
    try:
        lineage = import_module("airflow.providers.openlineage.extractors").OperatorLineage
        generated = "openlineage.client.generated"
        dataset = import_module("openlineage.client.event_v2").Dataset
        version = import_module(f"{generated}.dataset_version_dataset").DatasetVersionDatasetFacet
        kind = import_module(f"{generated}.dataset_type_dataset").DatasetTypeDatasetFacet
    except (ImportError, AttributeError) as error:
        log.debug("no lineage: %s", error)
        return None

    def described(namespace: str, name: str, its_version: str, its_kind: str) -> Any:
        found = {"version": version(datasetVersion=its_version), "datasetType": kind(datasetType=its_kind)}
        return dataset(namespace=namespace, name=name, facets=found)

    pins = list(_pins(inputs))
    namespaces = {catalog: catalog_namespace(catalog) for catalog in {pin.catalog for pin in pins}}
    tables = {(namespaces[pin.catalog], pin.table, pin.snapshot_id) for pin in pins}
    made = outcome or {}
    models = []
    if made.get("model_name"):
        namespace, name = model_dataset(store_uri, str(made["model_name"]))
        models.append(described(namespace, name, str(made.get("model_version", "")), "MODEL"))
    return lineage(inputs=[described(*table, "TABLE") for table in sorted(tables)], outputs=models)


def catalog_namespace(catalog: str) -> str:
    """
    The namespace of a catalog's tables, by its connection; `iceberg://<connection id>` when that cannot be read.

    :param catalog: connection id of the lake, as pins name it.
    """
    try:
        properties = LakeHook(catalog).config().properties
    except Exception as error:  # a name that is less good is better than no lineage
        log.debug("lineage: %s", error)
        return f"iceberg://{catalog}"
    return namespace_of(properties) or f"iceberg://{catalog}"


def namespace_of(properties: Mapping[str, str]) -> str:
    """
    The namespace of a catalog's tables: the URI of a REST catalog; of others the warehouse, where the tables lie, and
    else their URI. Without user and password; empty when there is none of these.

    :param properties: the catalog's, without secrets.
    """
    uri, warehouse = properties.get("uri", ""), properties.get("warehouse", "")
    chosen = warehouse if "://" in warehouse and not uri.startswith(("http://", "https://")) else uri
    parts = urlsplit(chosen)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")


def model_dataset(store_uri: str, name: str) -> tuple[str, str]:
    """
    Namespace and name of a published model, by OpenLineage's rules for object stores and files: the bucket, and the
    path in it.
    """
    parts = urlsplit(store_uri)
    path = "/".join(part for part in (parts.path.strip("/"), "models", name) if part)
    if parts.scheme == "file":
        return "file", f"/{path}"
    return f"{parts.scheme}://{parts.netloc}", path


def _pins(inputs: Iterable[Any]) -> Iterable[TablePin]:
    for value in inputs:
        if isinstance(value, TablePin):
            yield value
        elif isinstance(value, Mapping):
            try:
                yield TablePin.from_dict(value)
            except GpuBurstError as error:  # the run itself says so better
                log.debug("lineage: %s", error)
