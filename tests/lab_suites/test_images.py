"""The lab's images do what the docs say of images: one has the runtime, another gets it from an init container."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab_fixtures import NAMESPACE, QUEUE, GpuCluster, Stack


@pytest.fixture
def pods(stack: Stack) -> Iterator[GpuCluster]:
    stack.gpu.image("gpu-burst", "python", "runtime")
    yield stack.gpu
    stack.gpu.kubectl("delete", "jobs", "-l", "lab=images", "--wait=false")


def run(cluster: GpuCluster, name: str, spec: dict[str, Any]) -> str:
    """Run a pod to its end as a Job of the queue; what it printed."""
    main = spec["containers"][0]
    main["resources"] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {"kueue.x-k8s.io/queue-name": QUEUE, "lab": "images"},
        },
        "spec": {
            "suspend": True,
            "backoffLimit": 0,
            "template": {"spec": {"restartPolicy": "Never", **spec}},
        },
    }
    cluster.kubectl("delete", "job", name, "--ignore-not-found")
    cluster.apply(job)
    deadline = time.monotonic() + 120
    while True:
        conditions = cluster.get("job", name)["status"].get("conditions", [])
        ended = {c["type"] for c in conditions if c["status"] == "True"}
        if ended & {"Complete", "Failed"}:
            break
        assert time.monotonic() < deadline, cluster.kubectl("describe", "pods", "-l", f"job-name={name}")
        time.sleep(0.2)
    said = cluster.kubectl("logs", f"job/{name}", check=False)
    assert "Complete" in ended, said
    return said


def test_the_image_of_gpu_jobs_has_runtime_trainers_and_what_they_import(pods: GpuCluster) -> None:
    text = "import sys; sys.path.insert(0, '/opt/dags'); import trainers.yield_rca, pyiceberg.catalog.rest; print('ok')"
    command = ["sh", "-c", f'gpu-burst --version && exec python3 -c "{text}"']
    container = {
        "name": "trainer",
        "image": "lab.local/gpu-burst:1",
        "imagePullPolicy": "Never",
        "command": command,
    }
    said = run(pods, "image-gpu-burst", {"containers": [container]})
    assert said.splitlines()[-1] == "ok"


def test_an_init_container_brings_the_runtime_to_a_bare_interpreter(pods: GpuCluster) -> None:
    mount = {"volumeMounts": [{"name": "runtime", "mountPath": "/gpu-burst"}], "imagePullPolicy": "Never"}
    text = "python3 /gpu-burst/run.py --version && PYTHONPATH=/gpu-burst/site exec python3 -c 'import pyarrow.dataset'"
    install = {"name": "gpu-burst-runtime", "image": "lab.local/runtime:1", "command": ["/opt/gpu-burst/install"]}
    install |= {"args": ["/gpu-burst"], **mount}
    main = {"name": "trainer", "image": "lab.local/python:1", "command": ["sh", "-c", text], **mount}
    said = run(
        pods,
        "image-runtime",
        {"volumes": [{"name": "runtime", "emptyDir": {}}], "initContainers": [install], "containers": [main]},
    )
    assert said.startswith("gpu-burst ")
