"""A namespace of its own in the lab's cluster `gpu`, and jobs in it as the operator makes them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from airflow_gpu_burst import runs
from airflow_gpu_burst.contract import header
from airflow_gpu_burst.routes import ClusterConfig, KubeConfig
from airflow_gpu_burst.routes.direct import DirectRoute
from airflow_gpu_burst.routes.kube import Kube, kube_of
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.spec import RunSpec, Timeouts
from airflow_gpu_burst.state import Handle, RunKey
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.lab_fixtures import NAMESPACE, GpuCluster, Stack

IMAGE, BASE = "lab.local/gpu-burst:1", "lab.local/base:1"
NO_QUEUE = "no-such-queue"
"""Kueue keeps a job of this queue suspended for ever."""
AT_ONCE = 8


class Cluster:
    """
    See the module.

    :param store: where its runs are kept: S3 of the lab.
    """

    def __init__(self, gpu: GpuCluster, namespace: str, store: StoreConfig) -> None:
        self.gpu, self.namespace, self.store = gpu, namespace, store

    @cached_property
    def config(self) -> ClusterConfig:
        """The connection `gpu`, read."""
        return ClusterConfig(
            connection="gpu",
            route="direct",
            namespace=self.namespace,
            platform="generic",
            image_pull_policy="IfNotPresent",
            api=KubeConfig(kubeconfig_path=str(self.gpu.admin)),
        )

    @cached_property
    def site(self) -> Site:
        """Cluster and store."""
        return Site(
            route=DirectRoute(self.config),
            store=open_store(self.store),
            store_config=self.store,
            connection="gpu",
            store_connection="store",
        )

    @property
    def kube(self) -> Kube:
        """The bench's own client, an administrator's."""
        return kube_of(self.config.api)

    def env(self, home: str) -> dict[str, str]:
        """Environment of a process with an Airflow of its own and the connections `gpu`, `store` and `kubernetes`."""
        store, path = self.store, str(self.gpu.admin)
        gpu = {"route": "direct", "kubeconfig_path": path, "namespace": self.namespace, "platform": "generic",
               "image_pull_policy": "IfNotPresent", "store_conn_id": "store"}  # fmt: skip
        s3 = {"uri": store.uri, "endpoint_url": store.endpoint_url, "region": store.region}
        connections = {
            "gpu": {"conn_type": "gpu_cluster", "extra": gpu},
            "store": {
                "conn_type": "object_store",
                "login": store.access_key_id,
                "password": store.secret_access_key,
                "extra": s3,
            },
            "kubernetes": {
                "conn_type": "kubernetes",
                "extra": {"kube_config_path": path, "namespace": self.namespace},
            },
        }
        # As on a worker, modules are compiled once and kept.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {
            **inherited,
            **{f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in connections.items()},
            "AIRFLOW_HOME": home,
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
        }

    def waiting(self, count: int) -> list[Handle]:
        """Jobs that wait in a queue and never start."""
        spec = RunSpec(command=("true",), image=IMAGE, platform="generic", queue=NO_QUEUE)
        return self._submit("waiting", count, lambda number: spec)

    def printing(self, count: int, every_s: float) -> list[Handle]:
        """Jobs of a shell each that prints as the runtime does: the line that names its stream, then lines, slowly."""

        def spec(number: int) -> RunSpec:
            first = header(f"20260101T000000-00000-{number:08d}", 0, 1).decode().strip()
            loop = f"n=0; while true; do n=$((n+1)); echo step $n loss 0.12345; sleep {every_s}; done"
            return RunSpec(manifest=_shell(f"echo '{first}'; {loop}"), platform="generic")

        return self._submit("printing", count, spec)

    def ending(self, count: int, after_s: Callable[[int], float]) -> list[Handle]:
        """Jobs with the runtime, whose trainers sleep and then succeed, or fail, in turn."""
        return self._submit(
            f"ending-{uuid.uuid4().hex[:8]}",
            count,
            lambda number: RunSpec(
                command=("sh", "-c", f"sleep {after_s(number):.2f}; exit {number % 2}"),
                image=IMAGE,
                platform="generic",
                checkpoint=None,
            ),
        )

    def _submit(self, task: str, count: int, spec: Callable[[int], RunSpec]) -> list[Handle]:
        def submit(number: int) -> Handle:
            key = RunKey(dag_id="bench", task_id=task, run_id=f"run {number}")
            return runs.submit(self.site, spec=spec(number), run_key=key, max_tries=1, try_number=1)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(submit, range(count)))


def described(handles: list[Handle], submitted_at: float, logs: str = "all") -> list[dict[str, Any]]:
    """What a process that defers on them needs: a trigger's arguments."""
    return [
        {
            "handle": handle.to_json(),
            "timeouts": asdict(Timeouts()),
            "submitted_at": submitted_at,
            "poll_interval": 2.0,
            "logs": logs,
        }
        for handle in handles
    ]


@contextmanager
def cluster() -> Iterator[Cluster]:
    """In the lab that LAB_DIR names, else in one that is up for so long only."""
    given = os.environ.get("LAB_DIR")
    folder = given or tempfile.mkdtemp(prefix="lab-", dir="/tmp")
    stack = Stack(Path(folder), owner=None if given else os.getpid())
    namespace = f"bench-{uuid.uuid4().hex[:6]}"
    try:
        gpu = stack.gpu
        gpu.image("gpu-burst")
        found = Cluster(gpu, namespace, stack.store())
        gpu.kubectl("create", "namespace", namespace)
        secret = gpu.get("secret", "gpu-burst", "-n", NAMESPACE)
        copy = {**secret, "metadata": {"name": "gpu-burst", "namespace": namespace}}
        gpu.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(copy))
        try:
            yield found
        finally:
            gpu.kubectl("delete", "namespace", namespace, "--timeout=110s", check=False)
    finally:
        if not given:
            stack.lab("down")
            shutil.rmtree(folder, ignore_errors=True)


def _shell(script: str) -> dict[str, Any]:
    container = {"name": "trainer", "image": BASE, "imagePullPolicy": "Never", "command": ["sh", "-c", script]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "printing"},
        "spec": {
            "backoffLimit": 0,
            "template": {
                "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
            },
        },
    }
