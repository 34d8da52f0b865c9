"""`gpu-burst submit|status|logs|cancel|gc` as a person types them, over the local route."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst import runs
from airflow_gpu_burst.cli import main
from airflow_gpu_burst.commands import tasks
from airflow_gpu_burst.commands.arguments import duration, param
from airflow_gpu_burst.commands.words import ago, keys_of, path_of
from airflow_gpu_burst.routes import ClusterConfig
from airflow_gpu_burst.routes.local import LocalRoute
from airflow_gpu_burst.runlog import RunLog, close_generation, settle_generation
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, RunKey
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.behaviour.conftest import COUNTING

CONTEXT = "import sys, time\nfrom airflow_gpu_burst.runtime import context\nctx = context()\n"
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Shell:
    """A folder with connections in the environment, and `gpu-burst` in this process or in one of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        self.route = LocalRoute(ClusterConfig(connection="gpu_cluster_default", work_dir=f"{folder}/work", grace_s=2))
        self.site = self.site_over("store")
        self.connections: dict[str, tuple[str, dict[str, Any]]] = {
            "gpu_cluster_default": ("gpu_cluster", {"route": "local", "work_dir": f"{folder}/work", "grace_s": 2,
                                                    "store_conn_id": "store"}),
            "store": ("object_store", {"uri": self.site.store.uri}),
        }  # fmt: skip
        for conn_id, (conn_type, extra) in self.connections.items():
            value = json.dumps({"conn_type": conn_type, "extra": extra})
            monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", value)

    def site_over(self, store: str) -> Site:
        (self.folder / store).mkdir(exist_ok=True)
        config = StoreConfig(uri=f"file://{self.folder}/{store}")
        return Site(
            route=self.route,
            store=open_store(config),
            store_config=config,
            connection="gpu_cluster_default",
            store_connection="store",
        )

    def __call__(self, *arguments: str) -> Done:
        self._capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        out, err = self._capsys.readouterr()
        return Done(code, out, err)

    def spawn(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "airflow_gpu_burst.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def apart(self, *arguments: str, **env: str) -> Done:
        process = self.spawn(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return Done(process.returncode, out, err)

    def trainer(self, body: str) -> tuple[str, ...]:
        (self.folder / "train.py").write_text(CONTEXT + body)
        return ("--", "python", "train.py")

    def submit(self, body: str, *options: str, run_id: str = "one") -> dict[str, Any]:
        done = self("submit", "--name", "fit", "--run-id", run_id, *options, "-o", "json", *self.trainer(body))
        assert done.code == 0, done.err
        found: dict[str, Any] = done.data
        return found

    def pid(self, handle: Handle) -> int:
        """Of its runtime."""
        path = self.folder / "work" / handle.run_key.digest[:32] / handle.name / "process.json"
        self.until(lambda: "pid" in json.loads(path.read_text()))
        return int(json.loads(path.read_text())["pid"])

    def stop(self, handle: Handle) -> None:
        """Its runtime is stuck from here on."""
        os.kill(self.pid(handle), signal.SIGSTOP)

    def close(self, handle: Handle) -> None:
        """In the log only, of a runtime that is stuck: one that is not notices within seconds, and ends by itself."""
        self.stop(handle)
        close_generation(RunLog(self.site.store, handle.run_key.prefix), handle.generation, "failed", "by hand")

    def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    def until_phase(self, run: str, phase: str) -> None:
        self.until(lambda: bool(self("status", run, "-o", "json").data["phase"] == phase))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    # What a process of its own would set for itself.
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    monkeypatch.setenv("AIRFLOW__LOGGING__LOGGING_LEVEL", "ERROR")
    monkeypatch.chdir(tmp_path)
    ours = logging.getLogger("airflow_gpu_burst")
    propagate = ours.propagate
    shell = Shell(tmp_path, monkeypatch, capsys)
    yield shell
    ours.handlers.clear()
    ours.propagate = propagate
    for found in shell.route.find():
        shell.route.cancel(found.handle)


# --- submit ---------------------------------------------------------------------------------------------------------


def test_submit_says_what_to_type_next_and_the_same_again_finds_the_run(shell: Shell) -> None:
    command = ("submit", "--name", "fit", "--run-id", "one", "--gpus", "2", *shell.trainer("time.sleep(60)"))
    first, second = shell(*command), shell(*command)
    assert first.code == second.code == 0
    name = first.out.split()[0]
    assert f"{name} submitted\n  cli/fit/one, 2 GPUs on 1 node" in first.out
    for verb in ("logs -f", "status", "cancel"):
        assert f"gpu-burst {verb} {name}\n" in first.out
    assert f"{name} was submitted before" in second.out
    assert [found.handle.name for found in shell.route.find()] == [name]


def test_without_a_run_id_each_submission_is_a_run_of_its_own(shell: Shell) -> None:
    trainer = shell.trainer("ctx.result({})")
    names = {shell("submit", "-o", "json", *trainer).data["name"] for _ in range(2)}
    assert len(names) == 2


def test_another_request_under_the_same_run_id_is_refused(shell: Shell) -> None:
    shell.submit("time.sleep(60)")
    done = shell("submit", "--name", "fit", "--run-id", "one", "--param", "x=1", *shell.trainer("time.sleep(60)"))
    assert done.code == 3 and "What differs: params: {} -> {'x': 1}" in done.err and not done.out
    assert "give another --run-id, or end this run first: gpu-burst cancel cli/fit/one" in done.err
    shell("cancel", "cli/fit/one")
    done = shell("submit", "--name", "fit", "--run-id", "one", "--param", "x=1", *shell.trainer("time.sleep(60)"))
    assert done.code == 0 and "-g2 submitted" in done.out


def test_wait_prints_the_output_and_the_result(shell: Shell) -> None:
    body = "import os; print(ctx.params, os.environ['COLOUR'], sys.argv[1:]); ctx.result({'n': 1})"
    options = ("--wait", "--param", "depth=6", "--param", "name=six", "--env", "COLOUR=red=ish")
    done = shell("submit", *options, *shell.trainer(body), "--wait", "--conn=x")
    assert done.code == 0, done.err
    assert "{'depth': 6, 'name': 'six'} red=ish ['--wait', '--conn=x']" in done.out
    assert 'result {"n": 1}' in done.err


def test_wait_with_json_has_standard_output_to_itself_and_collects_a_finished_run(shell: Shell) -> None:
    command = ("submit", "--wait", "--name", "fit", "--run-id", "one", "-o", "json")
    first = shell(*command, *shell.trainer("print('hello'); ctx.result({'n': 1})"))
    assert first.data["result"] == {"n": 1} and "hello" in first.err
    again = shell(*command, "--", "python", "train.py")
    assert again.data["result"] == {"n": 1} and again.data["generation"] == 1


def test_wait_exits_with_the_runs_exit_code_and_the_next_submit_goes_on_from_the_checkpoint(shell: Shell) -> None:
    body = COUNTING.replace("time.sleep", "start or step < 2 or sys.exit(1); time.sleep")
    command = ("submit", "--wait", "--name", "fit", "--run-id", "one", "--param", "steps=3", *shell.trainer(body))
    failed = shell(*command)
    assert failed.code == 7 and "gpu-burst: gpu-cli-fit-" in failed.err and "-g1 failed" in failed.err
    assert "Traceback" not in failed.err
    closed = shell("status", "cli/fit/one").out
    assert "1 of 1, over" in closed and "FAILED for " in closed and "exited with 1" in closed
    done = shell(*command)
    assert done.code == 0 and "from 2" in done.out, done


def test_a_run_timeout_ends_the_run(shell: Shell) -> None:
    done = shell("submit", "--wait", "--run-timeout", "1s", *shell.trainer("time.sleep(60)"))
    # By whoever of the two comes first: this process or the runtime, which has the same limit.
    assert done.code == 7 and re.search("run_timeout is 1 s|run timeout of 1 s", done.err), done
    assert all(shell.route.observe(found.handle).terminal for found in shell.route.find())


def test_control_c_while_waiting_leaves_the_run_alone_and_says_how_to_go_on(shell: Shell) -> None:
    process = shell.spawn("submit", "--wait", *shell.trainer("print('up', flush=True); time.sleep(60)"))
    assert process.stdout is not None
    while "up" not in (line := process.stdout.readline()):
        assert line or process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    (found,) = shell.route.find()
    assert process.returncode == 130 and f"gpu-burst logs -f {found.handle.name}" in err and "Traceback" not in err
    assert not shell.route.observe(found.handle).terminal


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 2, "no command; e.g. gpu-burst submit -- python train.py"),
        (("--run-timeout", "soon", "--", "x"), 2, "'soon' is no duration; e.g. 90s, 30m"),
        (("--param", "x", "--", "x"), 2, "'x' is not name=value"),
        (("--gpus", "-1", "--", "x"), 2, "whole number"),
        (("--conn", "nowhere", "--", "x"), 3, "there is no connection 'nowhere'"),
        (("--store-conn", "nowhere", "--", "x"), 3, "airflow connections add nowhere --conn-type object_store"),
        (("--platform", "b200", "--", "x"), 3, "platform 'b200' is not known"),
        (("--platform", "b300", "--gpus", "12", "--", "x"), 3, "not a whole number of nodes"),
        (("--logs", "some", "--", "x"), 3, "use 'all', 'rank0', 'none'"),
        (("--input", "wafers=nowhere.json", "--", "x"), 3, "--input wafers: cannot read nowhere.json"),
        (("--input", "wafers=bad.json", "--", "x"), 3, "bad.json is no JSON"),
        (("--input", "wafers=empty.json", "--", "x"), 3, "not a pin: missing"),
        (("--name", "a/b", "--", "x"), 3, "a name has no '/'"),
        (("--manifest", "nowhere.yaml"), 3, "--manifest: cannot read nowhere.yaml"),
        (("--manifest", "job.yaml"), 3, "a manifest needs a cluster"),
    ],
)
def test_a_wrong_request_says_what_is_right(shell: Shell, options: tuple[str, ...], code: int, says: str) -> None:
    (shell.folder / "bad.json").write_text("{")
    (shell.folder / "empty.json").write_text("{}")
    (shell.folder / "job.yaml").write_text("apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\nspec: {}\n")
    done = shell("submit", *options)
    assert done.code == code and says in done.err and not done.out and "Traceback" not in done.err
    assert not list(shell.route.find())


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_of_running_finished_and_failed_runs(shell: Shell) -> None:
    assert "no runs at connection" in shell("status").out
    for run_id, body in (("bad", "sys.exit(1)"), ("good", "ctx.result({})"), ("long", COUNTING)):
        shell.submit(body, "--gpus", "2", "--param", "steps=1", run_id=run_id)
        shell.until_phase(f"cli/fit/{run_id}", {"bad": "FAILED", "good": "SUCCEEDED", "long": "SUCCEEDED"}[run_id])
    shell.submit(COUNTING, "--gpus", "2", "--param", "steps=1000", run_id="on")
    shell.until(lambda: bool(shell("status", "cli/fit/on", "-o", "json").data["last_checkpoint"]))
    rows = {row["run_key"]["run_id"]: row for row in shell("status", "-o", "json").data}
    phases = {run_id: row["phase"] for run_id, row in rows.items()}
    assert phases == {"bad": "FAILED", "good": "SUCCEEDED", "long": "SUCCEEDED", "on": "RUNNING"}
    assert list(rows) == ["on", "long", "good", "bad"], "newest first"
    table = shell("status").out
    assert table.splitlines()[0].split() == ["NAME", "PHASE", "AGE", "GPUS", "CHECKPOINT", "RUN"]
    assert f"{rows['on']['name']}  RUNNING" in table and "cli/fit/on" in table
    details = shell("status", rows["on"]["name"]).out
    assert "phase:       RUNNING for " in details and "checkpoint:  step " in details and "STARTING" in details
    assert "2 on 1 node, platform local" in details and f"{shell.site.store.uri}/runs/cli/fit/on-" in details
    failed = shell("status", "cli/fit/bad").out
    assert "FAILED" in failed and "exited with 1" in failed


