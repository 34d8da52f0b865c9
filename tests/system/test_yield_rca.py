"""The main job under a real scheduler, worker and triggerer: killed, cleared, marked; nothing lost, nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow_stack import AirflowStack

from airflow_gpu_burst.lake.catalog import CatalogConfig, opened
from airflow_gpu_burst.runlog import History, RunLog
from airflow_gpu_burst.runtime.process import start_ticks
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import Store, StoreConfig, open_store
from demo.run import environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "01_local.py": "local_example",
    "02_pinned_table.py": "pinned_table_example",
    "06_checkpoints.py": "checkpoints_example",
}
CONF = {"rounds": 120, "checkpoint_every": 10, "pause_s": 1.0, "lots": 40}


class Fab:
    """A stack with the example DAG, and a look at everything that it leaves."""

    def __init__(self, stack: AirflowStack, home: Path) -> None:
        self.stack, self.home = stack, home
        self.store: Store = open_store(StoreConfig(uri=f"file://{home}/store"))
        self.lake = CatalogConfig(
            name="iceberg_lake_default",
            properties={"type": "sql", "uri": f"sqlite:///{home}/lake/catalog.db", "warehouse": f"file://{home}/lake"},
        )

    def trigger(self, dag_id: str = "yield_rca", **conf: Any) -> RunKey:
        run_id = self.stack.trigger(dag_id, {**CONF, **conf})
        return RunKey(dag_id=dag_id, task_id="train", run_id=run_id)

    def history(self, key: RunKey) -> History:
        return RunLog(self.store, key.prefix).read()

    def wait_commits(self, key: RunKey, count: int = 2, timeout_s: float = 90) -> None:
        """Half way: so many checkpoints are committed and the run goes on."""
        deadline = time.monotonic() + timeout_s
        while len((history := self.history(key)).commits) < count:
            assert not history.finishes, "finished before anything was killed: raise the number of rounds"
            assert time.monotonic() < deadline, f"{history}\n{self.stack.component_logs()}"
            time.sleep(0.2)

    def pid(self, key: RunKey, file: str) -> int:
        """Of the trainer (`scratch/started.json`) or the runtime (`process.json`) of the newest generation."""
        paths = sorted((self.home / "work" / key.digest[:32]).glob(f"*/{file}"))
        return int(json.loads(paths[-1].read_text())["pid"])

    def processes(self, key: RunKey) -> list[str]:
        """Commands of what is still alive of a run: whatever has its folder in its environment."""
        mark = str(self.home / "work" / key.digest[:32]).encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
        return found

    def findings(self, key: RunKey) -> list[dict[str, Any]]:
        with opened(self.lake) as catalog:
            rows = catalog.load_table("demo_fab.findings").scan().to_arrow().to_pylist()
        return [row for row in rows if row["run_key"] == str(key)]

    def models(self, key: RunKey) -> list[str]:
        versions = self.store.list("models/yield-rca/versions/")
        return [entry.key for entry in versions if key.digest[:16] in entry.key]

    def check_success(self, key: RunKey, timeout_s: float = 180) -> None:
        """The DAG run ended well, with one model and one set of findings, and nothing is left running."""
        self.stack.wait_run(key.dag_id, key.run_id, timeout_s=timeout_s)
        assert len(self.models(key)) == 1
        findings = self.findings(key)
        assert findings and len({row["rank"] for row in findings}) == len(findings)
        trained = self.stack.xcom(key.dag_id, key.run_id, "train")
        assert len(self.history(key).finishes) == 1
        report = self.store.get(self.stack.xcom(key.dag_id, key.run_id, "report"))
        assert b"SYNTHETIC" in report
        assert json.loads(self.store.get(trained["result_key"]))["findings"]
        assert not self.processes(key)

    def check_resumed(self, key: RunKey, try_number: int = 2) -> None:
        """The try's trainer went on from a checkpoint: by the log of the run, and by what it printed."""
        assert any(start.restore_from for start in self.history(key).starts)
        log = self.stack.task_log(key.dag_id, key.run_id, "train", try_number)
        assert "restored checkpoint" in log and "round 10 of" not in log, log[-3000:]


@pytest.fixture(scope="module")
def fab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fab]:
    home = tmp_path_factory.mktemp("fab")
    dags = home / "dags"
    shutil.copytree(ROOT / "dags", dags, ignore=shutil.ignore_patterns("__pycache__"))
    for example in (ROOT / "example_dags").glob("*.py"):
        shutil.copy(example, dags)
    # The same DAG, waiting on a worker slot: only there is a worker to kill half way.
    text = (dags / "yield_rca.py").read_text()
    variant = text.replace("def yield_rca()", "def yield_rca_sync()").replace("= yield_rca()", "= yield_rca_sync()")
    variant = variant.replace('task_id="train",', 'task_id="train",\n        deferrable=False,')
    assert variant.count("deferrable=False") == 1 and variant.count("yield_rca_sync") == 2
    (dags / "yield_rca_sync.py").write_text(variant)
    env = {name: value for name, value in environment(home).items() if name.startswith("AIRFLOW_CONN_")}
    with AirflowStack(home) as stack:
        stack.start(dags, {**env, "OMP_NUM_THREADS": "1"})
        stack.wait_parsed("yield_rca")
        stack.wait_parsed("yield_rca_sync")
        yield Fab(stack, home)


