"""
The main job where it belongs: a real Airflow, a REST catalog with OAuth2, S3, and a real cluster with the shipped Role.

Only connections differ from tests/system/test_yield_rca.py; the DAG is the same file.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow_stack import AirflowStack

from airflow_gpu_burst.runlog import History, RunLog
from airflow_gpu_burst.runs import status
from airflow_gpu_burst.state import Phase, RunKey
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.lab_fixtures import GpuCluster, Stack

pytestmark = [pytest.mark.lab, pytest.mark.timeout(420)]
fault = pytest.mark.fault
full = pytest.mark.lab_full

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ROOT / "tests" / "lab" / "platforms"
EXAMPLES = {
    "03_cluster.py": "cluster_example",
    "04_several_nodes.py": "several_nodes_example",
    "05_own_manifest.py": "own_manifest_example",
}
CONF = {"rounds": 120, "checkpoint_every": 10, "pause_s": 1.0, "lots": 40, "gpus": 1}


class Fab:
    """A stack with the example DAGs, and a look at the cluster."""

    def __init__(self, airflow: AirflowStack, gpu: GpuCluster, store: StoreConfig) -> None:
        self.airflow, self.gpu, self.store = airflow, gpu, open_store(store)

    def trigger(self, dag_id: str = "yield_rca", **conf: Any) -> RunKey:
        return RunKey(dag_id=dag_id, task_id="train", run_id=self.airflow.trigger(dag_id, {**CONF, **conf}))

    def history(self, key: RunKey) -> History:
        return RunLog(self.store, key.prefix).read()

    def wait_commits(self, key: RunKey, count: int = 2, timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while len((history := self.history(key)).commits) < count:
            assert not history.finishes, "finished before anything was killed: raise the number of rounds"
            assert time.monotonic() < deadline, f"{history}\n{self.log(key)}\n{self.airflow.component_logs()}"
            time.sleep(0.3)

    def wait_state(self, key: RunKey, state: str, pause_s: float = 0.2, timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while (now := self.airflow.task_state(key.dag_id, key.run_id, key.task_id)) != state:
            assert now not in ("success", "failed") and time.monotonic() < deadline, f"{now}\n{self.log(key)}"
            time.sleep(pause_s)

    def wait_line(self, key: RunKey, text: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in (log := self.log(key)):
            assert time.monotonic() < deadline, log
            time.sleep(0.5)

    def log(self, key: RunKey, try_number: int = 1) -> str:
        return self.airflow.task_log(key.dag_id, key.run_id, key.task_id, try_number)

    def objects(self, key: RunKey, kind: str = "jobs") -> list[dict[str, Any]]:
        found = self.gpu.get(kind, "-l", "app.kubernetes.io/managed-by=airflow-gpu-burst")
        mark = json.loads(json.dumps(key.to_dict()))
        return [
            item
            for item in found["items"]
            if json.loads(item["metadata"].get("annotations", {}).get("gpu-burst/run-key", "null")) == mark
        ]

    def pods(self, key: RunKey) -> list[str]:
        names = [item["metadata"]["name"] for item in self.objects(key)]
        found = [self.gpu.get("pods", "-l", f"gpu-burst/name={name}")["items"] for name in names]
        return [pod["metadata"]["name"] for pods in found for pod in pods]

    def success(self, key: RunKey, timeout_s: float = 240) -> None:
        self.airflow.wait_run(key.dag_id, key.run_id, timeout_s=timeout_s)
        assert len(self.history(key).finishes) == 1


@pytest.fixture(scope="module")
def fab(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fab]:
    gpu = stack.gpu
    gpu.image("gpu-burst")
    home = tmp_path_factory.mktemp("fab")
    dags = home / "dags"
    shutil.copytree(ROOT / "dags", dags, ignore=shutil.ignore_patterns("__pycache__"))
    for name in [*EXAMPLES, "05_job.yaml"]:
        shutil.copy(ROOT / "example_dags" / name, dags)
    text = (dags / "yield_rca.py").read_text()
    variant = text.replace("def yield_rca()", "def yield_rca_sync()").replace("= yield_rca()", "= yield_rca_sync()")
    (dags / "yield_rca_sync.py").write_text(
        variant.replace('task_id="train",', 'task_id="train",\n        deferrable=False,')
    )
    store = stack.store()
    connections = stack.connections()
    connections["object_store_default"]["extra"]["uri"] = store.uri
    dashboard = "https://dash.example/{namespace}/{kind}/{name}"
    for name in ("gpu_cluster_default", "gpu_cluster_lab"):
        connections[name]["extra"]["dashboard_url"] = dashboard
    env = {f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in connections.items()}
    with AirflowStack(home) as airflow:
        airflow.start(dags, {**env, "OMP_NUM_THREADS": "1", "GPU_BURST_PLATFORMS": str(PLATFORMS)})
        airflow.wait_parsed("yield_rca")
        airflow.wait_parsed("yield_rca_sync")
        yield Fab(airflow, gpu, store)


@fault("the pod is killed half way, under Airflow", outcome="the DAG ends in success, from a checkpoint, in one try")
def test_the_whole_round_with_a_killed_pod(fab: Fab) -> None:
    key = fab.trigger()
    fab.wait_commits(key)
    (pod,) = fab.pods(key)
    fab.gpu.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    fab.success(key)
    assert any(start.restore_from for start in fab.history(key).starts)
    log = fab.log(key)
    assert "restored checkpoint" in log and "round 120 of 120" in log
    assert fab.airflow.task(key.dag_id, key.run_id, "train")["try_number"] == 1
    (job,) = fab.objects(key)
    link = f"https://dash.example/train/Job/{job['metadata']['name']}"
    assert fab.airflow.xcom(key.dag_id, key.run_id, "train", "_link_JobLink") == link
    durations = fab.airflow.xcom(key.dag_id, key.run_id, "train", "gpu_burst_phase_seconds")
    assert durations["RUNNING"] > 5, durations
    found = status.read(fab.store, key)
    assert found is not None and found.phase is Phase.SUCCEEDED and found.last_checkpoint is not None
    assert found.inputs["wafers"].snapshot_id and found.gpus == 1


@full
@fault("triggerer killed while it follows", outcome="another takes over; the job is not touched; no line is missing")
def test_a_second_triggerer_takes_over(fab: Fab) -> None:
    key = fab.trigger()
    fab.wait_commits(key)
    (pod,) = fab.pods(key)
    fab.airflow.kill_triggerer()
    time.sleep(2)
    fab.airflow.start_triggerer()
    fab.success(key)
    assert fab.pods(key) == [pod], "the job was started again"
    log = fab.log(key)
    missing = [n for n in range(10, 121, 10) if f"round {n} of 120" not in log]
    assert not missing, f"lines of rounds {missing} are not in the task's log"


@full
@fault("triggerer killed before its first look", outcome="its successor follows from the first line")
def test_no_triggerer_when_it_defers(fab: Fab) -> None:
    fab.airflow.kill_triggerer()
    try:
        key = fab.trigger()
        fab.wait_state(key, "deferred")
        fab.wait_commits(key)
    finally:
        fab.airflow.start_triggerer()
    fab.success(key)
    assert "round 10 of 120" in fab.log(key) and "round 120 of 120" in fab.log(key)


@full
@fault("triggerer killed as the run ends", outcome="the event comes again, from the run log; collected once")
def test_the_triggerer_dies_with_the_event(fab: Fab) -> None:
    key = fab.trigger(rounds=20, pause_s=0.5)
    deadline = time.monotonic() + 120
    while not fab.history(key).finishes:
        assert time.monotonic() < deadline, fab.log(key)
        time.sleep(0.02)
    fab.airflow.kill_triggerer()
    state = fab.airflow.task_state(key.dag_id, key.run_id, "train")
    fab.airflow.start_triggerer()
    fab.success(key)
    assert state == "deferred", "the event was saved already: nothing was tested"
    assert len(fab.history(key).opens) == len(fab.history(key).closes) == 1
    assert fab.airflow.task(key.dag_id, key.run_id, "train")["try_number"] == 1


@full
@fault("worker killed while it collects", outcome="the retry collects the same result; nothing runs again")
def test_a_worker_killed_while_it_collects(fab: Fab) -> None:
    key = fab.trigger(rounds=20, pause_s=0.5)
    fab.wait_state(key, "deferred")
    fab.wait_state(key, "running", 0.02)
    fab.airflow.kill_worker(key.dag_id, key.run_id, "train")
    fab.success(key)
    assert len(fab.history(key).opens) == 1 and len(fab.pods(key)) == 1
    assert fab.airflow.task(key.dag_id, key.run_id, "train")["try_number"] == 2


@full
@fault("worker killed while it waits (deferrable=False)", outcome="the retry finds the same job and its output")
def test_a_killed_worker(fab: Fab) -> None:
    key = fab.trigger("yield_rca_sync", pause_s=3)
    fab.wait_commits(key)
    (pod,) = fab.pods(key)
    fab.airflow.kill_worker(key.dag_id, key.run_id, "train")
    fab.success(key)
    assert fab.pods(key) == [pod] and len(fab.history(key).opens) == 1


@fault("marked failed, while deferred or on a worker", outcome="the job is deleted once, by UID; the log is closed")
@pytest.mark.parametrize("dag_id", ["yield_rca", pytest.param("yield_rca_sync", marks=full)])
def test_marked_failed(fab: Fab, dag_id: str) -> None:
    key = fab.trigger(dag_id, pause_s=6)
    fab.wait_commits(key, 1)
    fab.wait_line(key, "round 10 of 120")  # before, nobody may be following who could hear of it (Airflow 3.3.2)
    fab.airflow.mark(key.dag_id, key.run_id, "train", "failed")
    deadline = time.monotonic() + 60
    while fab.objects(key):
        assert time.monotonic() < deadline, "the job goes on"
        time.sleep(0.5)
    assert [close.verdict for close in fab.history(key).closes.values()] == ["cancelled"]


@full
@fault(
    "cleared while it runs", outcome="one job per generation: the old one is deleted, the new goes on from a checkpoint"
)
def test_cleared_while_running(fab: Fab) -> None:
    key = fab.trigger()
    fab.wait_commits(key)
    fab.airflow.clear(key.dag_id, key.run_id, "train")
    fab.success(key)
    assert [close.verdict for close in fab.history(key).closes.values()] == ["cancelled", "succeeded"]
    assert any(start.restore_from for start in fab.history(key).starts)
    assert len(fab.objects(key)) == 1


def test_every_cluster_example_runs(fab: Fab) -> None:
    for dag_id in EXAMPLES.values():
        fab.airflow.wait_parsed(dag_id)
    runs = {
        "cluster_example": fab.airflow.trigger("cluster_example"),
        "several_nodes_example": fab.airflow.trigger("several_nodes_example", {"gpus": 8}),
        "own_manifest_example": fab.airflow.trigger("own_manifest_example", {"words": "it is me"}),
    }
    for dag_id, run_id in runs.items():
        fab.airflow.wait_run(dag_id, run_id, timeout_s=180)
    assert fab.airflow.xcom("cluster_example", runs["cluster_example"], "train")["result"] == {"steps": 3}
    assert fab.airflow.xcom("several_nodes_example", runs["several_nodes_example"], "train")["result"] == {"nodes": 2}
    assert "it is me" in fab.airflow.task_log("own_manifest_example", runs["own_manifest_example"], "train", 1)