def test_a_run_is_known_by_name_and_by_path_when_its_object_is_gone(shell: Shell) -> None:
    name = shell.submit("print('hello'); ctx.result({})")["name"]
    shell.until_phase(name, "SUCCEEDED")
    for path in (shell.folder / "work").rglob("job.json"):
        path.unlink()
    assert "no runs" in shell("status").out
    for run in (name, "cli/fit/one"):
        assert shell("status", run, "-o", "json").data["phase"] == "SUCCEEDED"
        assert "hello" in shell("logs", run).out


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (RunKey(dag_id="dag", task_id="train", run_id="with/slashes/7"), "dag/train/with/slashes/7"),
        (RunKey(dag_id="dag", task_id="train", run_id="r", map_index=3), "dag/train/r/3"),
        (RunKey(dag_id="dag", task_id="train", run_id="scheduled__2026-01-01T00:00:00+00:00 ü"), None),
    ],
)
def test_runs_of_dags_are_known_by_their_path(shell: Shell, key: RunKey, path: str | None) -> None:
    handle = runs.submit(shell.site, spec=RunSpec(command=SLEEP), run_key=key, max_tries=0, try_number=1)
    done = shell("status", path or path_of(key), "-o", "json")
    assert done.data["name"] == handle.name and done.data["run_key"] == key.to_dict()


