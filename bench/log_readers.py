"""
One reading of a container's log in a fresh process: ours or the peer's, to a log that drops every line.

`python bench/log_readers.py ours|peer|still PORT POD` prints lines, CPU seconds and growth in MiB as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import structlog

from bench.meters import cpu_s, peak_mib, reset_peak, rss_mib

STILL_S = 5.0
"""How long the reader that cannot keep up takes nothing."""
seen = 0


def drop(logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
    """Where a handler would write."""
    global seen
    seen += 1
    raise structlog.DropEvent


def kubeconfig(port: int) -> dict[str, Any]:
    """The way to the server of logs."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "train"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }


@contextmanager
def our_logs(port: int, pod: str, news: threading.Event) -> Iterator[Any]:
    """The log of a pod, as it comes."""
    from airflow_gpu_burst.routes import KubeConfig
    from airflow_gpu_burst.routes.kube import Kube
    from airflow_gpu_burst.routes.pod_logs import PodLogs
    from airflow_gpu_burst.workloads import PodFacts

    kube = Kube(KubeConfig(kubeconfig=json.dumps(kubeconfig(port))))
    logs = PodLogs(kube, "train", news.set, resume=False, since={})
    facts = PodFacts(
        name=pod, uid=pod, rank=0, container="trainer", restarts=0, started=True, terminated=False, orderly=False,
        labels={},
    )  # fmt: skip
    logs.want([facts])
    yield logs
    logs.close()


def ours(port: int, pod: str, still_s: float = 0.0) -> Callable[[], None]:
    """The trigger's path from socket to log: PodLogs, OutputReader, the task's logger."""
    from airflow.sdk.definitions._internal.logging_mixin import LoggingMixin

    from airflow_gpu_burst.runs.output import OutputReader
    from airflow_gpu_burst.store import StoreConfig, open_store

    folder = tempfile.mkdtemp()
    reader = OutputReader(open_store(StoreConfig(uri=f"file://{folder}")), "runs/x", 1)
    log = LoggingMixin().log  # type: ignore[no-untyped-call]

    def read() -> None:
        news = threading.Event()
        with our_logs(port, pod, news) as logs:
            time.sleep(still_s)
            if still_s:
                return
            ended = False
            while not ended:
                news.wait()
                news.clear()
                for piece in logs.take():
                    for line in reader.feed(piece):
                        log.info("%s", line)
                    ended = ended or piece.ended

    return read


def peer(port: int, pod: str) -> Callable[[], None]:
    """KubernetesPodOperator's and KubernetesJobOperator's way: PodManager.fetch_container_logs."""
    from airflow.providers.cncf.kubernetes.utils.pod_manager import PodManager
    from kubernetes import client, config

    api = client.CoreV1Api(config.new_client_from_config_dict(kubeconfig(port)))
    manager = PodManager(kube_client=api)
    found = api.read_namespaced_pod(pod, "train")

    def read() -> None:
        manager.fetch_container_logs(found, "trainer", follow=True)

    return read


def main() -> int:
    """Warm up with a short log, then measure the one that is asked for."""
    which, port, pod = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    import_module("airflow.providers.cncf.kubernetes.utils.pod_manager")  # before: Airflow sets up logging on import
    structlog.reset_defaults()
    structlog.configure(processors=[drop], wrapper_class=structlog.make_filtering_bound_logger(20))
    make: dict[str, Callable[[int, str], Callable[[], None]]] = {
        "ours": ours,
        "peer": peer,
        "still": lambda port, pod: ours(port, pod, STILL_S),
    }
    warm = "peer" if which == "peer" else "ours"
    make[warm](port, f"lines-10000-4096-{pod}-warm")()
    read = make[which](port, pod)
    reset_peak()
    before, cpu, memory, began = seen, cpu_s(), rss_mib(), time.monotonic()
    read()
    found = {
        "lines": seen - before,
        "cpu_s": cpu_s() - cpu,
        "grown_mib": peak_mib() - memory,
        "seconds": time.monotonic() - began,
    }
    print("RESULT", json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
