"""Sites for the behaviour tests: the local route with a directory as store."""

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

    def __init__(self, tmp_path: Path) -> None:
        config = StoreConfig(uri=f"file://{tmp_path}/store")
        (tmp_path / "store").mkdir()
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


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
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