def test_watch_prints_a_line_for_each_change_and_ends_with_the_run(shell: Shell) -> None:
    name = shell.submit("time.sleep(2); ctx.result({})")["name"]
    done = shell("status", "--watch", name)
    assert done.code == 0 and "RUNNING" in done.out and "SUCCEEDED" in done.out.splitlines()[-1]


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize("run", ["gpu-cli-fit-0123456789ab-g1", "cli/fit/never", "fit"])
def test_an_unknown_run_says_where_to_look(shell: Shell, verb: str, run: str) -> None:
    shell.submit("ctx.result({})")
    done = shell(verb, run)
    assert done.code == 3 and f"there is no run {run!r}" in done.err and "`gpu-burst status` lists" in done.err


def test_a_run_that_goes_on_elsewhere_is_not_taken_for_lost(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.submit("time.sleep(60)")
    extra = shell.connections["gpu_cluster_default"][1]
    for name, work in (("far", "elsewhere"), ("same", "work")):
        value = json.dumps({"conn_type": "gpu_cluster", "extra": {**extra, "work_dir": f"{shell.folder}/{work}"}})
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", value)
    for verb in ("status", "logs", "cancel"):
        done = shell(verb, "--conn", "far", "cli/fit/one")
        assert done.code == 3 and "Add --conn gpu_cluster_default" in done.err, done
    assert "ended; it was" in shell("cancel", "--conn", "same", "cli/fit/one").out


def test_a_run_of_another_store_says_which(shell: Shell) -> None:
    key = RunKey(dag_id="dag", task_id="train", run_id="r")
    other = shell.site_over("other")
    handle = runs.submit(other, spec=RunSpec(command=SLEEP), run_key=key, max_tries=0, try_number=1)
    done = shell("cancel", handle.name)
    assert done.code == 3 and f"is in store {other.store.uri}" in done.err and "--store-conn" in done.err
    assert "(another store)" in shell("status").out


# --- logs -----------------------------------------------------------------------------------------------------------

PRINTING = "for n in range(30): print(f'line {n}.', flush=True); time.sleep(0.1)\nctx.result({})"
LINES = [f"line {n}." for n in range(30)]


def of_trainer(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("line ")]


def test_logs_follow_to_the_end_and_are_whole_for_whoever_comes_later(shell: Shell) -> None:
    name = shell.submit(PRINTING)["name"]
    following = shell("logs", "-f", name)
    assert following.code == 0 and of_trainer(following.out) == LINES
    assert of_trainer(shell("logs", name).out) == of_trainer(shell("logs", "-f", name).out) == LINES
    assert shell("logs", "--tail", "1", name).out.count("\n") == 1


def test_logs_from_the_middle_go_on_where_the_tail_ended(shell: Shell) -> None:
    name = shell.submit(PRINTING)["name"]
    shell.until(lambda: len(of_trainer(shell("logs", name).out)) > 3)
    found = of_trainer(shell("logs", "-f", "--tail", "2", name).out)
    assert len(found) < 29 and found == LINES[-len(found) :]


def test_looking_on_does_not_move_the_place_of_who_waits(shell: Shell) -> None:
    handle = shell.submit(PRINTING)
    shell("logs", "-f", handle["name"])
    shell("status", "-w", handle["name"])
    key = RunKey.from_dict(handle["run_key"])
    assert not [entry for entry in shell.site.store.list(f"{key.prefix}/output/") if "cursor" in entry.key]


def test_logs_of_a_killed_run_have_what_it_could_not_spool(shell: Shell) -> None:
    name = shell.submit("print('line last.', flush=True); time.sleep(600)")["name"]
    (found,) = shell.route.find()
    shell.until_phase(name, "RUNNING")
    time.sleep(0.5)
    os.killpg(shell.pid(found.handle), signal.SIGKILL)
    shell.until(lambda: shell.route.observe(found.handle).terminal)
    assert "line last." in shell("logs", name).out


def test_a_closed_pipe_is_quiet(shell: Shell) -> None:
    name = shell.submit("for n in range(20000): print(f'line {n}.')\nctx.result({})")["name"]
    shell.until_phase(name, "SUCCEEDED")
    script = f"set -o pipefail; {sys.executable} -m airflow_gpu_burst.cli logs {name} | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 141 and done.stderr == "" and done.stdout.count("\n") == 1


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_twice(shell: Shell) -> None:
    handle = shell.submit("time.sleep(600)")
    shell.until_phase(handle["name"], "RUNNING")
    first, second = shell("cancel", handle["name"]), shell("cancel", handle["name"])
    assert first.code == second.code == 0
    assert f"{handle['name']} ended; it was RUNNING" in first.out
    assert "is over since" in second.out and "CANCELLED (cancelled from a shell)" in second.out
    (found,) = shell.route.find()
    assert shell.route.observe(found.handle).terminal
    history = RunLog(shell.site.store, found.handle.run_key.prefix).read()
    assert history.closes[1].verdict == "cancelled"
    assert shell("status", "-o", "json").data[0]["phase"] == "CANCELLED"


def test_cancel_of_what_has_ended_changes_nothing(shell: Shell) -> None:
    name = shell.submit("ctx.result({})")["name"]
    shell.until_phase(name, "SUCCEEDED")
    done = shell("cancel", name, "-o", "json")
    assert done.code == 0 and done.data["cancelled"] is False and done.data["phase"] == "SUCCEEDED"
    assert shell("status", name, "-o", "json").data["phase"] == "SUCCEEDED"


# --- connections ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def airflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Airflow with an empty database."""
    home = tmp_path_factory.mktemp("airflow")
    airflow = Path(sys.executable).parent / "airflow"
    env = {**os.environ, "AIRFLOW_HOME": str(home)}
    subprocess.run([airflow, "db", "migrate"], env=env, check=True, capture_output=True, timeout=110)
    return home


@pytest.fixture
def database(airflow_home: Path, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The database of an Airflow at `tmp_path`/home."""
    (tmp_path / "home").mkdir()
    with sqlite3.connect(airflow_home / "airflow.db") as migrated, sqlite3.connect(tmp_path / "home/airflow.db") as own:
        migrated.backup(own)
    yield own
    own.close()
    migrated.close()


def insert(database: sqlite3.Connection, table: str, **values: Any) -> None:
    """A row; columns that must have a value and were given none get some."""
    for _, name, kind, required, default, _ in database.execute(f"PRAGMA table_info({table})"):
        if required and default is None and name not in values and not (name == "id" and kind == "INTEGER"):
            stamp = kind in ("TIMESTAMP", "DATETIME")
            values[name] = _stamp(0) if stamp else 0 if kind in ("INTEGER", "BOOLEAN", "FLOAT") else ""
    columns, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
    database.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))
    database.commit()


def _stamp(ago_s: float) -> str:
    return f"{datetime.now(UTC) - timedelta(seconds=ago_s):%Y-%m-%d %H:%M:%S.%f}"


def test_connections_in_the_environment_need_no_database(shell: Shell) -> None:
    done = shell.apart("status", AIRFLOW_HOME=f"{shell.folder}/nothing", _AIRFLOW_PROCESS_CONTEXT="server")
    assert done.code == 0 and done.out.startswith("no runs at connection"), done


def test_connections_in_the_database_are_found_from_a_plain_shell(
    shell: Shell, database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for conn_id, (conn_type, extra) in shell.connections.items():
        insert(
            database, "connection", conn_id=f"db_{conn_id}", conn_type=conn_type, is_encrypted=0, is_extra_encrypted=0,
            extra=json.dumps(extra if conn_type == "object_store" else {**extra, "store_conn_id": "db_store"}),
        )  # fmt: skip
    # As in a shell: nothing that this process has set for itself.
    for name in ("_AIRFLOW_PROCESS_CONTEXT", "AIRFLOW__LOGGING__LOGGING_LEVEL", "AIRFLOW_CONN_STORE"):
        monkeypatch.delenv(name)
    arguments = ("submit", "--conn", "db_gpu_cluster_default", "-o", "json", *shell.trainer("ctx.result({})"))
    done = shell.apart(*arguments, AIRFLOW_HOME=f"{shell.folder}/home")
    assert done.code == 0 and done.data["store_connection"] == "db_store", done
    assert not done.err, "Airflow's own words are not for whoever uses this"


def test_without_airflow_it_says_what_to_install() -> None:
    program = """
import sys
from importlib import metadata
def version(name): raise metadata.PackageNotFoundError(name)
metadata.version = version
from airflow_gpu_burst.cli import main
sys.exit(main(["status"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("gpu-burst: Airflow is not installed here")
    assert "pip install 'airflow-gpu-burst[airflow]'" in done.stderr


@pytest.mark.parametrize("command", ["run", "submit", "status", "logs", "cancel", "gc", "bundle"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and "exit codes: 0 ok" in capsys.readouterr().out


def test_bundle_into_a_folder_that_is_not_empty_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    assert main(["bundle", str(tmp_path)]) == 3
    assert "is not empty" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- gc -------------------------------------------------------------------------------------------------------------


class Dag:
    """Runs of a DAG's tasks, all asleep, and what Airflow's database says of them."""

    def __init__(self, shell: Shell, database: sqlite3.Connection) -> None:
        self._shell, self._database = shell, database
        insert(database, "dag_run", dag_id="dag", run_id="r", state="running", run_type="manual")

    def run(self, task_id: str, state: str = "", ago_s: float = 3600, **other: Any) -> Handle:
        key = replace(RunKey(dag_id="dag", task_id=task_id, run_id="r"), **other)
        if state:
            stamps = {"end_date": _stamp(ago_s), "updated_at": _stamp(ago_s)}
            insert(
                self._database, "task_instance", id=uuid.uuid4().hex, task_id=task_id, dag_id=key.dag_id,
                run_id=key.run_id, map_index=key.map_index, state=state, try_number=1, max_tries=1, **stamps,
            )  # fmt: skip
        return self.submit(self._shell.site, key)

    @staticmethod
    def submit(site: Site, key: RunKey) -> Handle:
        return runs.submit(site, spec=RunSpec(command=SLEEP), run_key=key, max_tries=1, try_number=1)


def test_gc_ends_what_nobody_waits_for_and_leaves_the_rest(shell: Shell, database: sqlite3.Connection) -> None:
    dag = Dag(shell, database)

    def log(handle: Handle) -> RunLog:
        return RunLog(shell.site.store, handle.run_key.prefix)

    ends = {
        "closed": dag.run("closed", "running"),
        "superseded": dag.run("superseded", "running"),
        "failed": dag.run("failed", "failed"),
        "mapped": dag.run("mapped", "success", map_index=3),
        "removed": dag.run("removed"),
    }
    stays = {
        "running": dag.run("running", "running"),
        "deferred": dag.run("deferred", "deferred"),
        "retried": dag.run("retried", "up_for_retry"),
        "just_failed": dag.run("just_failed", "failed", ago_s=60),
        "no_dag_run": dag.run("no_dag_run", run_id="other"),
        "from_a_shell": dag.run("from_a_shell", dag_id="cli"),
        "no_log": dag.run("no_log", "failed"),
        "other_store": dag.submit(shell.site_over("other"), RunKey(dag_id="dag", task_id="other", run_id="r")),
    }
    shell.close(ends["closed"])
    shell.close(ends["superseded"])
    settle_generation(log(ends["superseded"]), spec_digest="x", max_tries=1, try_number=2)
    shell.stop(stays["no_log"])  # it would notice
    for entry in list(shell.site.store.list(f"{stays['no_log'].run_key.prefix}/log/")):
        shell.site.store.delete(entry.key)
    home = {"AIRFLOW_HOME": f"{shell.folder}/home"}

    older = shell.apart("gc", "--older-than", "1h", "-o", "json", **home)
    assert {row["action"] for row in older.data} == {"leave", "foreign"}
    dry = shell.apart("gc", "--dry-run", **home)
    assert dry.code == 0 and dry.out.count("would end  ") == 5, dry
    assert not any(shell.route.observe(handle).terminal for handle in (ends | stays).values())

    done = shell.apart("gc", "-o", "json", **home)
    assert done.code == 0, done
    rows = {row["name"]: row for row in done.data}
    actions = {what: rows[handle.name]["action"] for what, handle in (ends | stays).items()}
    assert {what for what, action in actions.items() if action == "end"} == {"closed", "superseded"}
    assert {what for what, action in actions.items() if action == "cancel"} == {"failed", "mapped", "removed"}
    assert actions["other_store"] == "foreign"
    assert {what for what, action in actions.items() if action == "leave"} == set(stays) - {"other_store"}
    for what, handle in ends.items():
        assert shell.route.observe(handle).terminal, what
        assert 1 in log(handle).read().closes
    for what, handle in stays.items():
        assert not shell.route.observe(handle).terminal, what
    assert "gpu-burst gc: its task is failed" in log(ends["failed"]).read().closes[1].reason
    assert "generation 2 took over" in rows[ends["superseded"].name]["reason"]
    assert "no such DAG run" in rows[stays["from_a_shell"].name]["reason"]

    again = shell.apart("gc", **home)
    assert "0 ended, 7 left alone, 5 over already, 1 of another store" in again.out, again


def test_gc_without_a_database_ends_only_what_the_log_has_closed(shell: Shell) -> None:
    handles = [Dag.submit(shell.site, RunKey(dag_id="dag", task_id=name, run_id="r")) for name in ("open", "closed")]
    shell.close(handles[1])
    done = shell.apart("gc", AIRFLOW_HOME=f"{shell.folder}/nothing")
    assert done.code == 0 and "cannot ask Airflow's database" in done.out and "1 ended, 1 left alone" in done.out, done
    assert [shell.route.observe(handle).terminal for handle in handles] == [False, True]


@pytest.mark.parametrize(
    ("task", "alone"),
    [
        (tasks.Task(known=True, exists=True, state="failed", ended_s=301), True),
        (tasks.Task(known=True, exists=True, state="failed", ended_s=299), False),
        (tasks.Task(known=True, exists=True, state="failed"), False),
        (tasks.Task(known=True, exists=True, state="", ended_s=9999), False),
        (tasks.Task(known=True), True),
        (tasks.Task(known=False), False),
        (tasks.Task(known=False, trouble="no such table"), False),
        *((tasks.Task(known=True, exists=True, state=state, ended_s=9999), True) for state in tasks.FINAL),
        *(
            (tasks.Task(known=True, exists=True, state=state, ended_s=9999), False)
            for state in ("running", "deferred", "queued", "scheduled", "up_for_retry", "restarting")
        ),
    ],
)
def test_who_waits(task: tasks.Task, alone: bool) -> None:
    assert tasks.nobody_waits(task)[0] is alone


# --- words ----------------------------------------------------------------------------------------------------------

IDS = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1)


@given(IDS, IDS, st.text(st.characters(codec="utf-8"), min_size=1), st.integers(-1, 9999))
def test_a_path_means_the_run_that_it_was_made_of(dag_id: str, task_id: str, run_id: str, map_index: int) -> None:
    key = RunKey(dag_id=dag_id, task_id=task_id, run_id=run_id, map_index=map_index)
    assert key in keys_of(path_of(key))


@pytest.mark.parametrize("text", ["", "a", "a/b", "a/b/", "/b/c", "a//c"])
def test_what_is_no_path(text: str) -> None:
    assert keys_of(text) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("7d", 604800), ("none", None)]
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "value"), [("a=1", 1), ("a=x", "x"), ("a=", ""), ("a=[1]", [1]), ("a=b=c", "b=c"), ("a=1e3", 1000.0)]
)
def test_params_are_json_or_text(text: str, value: Any) -> None:
    assert param(text) == ("a", value)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90000, "1d1h")]
)
def test_ages(seconds: float, text: str) -> None:
    assert ago(seconds) == text
