"""From connection ids to a Site, in a plain process on a host with Airflow."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterable

from airflow_gpu_burst.compat import require_airflow
from airflow_gpu_burst.routes import ClusterConfig
from airflow_gpu_burst.runs import Site


def site_of(arguments: Namespace, catalogs: Iterable[str] = ()) -> Site:
    """
    Route and store that `--conn` and `--store-conn` name.

    :param catalogs: connection ids of the lakes of the inputs.
    :raises NotInstalledError: there is no Airflow here.
    :raises SpecError: no such connection.
    """
    return site_and_config(arguments, catalogs)[0]


def site_and_config(arguments: Namespace, catalogs: Iterable[str] = ()) -> tuple[Site, ClusterConfig]:
    """`site_of`, with what the cluster's connection says of requests."""
    prepare()
    # Airflow logs to standard output from its import on, and that is where our own output goes.
    with contextlib.redirect_stdout(sys.stderr):
        from airflow_gpu_burst.hooks.gpu_cluster import GpuClusterHook

        hook = GpuClusterHook(arguments.conn)
        return hook.site(store_conn_id=arguments.store_conn or None, catalogs=catalogs), hook.config()


def prepare() -> None:
    """
    What Airflow needs to know before its first import.

    :raises NotInstalledError: there is none here.
    """
    require_airflow()
    # Without it Airflow's SDK reads connections from the environment and from secrets backends, never from the
    # metadata database (see its ensure_secrets_backend_loaded). Within a task the variable is there, as "client":
    # a task has no way to that database.
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    # It warns of the underscore in `gpu_cluster` with every connection that it reads from the database.
    os.environ.setdefault("AIRFLOW__LOGGING__LOGGING_LEVEL", "ERROR")
    ours = logging.getLogger("airflow_gpu_burst")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("gpu-burst: %(message)s"))
        handler.setLevel(logging.WARNING)
        ours.addHandler(handler)
        ours.propagate = False
