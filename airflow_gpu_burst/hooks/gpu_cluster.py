"""A `gpu_cluster` connection becomes a ClusterConfig; with store and lakes it becomes a Site."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from airflow.sdk import BaseHook

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.hooks import store as store_hook
from airflow_gpu_burst.hooks.connections import afind, extras, find, text
from airflow_gpu_burst.hooks.lake import LakeHook
from airflow_gpu_burst.hooks.store import StoreHook
from airflow_gpu_burst.routes import ClusterConfig, open_route
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.store import open_store


class GpuClusterHook(BaseHook):
    """
    The cluster that runs GPU steps. The connection decides the route; DAG code never does.

    :param gpu_conn_id: connection of type `gpu_cluster`. Extras: `route` (`local`), `platform`, `queue`,
        `namespace`, `work_dir` and `grace_s` (local route), `store_conn_id`: the store of this cluster.
    """

    conn_name_attr = "gpu_conn_id"
    default_conn_name = "gpu_cluster_default"
    conn_type = "gpu_cluster"
    hook_name = "GPU cluster"

    def __init__(self, gpu_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gpu_conn_id = gpu_conn_id

    def config(self) -> ClusterConfig:
        """
        What the connection says.

        :raises SpecError: no such connection, or a value that cannot be right.
        """
        return config_of(find(self.gpu_conn_id, self.conn_type))

    def site(self, *, store_conn_id: str | None = None, catalogs: Iterable[str] = ()) -> Site:
        """
        Route, store and catalogs for a submission.

        :param store_conn_id: None: the one that the cluster's connection names, else `object_store_default`.
        :param catalogs: connection ids of the lakes of the inputs.
        """
        conn = find(self.gpu_conn_id, self.conn_type)
        store_id = store_conn_id or text(extras(conn), "store_conn_id") or StoreHook.default_conn_name
        lakes = {name: LakeHook(name).config() for name in sorted(set(catalogs))}
        store = find(store_id, StoreHook.conn_type)
        store_config = store_hook.config_of(store)
        return Site(
            route=open_route(config_of(conn)),
            store=open_store(store_config),
            store_config=store_config,
            connection=self.gpu_conn_id,
            store_connection=store_id,
            catalogs={name: lake.properties for name, lake in lakes.items()},
            catalog_secrets={name: lake.secrets for name, lake in lakes.items()},
            console_url=text(extras(store), "console_url"),
        )

    def test_connection(self) -> tuple[bool, str]:
        """For the button in the connection form."""
        try:
            config = self.config()
            open_route(config)
        except Exception as error:
            return False, str(error)
        return True, f"route {config.route}, platform {config.platform}"


async def afind_site(gpu_conn_id: str, store_conn_id: str) -> Site:
    """A Site for a trigger: connections are read on its loop, and no lake is needed to wait."""
    cluster = await afind(gpu_conn_id, GpuClusterHook.conn_type)
    store = await afind(store_conn_id, StoreHook.conn_type)
    config = store_hook.config_of(store)
    return Site(
        route=open_route(config_of(cluster)),
        store=open_store(config),
        store_config=config,
        connection=gpu_conn_id,
        store_connection=store_conn_id,
    )


def config_of(conn: Any) -> ClusterConfig:
    """
    Only the extras that are named here are read.

    :raises SpecError: `grace_s` is not a number of seconds.
    """
    extra = extras(conn)
    defaults = ClusterConfig(connection=conn.conn_id)
    try:
        grace_s = float(extra.get("grace_s") or defaults.grace_s)
    except ValueError as error:
        raise SpecError(
            f"connection {conn.conn_id!r}: extra grace_s={extra['grace_s']!r} is not a number of seconds; e.g. 10"
        ) from error
    return ClusterConfig(
        connection=conn.conn_id,
        route=text(extra, "route") or defaults.route,
        namespace=text(extra, "namespace") or defaults.namespace,
        queue=text(extra, "queue"),
        platform=text(extra, "platform") or defaults.platform,
        work_dir=text(extra, "work_dir"),
        grace_s=grace_s,
    )
