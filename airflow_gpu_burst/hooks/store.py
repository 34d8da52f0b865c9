"""An `object_store` connection (an `aws` connection works too) becomes a StoreConfig."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseHook

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.hooks.connections import extras, find, text
from airflow_gpu_burst.store import Store, StoreConfig, open_store


class StoreHook(BaseHook):
    """
    The object store that holds run logs, checkpoints, results and models.

    :param store_conn_id: connection of type `object_store`: extra `uri` is `s3://bucket/prefix` or
        `file:///folder`; login and password are the access key; extra `endpoint_url`, `region`, `ca_bundle`,
        `console_url`: where people browse it, up to its keys.
        An `aws` connection with an extra `uri` works as it is.
    """

    conn_name_attr = "store_conn_id"
    default_conn_name = "object_store_default"
    conn_type = "object_store"
    hook_name = "Object store (GPU burst)"

    def __init__(self, store_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.store_conn_id = store_conn_id

    def config(self) -> StoreConfig:
        """
        What the connection says.

        :raises SpecError: no such connection, or no `uri` in it.
        """
        return config_of(find(self.store_conn_id, self.conn_type))

    def get_conn(self) -> Store:
        """The store itself."""
        return open_store(self.config())

    def test_connection(self) -> tuple[bool, str]:
        """For the button in the connection form: lists, reads nothing, writes nothing."""
        try:
            next(iter(self.get_conn().list("runs/")), None)
        except Exception as error:
            return False, str(error)
        return True, "the store answers"


def config_of(conn: Any) -> StoreConfig:
    """
    Only the extras that are named here are read: whoever edits connections does not write DAGs.

    :raises SpecError: no `uri`.
    """
    extra = extras(conn)
    uri = text(extra, "uri")
    if not uri:
        raise SpecError(
            f"connection {conn.conn_id!r} does not say where the store is: add to its extra "
            '{"uri": "s3://bucket/prefix"} or {"uri": "file:///folder"}'
        )
    return StoreConfig(
        uri=uri,
        endpoint_url=text(extra, "endpoint_url"),
        region=text(extra, "region") or text(extra, "region_name"),
        ca_bundle=text(extra, "ca_bundle"),
        access_key_id=conn.login or "",
        secret_access_key=conn.password or "",
        session_token=text(extra, "aws_session_token"),
    )
