"""`gpu-burst checkpoints`: over what a real run left in its store, with nothing of Airflow in reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.cli import main
from airflow_gpu_burst.errors import ExitCode
from airflow_gpu_burst.runlog import RunLog, close_generation
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.behaviour.conftest import KEY, trainer
from tests.behaviour.test_pod import Pod

BODY = """
for step in (10, 20, 30):
    folder = ctx.checkpoint_folder(step)
    (folder / "large").write_bytes(os.urandom(2_000_000))
    (folder / "small").mkdir()
    (folder / "small" / "a").write_text(str(step))
    ctx.ready(step, pin=step == 10, loss=1 / step)
    time.sleep(1.5)
sys.exit(1)
"""
RUN = f"{KEY.dag_id}/{KEY.task_id}/{KEY.run_id}"


class Left:
    """What a run has left in its store."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config = StoreConfig(uri=f"file://{home}/store")
        self.store = open_store(self.config)
        self.log = RunLog(self.store, KEY.prefix)


class Shell:
    """What a person types, and what comes back."""

    def __init__(self, left: Left, capsys: pytest.CaptureFixture[str]) -> None:
        self.left, self.capsys = left, capsys

    def __call__(self, verb: str, *arguments: str, run: str = RUN) -> tuple[int, str]:
        self.capsys.readouterr()
        code = main(["checkpoints", verb, "--store", self.left.config.uri, run, *arguments])
        said = self.capsys.readouterr()
        self.errors = said.err
        return code, said.out

    def json(self, verb: str, *arguments: str, code: int = 0) -> Any:
        found, out = self(verb, *arguments, "-o", "json")
        assert found == code, self.errors
        return json.loads(out)


