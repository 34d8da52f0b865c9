"""Sites for the behaviour tests: the local route, with a directory and with S3 servers as store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_gpu_burst import runs
from airflow_gpu_burst.routes import ClusterConfig
from airflow_gpu_burst.routes.local import LocalRoute
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.spec import RunSpec, Timeouts
from airflow_gpu_burst.state import Handle, Observation, RunKey
from airflow_gpu_burst.store import StoreConfig, open_store

KEY = RunKey(dag_id="dag", task_id="train", run_id="manual__2026-01-01 ☃ spaces")


class Lab:
    """One site, with shorthand for what most tests do."""

    def __init__(self, tmp_path: Path, config: StoreConfig) -> None:
        self.work = tmp_path / "work"
        self.site = Site(
            route=LocalRoute(ClusterConfig(connection="gpu", work_dir=str(self.work), grace_s=3)),
            store=open_store(config),
            store_config=config,
            connection="gpu",
            store_connection="store",
        )
        self.handles: list[Handle] = []

    def submit(self, spec: RunSpec, key: RunKey = KEY, max_tries: int = 2, try_number: int = 1) -> Handle:
        handle = runs.submit(self.site, spec=spec, run_key=key, max_tries=max_tries, try_number=try_number)
        self.handles.append(handle)
        return handle

    def follower(self, handle: Handle, timeouts: Timeouts | None = None) -> runs.Follower:
        return runs.Follower(
            store=self.site.store,
            route=self.site.route,
            handle=handle,
            timeouts=timeouts or Timeouts(),
            submitted_at=time.time(),
        )

    def wait(
        self, handle: Handle, timeout_s: float = 60, timeouts: Timeouts | None = None
    ) -> tuple[Observation, list[str]]:
        """Until the run has ended; its last observation and all of its lines."""
        follower, lines, deadline = self.follower(handle, timeouts), [], time.monotonic() + timeout_s
        while True:
            step = follower.step()
            lines += step.lines
            if step.done:
                return step.observation, lines
            assert time.monotonic() < deadline, f"still {step.observation}: {lines[-20:]}"
            time.sleep(0.05)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def folder(self, handle: Handle) -> Path:
        return self.work / handle.run_key.digest[:32] / handle.name

    def versions(self, name: str = "model") -> list[str]:
        return [entry.key for entry in self.site.store.list(f"models/{name}/versions/")]


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Endpoint of an S3 server (moto) with a bucket named `burst`."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **S3_KEYS)
    client.create_bucket(Bucket="burst")
    client.close()
    yield endpoint
    server.stop()


S3_KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}


@pytest.fixture(params=["directory", "s3", pytest.param("lab", marks=pytest.mark.lab)])
def store_config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    """Every kind of store that the suites run over, empty."""
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        return StoreConfig(uri=f"file://{tmp_path}/store")
    if request.param == "lab":
        config: StoreConfig = request.getfixturevalue("stack").store()
        return config
    return StoreConfig(
        uri=f"s3://burst/{tmp_path.name}-{time.time_ns()}",
        endpoint_url=request.getfixturevalue("s3"),
        region="us-east-1",
        access_key_id="key",
        secret_access_key="secret",
    )


@pytest.fixture
def lab(tmp_path: Path, store_config: StoreConfig) -> Iterator[Lab]:
    lab = Lab(tmp_path, store_config)
    yield lab
    for handle in lab.handles:
        lab.site.route.cancel(handle)


def trainer(body: str, **values: object) -> RunSpec:
    """A request whose trainer is this Python text; `ctx` is its context."""
    text = f"import os, signal, sys, time\nfrom airflow_gpu_burst.runtime import context\nctx = context()\n{body}"
    return replace(RunSpec(command=(sys.executable, "-c", text)), **values)  # type: ignore[arg-type]


COUNTING = """
start = ctx.restored.step if ctx.restored else 0
print(f"from {start}", flush=True)
for step in range(start + 1, ctx.params["steps"] + 1):
    (ctx.checkpoint_folder(step) / "state").write_text(str(step))
    ctx.ready(step)
    print(f"step {step}", flush=True)
    time.sleep(ctx.params.get("pause", 0.1))
(ctx.model_dir / "weights").write_text("w" * 10)
ctx.result({"steps": step, "from": start})
"""
"""A trainer that counts, with a checkpoint at each step."""
