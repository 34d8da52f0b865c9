"""GpuJobTrigger by hand on an event loop: cancelled, started again, out of reach, killed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_gpu_burst.runs import following
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Handle
from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.triggers.gpu_job import GpuJobTrigger
from tests.behaviour.conftest import Lab, trainer

PRINTING = "for n in range(200): print(f'line {n}.', flush=True); time.sleep(0.02)\nctx.result({})"


@pytest.fixture
def store_config(tmp_path: Any) -> StoreConfig:
    (tmp_path / "store").mkdir()
    return StoreConfig(uri=f"file://{tmp_path}/store")


@pytest.fixture(autouse=True)
def connections(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for conn_id, conn_type, extra in (
        ("gpu", "gpu_cluster", {"route": "local", "work_dir": str(lab.work), "grace_s": 2}),
        ("store", "object_store", {"uri": lab.site.store_config.uri}),
    ):
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps({"conn_type": conn_type, "extra": extra}))


def trigger(handle: Handle, **timeouts: float) -> GpuJobTrigger:
    return GpuJobTrigger(
        handle=handle.to_json(),
        timeouts=asdict(Timeouts(**timeouts)),
        submitted_at=time.time(),
        poll_interval=0.05,
    )


async def events(trigger: GpuJobTrigger) -> list[dict[str, Any]]:
    return [event.payload async for event in trigger.run()]


def test_fires_once_when_the_run_ends(lab: Lab) -> None:
    handle = lab.submit(trainer("ctx.result({})"))
    (event,) = asyncio.run(events(trigger(handle)))
    assert event["observation"]["phase"] == "SUCCEEDED" and not event["timeout"]
    assert Handle.from_json(event["handle"]) == handle
    json.dumps(event)


def test_cancelled_and_started_again_at_any_moment_it_loses_no_line(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(following, "CURSOR_EVERY_S", 0.0)
    handle, fired, dice = lab.submit(trainer(PRINTING)), [], random.Random(4)

    async def restart_until_fired() -> int:
        starts = 0
        while not fired:
            task = asyncio.create_task(events(trigger(handle)))
            starts += 1
            await asyncio.wait([task], timeout=dice.random() * 0.8)
            if task.done():
                fired.extend(task.result())
            else:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return starts

    assert asyncio.run(restart_until_fired()) > 2
    assert len(fired) == 1
    printed = [int(n) for n in re.findall(r"line (\d+)\.", capsys.readouterr().out)]
    assert sorted(set(printed)) == list(range(200))


def test_a_timeout_is_an_event(lab: Lab) -> None:
    handle = lab.submit(trainer("time.sleep(60)"))
    (event,) = asyncio.run(events(trigger(handle, run_s=0.5)))
    assert "run_timeout" in event["timeout"]


def test_an_error_is_an_event_not_a_lost_trigger(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = lab.submit(trainer("ctx.result({})"))
    monkeypatch.delenv("AIRFLOW_CONN_GPU")
    (event,) = asyncio.run(events(trigger(handle)))
    assert event["error"] == "SpecError" and "airflow connections add gpu" in event["message"]
    assert event["retryable"] is False


def test_nothing_blocks_the_loop(lab: Lab) -> None:
    flood = "block = b'a short line\\n' * 1000\nfor n in range(300): sys.stdout.buffer.write(block)\nctx.result({})"
    handle = lab.submit(trainer(flood))
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        task = asyncio.create_task(events(trigger(handle)))
        while not task.done():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            worst = max(worst, time.monotonic() - began)

    asyncio.run(watch())
    assert worst < 2.0, f"other triggers waited for {worst:.1f} s"


@pytest.mark.parametrize(("state", "ends"), [("deferred", False), ("failed", True), ("success", True), (None, True)])
def test_on_kill_ends_the_run_only_if_the_task_does_not_wait_any_more(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, state: str | None, ends: bool
) -> None:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    handle = lab.submit(trainer("time.sleep(60)"))
    asked = staticmethod(lambda **_: {"r": {"t": state}})
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", asked)
    killed = trigger(handle)
    killed.task_instance = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1)  # type: ignore[assignment]
    asyncio.run(killed.on_kill())
    assert lab.site.route.observe(handle).terminal is ends
