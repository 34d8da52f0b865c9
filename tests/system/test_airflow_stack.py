"""The harness itself: every way to interrupt a task that later tests build upon."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from airflow_stack import AirflowStack, AirflowStackError

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

DAG = "stack_smoke"

MODULE = '''
import asyncio, subprocess, time
from pathlib import Path
from airflow.sdk import BaseOperator
from airflow.triggers.base import BaseTrigger, TriggerEvent


class FileTrigger(BaseTrigger):
    """Fires when the file exists; tells of on_kill in another."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def serialize(self):
        return "stack_smoke_module.FileTrigger", {"folder": self.folder}

    async def run(self):
        self.log.info("waiting for the file")
        while not (Path(self.folder) / "go").exists():
            await asyncio.sleep(0.1)
        yield TriggerEvent("the file is there")

    async def on_kill(self):
        with (Path(self.folder) / "on_kill").open("a") as told:
            told.write(f"{self.task_instance.try_number}\\n")


class WaitForFile(BaseOperator):
    def execute(self, context):
        folder = context["dag_run"].conf["folder"]
        self.defer(trigger=FileTrigger(folder), method_name="resume")

    def resume(self, context, event):
        return event


class Sleep(BaseOperator):
    """The first try detaches a process, then sleeps for conf's sleep_s."""

    def execute(self, context):
        conf = context["dag_run"].conf
        if context["ti"].try_number == 1:
            detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (Path(conf["folder"]) / "detached").write_text(str(detached.pid))
            time.sleep(conf["sleep_s"])
        return context["ti"].try_number
'''

DAG_FILE = f"""
from datetime import timedelta
from airflow.sdk import DAG
from stack_smoke_module import Sleep, WaitForFile

with DAG("{DAG}", schedule=None):
    Sleep(task_id="plain", retries=1, retry_delay=timedelta(seconds=1))
    WaitForFile(task_id="deferred")
"""


@pytest.fixture(scope="module")
def smoke(airflow_stack: AirflowStack, airflow_modules: Path) -> AirflowStack:
    (airflow_modules / "stack_smoke_module.py").write_text(MODULE)
    (airflow_stack.dags_folder / "stack_smoke.py").write_text(DAG_FILE)
    airflow_stack.wait_parsed(DAG)
    return airflow_stack


@pytest.fixture
def detached(tmp_path: Path) -> Iterator[Path]:
    """Where the plain task leaves the pid of the process it detached; the process ends with the test."""
    path = tmp_path / "detached"
    yield path
    if path.exists():
        os.kill(int(path.read_text()), signal.SIGKILL)


def start(smoke: AirflowStack, folder: Path, sleep_s: float = 0) -> str:
    """Start a run whose triggers wait for the file ``go`` in the folder."""
    return smoke.trigger(DAG, {"folder": str(folder), "sleep_s": sleep_s})


def wait_for_text(path: Path, timeout_s: float = 20) -> str:
    deadline = time.monotonic() + timeout_s
    while not path.exists() or not (text := path.read_text()):
        assert time.monotonic() < deadline, f"nothing in {path.name}"
        time.sleep(0.1)
    return text


def test_run_succeeds_and_leaves_xcom_and_log(smoke: AirflowStack, tmp_path: Path, detached: Path) -> None:
    run_id = start(smoke, tmp_path)
    smoke.wait_trigger(DAG, run_id, "deferred")
    (tmp_path / "go").touch()
    assert smoke.wait_run(DAG, run_id) == "success"
    assert smoke.xcom(DAG, run_id, "plain") == 1
    assert smoke.xcom(DAG, run_id, "deferred") == "the file is there"
    assert smoke.xcom(DAG, run_id, "deferred", "no such key") is None
    assert "waiting for the file" in smoke.task_log(DAG, run_id, "deferred", 1)
    assert not (tmp_path / "on_kill").exists()


def test_killed_worker_means_a_second_try(smoke: AirflowStack, tmp_path: Path, detached: Path) -> None:
    (tmp_path / "go").touch()
    run_id = start(smoke, tmp_path, sleep_s=600)
    smoke.wait_task(DAG, run_id, "plain", {"running"})
    survivor = int(wait_for_text(detached))
    smoke.kill_worker(DAG, run_id, "plain")
    task = smoke.wait_task(DAG, run_id, "plain", {"up_for_retry"}, try_number=1)
    assert task["max_tries"] == 1
    assert survivor in processes.live()
    smoke.wait_run(DAG, run_id)
    assert smoke.xcom(DAG, run_id, "plain") == 2
    assert [t["state"] for t in smoke.tries(DAG, run_id, "plain")] == ["failed", "success"]


def test_trigger_survives_its_triggerer(smoke: AirflowStack, tmp_path: Path, detached: Path) -> None:
    run_id = start(smoke, tmp_path)
    smoke.wait_trigger(DAG, run_id, "deferred")
    smoke.kill_triggerer()
    (tmp_path / "go").touch()
    with pytest.raises(AirflowStackError, match="is deferred in try 1"):
        smoke.wait_task(DAG, run_id, "deferred", {"success"}, timeout_s=1)
    smoke.start_triggerer()
    smoke.wait_run(DAG, run_id)
    assert smoke.task(DAG, run_id, "deferred")["try_number"] == 1
    assert not (tmp_path / "on_kill").exists()


def test_clear_while_deferred(smoke: AirflowStack, tmp_path: Path, detached: Path) -> None:
    run_id = start(smoke, tmp_path)
    smoke.wait_trigger(DAG, run_id, "deferred")
    smoke.wait_task(DAG, run_id, "plain", {"success"})
    smoke.clear(DAG, run_id, "deferred")
    assert wait_for_text(tmp_path / "on_kill") == "1\n"
    smoke.wait_trigger(DAG, run_id, "deferred", try_number=2)
    (tmp_path / "go").touch()
    smoke.wait_run(DAG, run_id)
    assert (tmp_path / "on_kill").read_text() == "1\n"


@pytest.mark.parametrize("state", ["failed", "success"])
def test_mark_while_deferred(smoke: AirflowStack, tmp_path: Path, detached: Path, state: str) -> None:
    run_id = start(smoke, tmp_path)
    smoke.wait_trigger(DAG, run_id, "deferred")
    smoke.mark(DAG, run_id, "deferred", state)
    assert wait_for_text(tmp_path / "on_kill") == "1\n"
    assert smoke.task_state(DAG, run_id, "deferred") == state
    smoke.wait_run(DAG, run_id, {state})


def test_run_survives_its_scheduler(smoke: AirflowStack, tmp_path: Path, detached: Path) -> None:
    run_id = start(smoke, tmp_path)
    smoke.wait_trigger(DAG, run_id, "deferred")
    smoke.kill_scheduler()
    smoke.start_scheduler()
    (tmp_path / "go").touch()
    smoke.wait_run(DAG, run_id)