def kill_trainer(fab: Fab, key: RunKey) -> None:
    os.kill(fab.pid(key, "scratch/started.json"), signal.SIGKILL)


def kill_runtime(fab: Fab, key: RunKey) -> None:
    os.kill(fab.pid(key, "process.json"), signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_trainer, kill_runtime])
def test_a_killed_run_is_retried_from_its_checkpoint(fab: Fab, kill: Callable[[Fab, RunKey], None]) -> None:
    key = fab.trigger()
    fab.wait_commits(key)
    kill(fab, key)
    fab.check_success(key)
    fab.check_resumed(key)
    assert fab.stack.task(key.dag_id, key.run_id, "train")["try_number"] == 2


def test_a_killed_worker_leaves_the_run_alone_and_its_retry_finds_it(fab: Fab) -> None:
    key = fab.trigger("yield_rca_sync", pause_s=4)
    fab.wait_commits(key)
    trainer = fab.pid(key, "scratch/started.json")
    fab.stack.kill_worker(key.dag_id, key.run_id, "train")
    fab.stack.wait_task(key.dag_id, key.run_id, "train", states={"running"}, try_number=2)
    assert start_ticks(trainer) is not None, "the run ended before the retry could find it: raise the pause"
    fab.check_success(key)
    history = fab.history(key)
    assert (len(history.opens), len(history.starts)) == (1, 1), "the run was started again"


def test_a_killed_triggerer_leaves_the_run_alone_and_its_successor_follows_it(fab: Fab) -> None:
    key = fab.trigger()
    fab.wait_commits(key)
    fab.stack.kill_triggerer()
    time.sleep(1)
    fab.stack.start_triggerer()
    fab.check_success(key)
    history = fab.history(key)
    assert (len(history.opens), len(history.starts)) == (1, 1), "the run was started again"
    log = fab.stack.task_log(key.dag_id, key.run_id, "train", 1)
    missing = [n for n in range(10, 121, 10) if f"round {n} of 120" not in log]
    assert not missing, f"lines of rounds {missing} are not in the task's log"


@pytest.mark.parametrize("dag_id", ["yield_rca", "yield_rca_sync"])
def test_clearing_the_running_task_goes_on_from_its_checkpoint(fab: Fab, dag_id: str) -> None:
    key = fab.trigger(dag_id)
    fab.wait_commits(key)
    first = fab.pid(key, "scratch/started.json")
    fab.stack.clear(key.dag_id, key.run_id, "train")
    fab.check_success(key)
    fab.check_resumed(key)
    assert start_ticks(first) is None
    assert [close.verdict for close in fab.history(key).closes.values()] == ["cancelled", "succeeded"]


@pytest.mark.parametrize("dag_id", ["yield_rca", "yield_rca_sync"])
@pytest.mark.parametrize("state", ["failed", "success"])
def test_marking_the_running_task_ends_the_run(fab: Fab, dag_id: str, state: str) -> None:
    key = fab.trigger(dag_id, pause_s=6)  # by itself it would go on for more than a minute
    fab.wait_commits(key, 1)
    fab.stack.mark(key.dag_id, key.run_id, "train", state)
    deadline = time.monotonic() + 30
    while fab.processes(key):
        assert time.monotonic() < deadline, "the run goes on"
        time.sleep(0.2)
    history = fab.history(key)
    assert [close.verdict for close in history.closes.values()] == ["cancelled"] and not fab.models(key)


def test_clearing_after_success_trains_anew_and_keeps_one_set_of_findings(fab: Fab) -> None:
    key = fab.trigger(pause_s=0)
    fab.check_success(key)
    before = fab.findings(key)
    fab.stack.clear(key.dag_id, key.run_id, "train", downstream=True)
    fab.stack.wait_task(key.dag_id, key.run_id, "train", states={"running", "deferred"})
    fab.stack.wait_run(key.dag_id, key.run_id, timeout_s=120)
    assert len(fab.models(key)) == 2
    assert all(start.restore_from is None for start in fab.history(key).starts)
    after = fab.findings(key)
    assert len(after) == len(before) and after[0]["created_at"] != before[0]["created_at"]


def test_every_example_dag_runs(fab: Fab) -> None:
    """Runs last: the pinned table is the one that the tests above have filled."""
    from test_cluster import EXAMPLES as ON_A_CLUSTER

    assert {path.name for path in (ROOT / "example_dags").glob("*.py")} == {*EXAMPLES, *ON_A_CLUSTER}
    for dag_id in EXAMPLES.values():
        fab.stack.wait_parsed(dag_id)
    runs = {dag_id: fab.stack.trigger(dag_id) for dag_id in EXAMPLES.values()}
    for dag_id, run_id in runs.items():
        fab.stack.wait_run(dag_id, run_id, timeout_s=90)
    counted = fab.stack.xcom("pinned_table_example", runs["pinned_table_example"], "count")
    assert counted["result"]["rows"] == CONF["lots"] * 12
    trained = fab.stack.xcom("checkpoints_example", runs["checkpoints_example"], "train")
    assert trained["result"] == {"weight": 2.993} and trained["checkpoints"]["committed"] >= 2
