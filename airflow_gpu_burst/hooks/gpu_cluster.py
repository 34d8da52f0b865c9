"""A `gpu_cluster` connection becomes a ClusterConfig; with store and lakes it becomes a Site."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_gpu_burst.errors import GpuBurstError, SpecError
from airflow_gpu_burst.hooks import store as store_hook
from airflow_gpu_burst.hooks.connections import afind, extras, find, text
from airflow_gpu_burst.hooks.lake import LakeHook
from airflow_gpu_burst.hooks.store import StoreHook
from airflow_gpu_burst.routes import ClusterConfig, KubeConfig, open_route
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.store import open_store

KUBERNETES = "kubernetes"
"""Airflow's own connection type, which may be used as it is."""


_SECRETS_OF_KUBECONFIG = re.compile(r"(?:token|client-key-data|password)['\"]?\s*:\s*['\"]?([^\s'\",}]{8,})")


class GpuClusterHook(BaseHook):
    """
    The cluster that runs GPU steps. The connection decides the route; DAG code never does.

    :param gpu_conn_id: connection of type `gpu_cluster`, or an existing one of type `kubernetes`. Extras:

        - `route` (`local`, `direct`; by default `direct` when there is a way to an API server below), `namespace`,
          `queue`, `platform`, `site`, `store_conn_id`: the store of this cluster;
        - the API server: `kubeconfig` (text) or `kubeconfig_path`, with `context`; or `in_cluster`; or the
          connection's host with its password (or extra `token`) and `ca`;
        - what its pods get: `image`, `working_dir`, `env_from` (the Kubernetes Secret with the secret part of the
          contract), `run_as` (service account), `pull_with` (Secrets for pulling images), `runtime_image`,
          `image_pull_policy`, `grace_s`, `keep_finished_s`, `restarts`. (Airflow masks the value of every extra whose
          name has `secret` or `service_account` in it, wherever it occurs in a log: hence these names.)
        - links: `dashboard_url`, `logs_url`;
        - local route: `work_dir`, `grace_s`.
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
        cluster = find(self.gpu_conn_id, self.conn_type)
        store_id = store_conn_id or text(extras(cluster), "store_conn_id") or StoreHook.default_conn_name
        lakes = {name: LakeHook(name).config() for name in sorted(set(catalogs))}
        return _site(
            cluster,
            find(store_id, StoreHook.conn_type),
            catalogs={name: lake.properties for name, lake in lakes.items()},
            catalog_secrets={name: lake.secrets for name, lake in lakes.items()},
        )

    def test_connection(self) -> tuple[bool, str]:
        """For the button in the connection form: reads what is there, changes nothing."""
        try:
            config = self.config()
            route = open_route(config)
            if config.route == "local":
                return True, f"route local, platform {config.platform}"
            there = sum(1 for _ in route.find())
        except GpuBurstError as error:
            return False, str(error)
        return (
            True,
            f"route {config.route}, namespace {route.namespace}, platform {config.platform}: {there} runs there",
        )


async def afind_site(gpu_conn_id: str, store_conn_id: str) -> Site:
    """A Site for a trigger: connections are read on its loop, and no lake is needed to wait."""
    cluster = await afind(gpu_conn_id, GpuClusterHook.conn_type)
    return _site(cluster, await afind(store_conn_id, StoreHook.conn_type))


def _site(cluster: Any, store: Any, **catalogs: Mapping[str, Mapping[str, str]]) -> Site:
    config, extra = store_hook.config_of(store), extras(cluster)
    return Site(
        route=open_route(config_of(cluster)),
        store=open_store(config),
        store_config=config,
        connection=cluster.conn_id,
        store_connection=store.conn_id,
        console_url=text(extras(store), "console_url"),
        dashboard_url=text(extra, "dashboard_url"),
        logs_url=text(extra, "logs_url"),
        **catalogs,
    )


def config_of(conn: Any) -> ClusterConfig:
    """
    Only the extras that are named in GpuClusterHook are read.

    :raises SpecError: a value that cannot be right; names it.
    """
    extra = _unprefixed(extras(conn))
    api = api_of(conn, extra)
    reachable = api.kubeconfig or api.kubeconfig_path or api.in_cluster or api.host or conn.conn_type == KUBERNETES
    route = text(extra, "route") or ("direct" if reachable else "local")
    defaults = ClusterConfig(connection=conn.conn_id)
    return ClusterConfig(
        connection=conn.conn_id,
        route=route,
        namespace=text(extra, "namespace"),
        queue=text(extra, "queue"),
        platform=text(extra, "platform") or ("local" if route == "local" else "generic"),
        site=text(extra, "site"),
        work_dir=text(extra, "work_dir"),
        grace_s=_number(conn, extra, "grace_s", defaults.grace_s),
        api=api,
        image=text(extra, "image"),
        working_dir=text(extra, "working_dir"),
        secret=text(extra, "env_from") or defaults.secret,
        service_account=text(extra, "run_as"),
        runtime_image=text(extra, "runtime_image"),
        image_pull_secrets=_names(extra, "pull_with"),
        image_pull_policy=text(extra, "image_pull_policy"),
        keep_finished_s=int(_number(conn, extra, "keep_finished_s", defaults.keep_finished_s)),
        restarts=int(_number(conn, extra, "restarts", defaults.restarts)),
    )


def api_of(conn: Any, extra: Mapping[str, Any]) -> KubeConfig:
    """How a connection of either type reaches its API server."""
    kubeconfig = extra.get("kubeconfig") or extra.get("kube_config") or ""
    for secret in _SECRETS_OF_KUBECONFIG.findall(str(kubeconfig)):
        mask_secret(secret)
    host = conn.host or ""
    return KubeConfig(
        kubeconfig=kubeconfig if isinstance(kubeconfig, str) else json.dumps(kubeconfig),
        kubeconfig_path=text(extra, "kubeconfig_path") or text(extra, "kube_config_path"),
        context=text(extra, "context") or text(extra, "cluster_context"),
        in_cluster=_truth(extra.get("in_cluster")),
        host=host if "://" in host or not host else f"https://{host}" + (f":{conn.port}" if conn.port else ""),
        token=text(extra, "token") or conn.password or "",
        ca=text(extra, "ca"),
        verify_ssl=not _truth(extra.get("disable_verify_ssl")),
        namespace=text(extra, "namespace"),
    )


def _unprefixed(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Old `kubernetes` connections spell their extras `extra__kubernetes__namespace`."""
    return {name.removeprefix(f"extra__{KUBERNETES}__"): value for name, value in extra.items()}


def _number(conn: Any, extra: Mapping[str, Any], name: str, default: float) -> float:
    value = extra.get(name)
    try:
        return default if value in (None, "") else float(value)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"connection {conn.conn_id!r}: extra {name}={value!r} is not a number; e.g. {default:g}"
        ) from error


def _names(extra: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list, or text with commas."""
    value = extra.get(name) or ()
    found = value.split(",") if isinstance(value, str) else value
    return tuple(str(part).strip() for part in found if str(part).strip())


def _truth(value: Any) -> bool:
    return value.strip().lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)
