"""Finding a connection, or saying how to make it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_gpu_burst.errors import SpecError


def find(conn_id: str, conn_type: str) -> Any:
    """
    The connection of that id.

    :raises SpecError: there is none; says what to type.
    """
    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException as error:
        raise unknown(conn_id, conn_type) from error


async def afind(conn_id: str, conn_type: str) -> Any:
    """`find` for a trigger's loop."""
    try:
        return await BaseHook.aget_connection(conn_id)
    except AirflowNotFoundException as error:
        raise unknown(conn_id, conn_type) from error


def unknown(conn_id: str, conn_type: str) -> SpecError:
    """The error for a connection that does not exist."""
    examples = {
        "gpu_cluster": '{"route": "local"}',
        "object_store": '{"uri": "s3://bucket/prefix", "endpoint_url": "https://…"}',
        "iceberg_lake": '{"uri": "https://…", "warehouse": "…"}',
    }
    return SpecError(
        f"there is no connection {conn_id!r}. Create it: airflow connections add {conn_id} "
        f"--conn-type {conn_type} --conn-extra '{examples.get(conn_type, '{}')}'"
    )


def text(extra: Mapping[str, Any], name: str) -> str:
    """An extra as text; empty when it is absent or null."""
    value = extra.get(name)
    return "" if value is None else str(value)