@pytest.fixture(scope="module")
def store_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has ended with three checkpoints, without a result; its generation is still open."""
    home = tmp_path_factory.mktemp("run")
    pod = Pod(home)
    pod.run(*trainer(BODY).command)
    assert [commit.step for commit in pod.log.read().commits] == [10, 20, 30]
    return home / "store"


@pytest.fixture
def failed(store_of_a_run: Path, tmp_path: Path) -> Left:
    shutil.copytree(store_of_a_run, tmp_path / "store")
    return Left(tmp_path)


@pytest.fixture
def shell(failed: Left, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(failed, capsys)


def data_keys(left: Left, step: int) -> list[str]:
    keys = [entry.key for entry in left.store.list(f"{KEY.prefix}/data/") if f"/step-{step:012d}-" in entry.key]
    return [key for key in keys if "manifest" not in key]


def test_a_line_for_each_commit(shell: Shell) -> None:
    code, out = shell("ls")
    header, *lines = out.splitlines()
    assert code == 0 and header.split() == ["SEQ", "STEP", "EPOCH", "GEN", "SIZE", "FILES", "METRICS", "STATE", "AGE"]
    assert [line.split()[1] for line in lines] == ["10", "20", "30"]
    assert "pinned" in lines[0] and "newest" in lines[-1] and "2.0 MB" in lines[-1] and "loss=0.0333333" in lines[-1]


def test_the_same_as_json_for_programs(shell: Shell) -> None:
    rows = shell.json("ls")
    assert [(row["step"], row["files"], row["state"]) for row in rows] == [
        (10, 2, ["restorable", "pinned"]),
        (20, 2, ["restorable"]),
        (30, 2, ["newest"]),
    ]
    assert rows[0]["metrics"] == {"loss": 0.1} and rows[0]["size"] == 2_000_002


def test_a_run_is_known_by_its_key_prefix_as_well(shell: Shell) -> None:
    assert shell("ls", run=f"{KEY.prefix}/")[1] == shell("ls")[1]


@pytest.mark.parametrize("run", ["dag/train/none", "none", "runs/dag/train/none"])
def test_a_run_that_is_not_there_says_how_to_name_one(shell: Shell, run: str) -> None:
    assert shell("ls", run=run)[0] == ExitCode.REQUEST_WRONG and "DAG/TASK/RUN_ID" in shell.errors


def test_the_files_of_one(shell: Shell) -> None:
    code, out = shell("show", "newest")
    assert code == 0 and "step 30" in out and "small/a" in out and "large" in out
    found = shell.json("show", "newest")
    assert {file["path"]: file["size"] for file in found["files"]} == {"large": 2_000_000, "small/a": 2}


def test_a_checkpoint_that_is_not_there_says_which_are(shell: Shell) -> None:
    assert shell("show", "999")[0] == ExitCode.REQUEST_WRONG and "(there: " in shell.errors


def test_all_is_well(shell: Shell) -> None:
    found = shell.json("verify")
    assert [(row["step"], row["damage"]) for row in found] == [(10, []), (20, []), (30, [])]
    assert "3 checkpoints, 6.0 MB read" in shell("verify")[1]


@pytest.mark.parametrize("change", ["bytes", "missing", "manifest"])
def test_damage_is_found_and_named_and_exits_with_5(shell: Shell, failed: Left, change: str) -> None:
    commit = failed.log.read().commits[1]
    (manifest,) = commit.manifests
    key = manifest if change == "manifest" else data_keys(failed, 20)[0]
    failed.store.delete(key) if change == "missing" else failed.store.put(key, b"x" * 2_000_000)
    code, out = shell("verify")
    assert code == ExitCode.DATA_MISSING and key in out and f"{commit.seq}" in out
    found = shell.json("verify", code=ExitCode.DATA_MISSING)
    assert [bool(row["damage"]) for row in found] == [False, True, False]
    assert shell("verify", "newest")[0] == 0


def test_one_comes_back_into_a_folder(shell: Shell, failed: Left) -> None:
    target = failed.home / "back"
    seq = str(failed.log.read().commits[1].seq)
    code, out = shell("restore", seq, str(target))
    assert code == 0 and "step 20" in out, shell.errors
    assert (target / "small" / "a").read_text() == "20" and (target / "large").stat().st_size == 2_000_000
    code, _ = shell("restore", "newest", str(target))
    assert code == ExitCode.REQUEST_WRONG and "not empty" in shell.errors
    assert (target / "small" / "a").read_text() == "20"


def test_nothing_is_deleted_of_a_run_that_may_go_on(shell: Shell) -> None:
    code, out = shell("gc", "--yes")
    assert code == ExitCode.REQUEST_WRONG and "owner" in shell.errors and not out


def test_of_a_run_that_is_over_what_nobody_names_goes(shell: Shell, failed: Left) -> None:
    history = failed.log.read()
    left = f"{KEY.prefix}/data/{history.starts[-1].seq:012d}/00000-{history.starts[-1].members[0][1]}/step-99/data/left"
    failed.store.put(left, b"x" * 1000)
    close_generation(failed.log, 1, "failed")
    assert shell.json("gc") == {"keys": [left], "bytes": 1000, "left": [], "deleted": False}
    assert failed.store.get(left)
    code, out = shell("gc", "--yes")
    assert code == 0 and "1 object" in out
    assert left not in {entry.key for entry in failed.store.list(f"{KEY.prefix}/data/")}
    assert all(row["damage"] == [] for row in shell.json("verify"))


def test_it_runs_where_there_is_no_airflow(failed: Left) -> None:
    program = f"""
import sys
for name in ("airflow", "kubernetes"): sys.modules[name] = None
from airflow_gpu_burst.cli import main
sys.exit(main(["checkpoints", "ls", {KEY.prefix!r}]))
"""
    env = {**os.environ, **failed.config.to_env()}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "newest" in done.stdout, done.stderr


def test_by_the_connections_that_other_commands_use(
    failed: Left, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connections = {
        "GPU_CLUSTER_DEFAULT": (
            "gpu_cluster",
            {"route": "local", "work_dir": f"{failed.home}/work", "store_conn_id": "s"},
        ),
        "S": ("object_store", {"uri": failed.config.uri}),
    }
    for name, (conn_type, extra) in connections.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps({"conn_type": conn_type, "extra": extra}))
    for run in (RUN, KEY.prefix):
        assert main(["checkpoints", "ls", run]) == 0
        assert "newest" in capsys.readouterr().out
    assert main(["checkpoints", "ls", "dag/train/none"]) == ExitCode.REQUEST_WRONG
