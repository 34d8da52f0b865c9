"""The direct route on a real cluster: a site with the shipped account, and what happens to runs there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import runs
from airflow_gpu_burst.routes import ClusterConfig, KubeConfig
from airflow_gpu_burst.routes.direct import DirectRoute
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.spec import RunSpec, Timeouts
from airflow_gpu_burst.state import Handle, Phase, RunKey
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.lab_fixtures import NAMESPACE, QUEUE, GpuCluster, Stack

PLATFORMS = Path(__file__).parents[1] / "lab" / "platforms"
IMAGE, BASE = "lab.local/gpu-burst:1", "lab.local/base:1"


@pytest.fixture(scope="session")
def gpu(stack: Stack) -> GpuCluster:
    """The cluster, with the image of the working tree."""
    stack.gpu.image("gpu-burst")
    return stack.gpu


class Burst:
    """A site on the cluster, and one run key per test."""

    def __init__(self, gpu: GpuCluster, store: StoreConfig, name: str, **config: Any) -> None:
        self.gpu, self.store_config, self.name = gpu, store, name
        self.site = self.site_with(**config)
        self.handles: list[Handle] = []

    def site_with(self, **config: Any) -> Site:
        values: dict[str, Any] = {
            "connection": "gpu",
            "route": "direct",
            "namespace": NAMESPACE,
            "platform": "lab",
            "image_pull_policy": "IfNotPresent",
            "grace_s": 2.0,
            "api": KubeConfig(kubeconfig_path=str(self.gpu.kubeconfig)),
            **config,
        }
        return Site(
            route=DirectRoute(ClusterConfig(**values)),
            store=open_store(self.store_config),
            store_config=self.store_config,
            connection="gpu",
            store_connection="store",
        )

    @property
    def key(self) -> RunKey:
        return RunKey(dag_id="lab", task_id=self.name, run_id="run ☃ 1")

    def submit(self, spec: RunSpec, *, max_tries: int = 2, try_number: int = 1, site: Site | None = None) -> Handle:
        handle = runs.submit(site or self.site, spec=spec, run_key=self.key, max_tries=max_tries, try_number=try_number)
        self.handles.append(handle)
        return handle

    def follow(self, handle: Handle, *, site: Site | None = None, **options: Any) -> Following:
        return Following(site or self.site, handle, **options)

    def collect(self, handle: Handle, step: runs.Step) -> runs.RunResult:
        return runs.collect(self.site, handle, step.observation, timeout=step.timeout)

    def pods(self, handle: Handle) -> list[dict[str, Any]]:
        found = self.gpu.get("pods", "-l", f"gpu-burst/name={handle.name}")
        items: list[dict[str, Any]] = found["items"] if found else []
        return sorted(items, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def object(self, handle: Handle) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.gpu.get(handle.kind.lower(), handle.name)
        return found

    def clean(self) -> None:
        for handle in self.handles:
            self.gpu.kubectl("delete", handle.kind.lower(), handle.name, "--ignore-not-found", "--wait=false")


class Following:
    """What a trigger would see, step by step."""

    def __init__(self, site: Site, handle: Handle, **options: Any) -> None:
        values: dict[str, Any] = {"timeouts": Timeouts(), "submitted_at": time.time(), "poll_s": 0.2, **options}
        self.follower = runs.Follower(store=site.store, route=site.route, handle=handle, **values)
        self.steps: list[runs.Step] = []

    @property
    def lines(self) -> list[str]:
        return [line for step in self.steps for line in step.lines]

    @property
    def notes(self) -> str:
        return "\n".join(note for step in self.steps for note in step.notes)

    @property
    def last(self) -> runs.Step:
        return self.steps[-1]

    def until(self, reached: Callable[[runs.Step], Any], timeout_s: float = 90) -> runs.Step:
        deadline = time.monotonic() + timeout_s
        while True:
            self.steps.append(self.follower.step())
            if reached(self.last):
                return self.last
            assert not self.last.done, f"ended: {self.last}\n{self.notes}\n" + "\n".join(self.lines[-20:])
            assert time.monotonic() < deadline, f"{self.last}\n{self.notes}\n" + "\n".join(self.lines[-20:])
            time.sleep(0.1)

    def until_line(self, text: str, timeout_s: float = 90) -> runs.Step:
        return self.until(lambda step: any(text in line for line in step.lines), timeout_s)

    def to_end(self, timeout_s: float = 120) -> runs.Step:
        return self.until(lambda step: step.done, timeout_s)

    def close(self) -> None:
        self.follower.close()


@pytest.fixture
def burst(
    gpu: GpuCluster, stack: Stack, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Burst]:
    monkeypatch.setenv("GPU_BURST_PLATFORMS", str(PLATFORMS))
    found = Burst(gpu, stack.store(), request.node.name)
    yield found
    found.clean()


def trainer(body: str, **values: Any) -> RunSpec:
    """A request whose trainer is this Python text; `ctx` is its context."""
    text = f"import os, signal, sys, time\nfrom airflow_gpu_burst.runtime import context\nctx = context()\n{body}"
    return replace(RunSpec(command=("python3", "-c", text), image=IMAGE, gpus=1, platform="lab"), **values)


COUNTING = """
start = step = ctx.restored.step if ctx.restored else 0
print(f"from {start}", flush=True)
for step in range(start + 1, ctx.params["steps"] + 1):
    (ctx.checkpoint_folder(step) / "state").write_text(str(step))
    ctx.ready(step)
    print(f"step {step}", flush=True)
    time.sleep(ctx.params.get("pause", 0.2))
ctx.result({"steps": step, "from": start})
"""


def counting(steps: int, pause: float = 0.2, **values: Any) -> RunSpec:
    """Counts, with a checkpoint at each step."""
    return trainer(COUNTING, params={"steps": steps, "pause": pause}, **values)


def numbers(lines: list[str]) -> list[int]:
    """The steps that were printed."""
    return [int(line.split()[-1]) for line in lines if line.split("] ")[-1].startswith("step ")]


def manifest(command: str, **pod: Any) -> dict[str, Any]:
    """A Job of one's own in the base image."""
    container = {
        "name": "main",
        "image": BASE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", command],
        "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}},
    }
    container |= pod.pop("container", {})
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "mine"},
        "spec": {"backoffLimit": 0, "template": {"spec": spec}},
    }


def raw(command: str, **pod: Any) -> RunSpec:
    """A request for it."""
    return RunSpec(manifest=manifest(command, **pod), platform="lab")


def ended(step: runs.Step) -> tuple[Phase, str]:
    return step.observation.phase, step.observation.reason


__all__ = ["QUEUE"]
