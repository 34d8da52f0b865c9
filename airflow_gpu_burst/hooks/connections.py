"""Finding a connection, or saying how to make it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret

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
    except AirflowNotFoundException:
        # `airflow dags test` (3.3.2) cannot be asked asynchronously, and says "not found" for it.
        return await asyncio.to_thread(find, conn_id, conn_type)


def unknown(conn_id: str, conn_type: str) -> SpecError:
    """The error for a connection that does not exist."""
    examples = {
        "gpu_cluster": '{"route": "local"}',
        "object_store": '{"uri": "s3://bucket/prefix", "endpoint_url": "https://…"}',
        "iceberg_lake": '{"uri": "https://…", "warehouse": "…"}',
    }
    return SpecError(
        f"there is no connection {conn_id!r}. Look for a typo in the task's connection id, or create it: "
        f"airflow connections add {conn_id} --conn-type {conn_type} --conn-extra '{examples.get(conn_type, '{}')}'; "
        f"or set AIRFLOW_CONN_{conn_id.upper()} to the same as JSON"
    )


def extras(conn: Any) -> dict[str, Any]:
    """
    The extras of a connection; the sensitive ones are masked in logs from here on.

    Not `extra_dejson`, which warns of a short secret in every task's log for a value like "sql".
    """
    values = json.loads(conn.extra) if conn.extra else {}
    if not isinstance(values, dict):
        raise SpecError(f"the extra of connection {conn.conn_id!r} is no JSON object; e.g. {{}}")
    for name, value in values.items():
        if isinstance(value, str) and len(value) >= 5:
            mask_secret(value, name)
    return values


def text(extra: Mapping[str, Any], name: str) -> str:
    """An extra as text; empty when it is absent or null."""
    value = extra.get(name)
    return "" if value is None else str(value)
