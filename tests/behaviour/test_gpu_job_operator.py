"""GpuJobOperator over the local route: what a DAG author sees, above all when something is wrong."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_burst.errors import GpuBurstError, RunFailed, StoreUnavailable
from airflow_gpu_burst.lake.catalog import CatalogConfig, opened
from airflow_gpu_burst.lake.write import write_once
from airflow_gpu_burst.operators.gpu_job import GpuJobOperator
from airflow_gpu_burst.operators.pin import PinSnapshotOperator
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.triggers.gpu_job import GpuJobTrigger

TABLE = "fab.wafers"
HELLO = "from airflow_gpu_burst.runtime import context\nctx = context()\n"


class Airflow:
    """Connections in the environment, and contexts as a worker gives them."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self._monkeypatch = home, monkeypatch
        self.lake = CatalogConfig(
            name="lake",
            properties={"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": f"file://{home}"},
        )
        self.connect("gpu", "gpu_cluster", route="local", work_dir=f"{home}/work", store_conn_id="store", grace_s=2)
        self.connect("store", "object_store", uri=f"file://{home}/store")
        self.connect("lake", "iceberg_lake", **self.lake.properties)

    def connect(self, conn_id: str, conn_type: str, **extra: Any) -> None:
        value = json.dumps({"conn_type": conn_type, "extra": extra})
        self._monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", value)

    def context(self, task_id: str = "train", try_number: int = 1, max_tries: int = 1, **other: Any) -> dict[str, Any]:
        pushed: dict[str, Any] = {}
        ti = SimpleNamespace(
            dag_id="dag", task_id=task_id, run_id="manual ü 1", map_index=-1, try_number=try_number,
            max_tries=max_tries, xcom_push=pushed.__setitem__, pushed=pushed,
        )  # fmt: skip
        ti.xcom_push = lambda key, value: pushed.update({key: value})
        return {"ti": SimpleNamespace(**{**vars(ti), **other})}

    def job(self, body: str = "", **values: Any) -> GpuJobOperator:
        fields: dict[str, Any] = {
            "task_id": "train",
            "command": [sys.executable, "-c", HELLO + body],
            "gpu_conn_id": "gpu",
            "deferrable": False,
            "poll_interval": 0.05,
        }
        return GpuJobOperator(**{**fields, **values})

    def pin(self) -> dict[str, Any]:
        rows = pa.table({"lot": ["A", "B"], "n": [1, 2]})
        write_once(self.lake, TABLE, rows, RunKey(dag_id="d", task_id="t", run_id="r"))
        found: dict[str, Any] = PinSnapshotOperator(task_id="pin", table=TABLE, lake_conn_id="lake").execute(
            self.context("pin")
        )
        return found


@pytest.fixture
def airflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Airflow]:
    (tmp_path / "store").mkdir()
    yield Airflow(tmp_path, monkeypatch)


def test_returns_the_result_and_pushes_the_link_before_the_end(airflow: Airflow) -> None:
    airflow.connect(
        "store", "object_store", uri=f"file://{airflow.home}/store", console_url="https://console.internal/browser/b/"
    )
    context = airflow.context()
    found = airflow.job("ctx.result({'rank': ctx.rank})").execute(context)
    assert found["result"] == {"rank": 0} and found["run_key"]["run_id"] == "manual ü 1"
    link = context["ti"].pushed["_link_RunInStoreLink"]
    assert link.startswith("https://console.internal/browser/b/runs/dag/train/")


def test_the_trainer_reads_the_rows_at_the_pin(airflow: Airflow) -> None:
    pin = airflow.pin()
    with opened(airflow.lake) as catalog:
        catalog.load_table(TABLE).append(pa.table({"lot": ["C"], "n": [100]}))
    body = "ctx.result({'sum': sum(ctx.inputs['wafers'].table()['n'].to_pylist())})"
    assert airflow.job(body, inputs={"wafers": pin}).execute(airflow.context())["result"] == {"sum": 3}


def test_deferrable_waits_in_a_trigger_whose_arguments_hold_no_secret(airflow: Airflow) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    airflow._monkeypatch.setenv(
        "AIRFLOW_CONN_STORE",
        json.dumps({"conn_type": "object_store", "login": "key", "password": "hunter2",
                    "extra": {"uri": f"file://{airflow.home}/store"}}),
    )  # fmt: skip
    with pytest.raises(TaskDeferred) as caught:
        airflow.job("ctx.result({})", deferrable=True).execute(airflow.context())
    trigger = caught.value.trigger
    assert isinstance(trigger, GpuJobTrigger)
    path, arguments = trigger.serialize()
    assert path == "airflow_gpu_burst.triggers.gpu_job.GpuJobTrigger"
    assert "hunter2" not in json.dumps(arguments)
    assert GpuJobTrigger(**json.loads(json.dumps(arguments))).serialize() == trigger.serialize()


def fails(airflow: Airflow, operator: GpuJobOperator, says: str, **context: Any) -> None:
    """At once, without spending retries, and with that advice."""
    with pytest.raises(AirflowFailException, match=says) as caught:
        operator.execute(airflow.context(**context))
    assert isinstance(caught.value.__cause__, GpuBurstError), "the cause is chained"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"gpu_conn_id": "nowhere"},
            "no connection 'nowhere'. Look for a typo.*airflow connections add nowhere --conn-type gpu",
        ),
        ({"store_conn_id": "nowhere"}, "airflow connections add nowhere --conn-type object_store"),
        ({"gpus": 12, "platform": "b300"}, "gpus=12 is not a whole number of nodes.*gpus=8 .1 node. or gpus=16"),
        ({"gpus": "12"}, "gpus=12 is not a whole number of nodes"),
        ({"gpus": "many"}, "not a whole number"),
        ({"platform": "b200"}, "platform 'b200' is not known; there are"),
        ({"inputs": {"wafers": None}}, "not a pin. Pass the output of a PinSnapshotOperator"),
        ({"inputs": {"wafers": "fab.wafers"}}, "not a pin"),
        ({"command": "python train.py"}, "list of arguments"),
        ({"checkpoints": 1}, "at least 2"),
        ({"env": {"GPU_BURST_RANK": "1"}}, "choose another"),
    ],
)
def test_a_wrong_request_fails_at_once_and_says_what_is_right(
    airflow: Airflow, fields: dict[str, Any], says: str
) -> None:
    fails(airflow, airflow.job(**fields), says)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"route": "teleport", "store_conn_id": "store"}, "route 'teleport' of connection 'gpu' is not available"),
        ({"route": "local", "grace_s": "soon"}, "grace_s=.soon. is not a number"),
    ],
)
def test_a_wrong_connection_says_which_extra(airflow: Airflow, extra: dict[str, Any], says: str) -> None:
    airflow.connect("gpu", "gpu_cluster", **extra)
    fails(airflow, airflow.job(), says)


def test_a_store_connection_without_a_place_says_what_to_add(airflow: Airflow) -> None:
    airflow.connect("store", "aws")
    fails(airflow, airflow.job(), "add to its extra")


def expire(airflow: Airflow, pin: dict[str, Any]) -> None:
    """Somebody removes the tag, and maintenance the snapshot."""
    with opened(airflow.lake) as catalog:
        table = catalog.load_table(TABLE)
        table.append(pa.table({"lot": ["C"], "n": [3]}))
        table.manage_snapshots().remove_tag(pin["ref"]).commit()
        table.maintenance.expire_snapshots().by_id(int(pin["snapshot_id"])).commit()


def drop(airflow: Airflow, pin: dict[str, Any]) -> None:
    with opened(airflow.lake) as catalog:
        catalog.drop_table(TABLE)


def recreate(airflow: Airflow, pin: dict[str, Any]) -> None:
    drop(airflow, pin)
    with opened(airflow.lake) as catalog:
        rows = pa.table({"lot": ["A", "B"], "n": [1, 2]})
        catalog.create_table(TABLE, schema=rows.schema).append(rows)


@pytest.mark.parametrize(
    ("happens", "says"),
    [(expire, "SnapshotGone"), (recreate, "TableReplaced"), (drop, "CatalogError")],
)
def test_pinned_data_that_is_gone_is_found_before_training_and_not_retried(
    airflow: Airflow, happens: Callable[[Airflow, dict[str, Any]], None], says: str
) -> None:
    pin = airflow.pin()
    happens(airflow, pin)
    fails(airflow, airflow.job("print('trained')", inputs={"wafers": pin}), says)


def test_a_failed_run_is_retried_and_the_error_has_its_last_lines(airflow: Airflow) -> None:
    with pytest.raises(RunFailed, match=r"exited with 1(.|\n)*the reason"):
        airflow.job("print('the reason'); raise SystemExit(1)").execute(airflow.context())
    found = airflow.job("print('the reason'); raise SystemExit(1)")
    with pytest.raises(RunFailed, match="-g2 failed"):
        found.execute(airflow.context(try_number=2))


def test_another_request_under_the_same_run_is_refused(airflow: Airflow) -> None:
    airflow.job("ctx.result({})").execute(airflow.context())
    fails(airflow, airflow.job("ctx.result({'other': 1})"), "Clear the task.*What differs: command", try_number=2)


def test_a_worker_that_is_told_to_end_leaves_the_run_alone(airflow: Airflow) -> None:
    job = airflow.job("import time; time.sleep(2); ctx.result({'done': 1})")
    job.on_kill()
    states = {"manual ü 1": {"train": "running"}}
    with pytest.raises(GpuBurstError, match="goes on, and the next try finds it"):
        job.execute(airflow.context(get_task_states=lambda **_: states))
    again = airflow.job("import time; time.sleep(2); ctx.result({'done': 1})")
    assert again.execute(airflow.context(try_number=2))["generation"] == 1


@pytest.mark.parametrize("state", ["failed", "success", None])
def test_a_worker_whose_task_was_marked_or_cleared_ends_the_run(airflow: Airflow, state: str | None) -> None:
    job = airflow.job("import time; time.sleep(60)")
    job.on_kill()
    states = {"manual ü 1": {"train": state}}
    with pytest.raises(GpuBurstError, match="was cancelled"):
        job.execute(airflow.context(get_task_states=lambda **_: states))


def test_a_full_store_fails_the_run_and_says_to_make_room(airflow: Airflow) -> None:
    """A file size limit stands in for a full disk: writes fail half way, with the same kind of error."""
    body = (
        "import os, pathlib, resource; open(ctx.model_dir / 'w', 'wb').write(b'x' * 3_000_000)\n"
        "tasks = pathlib.Path(f'/proc/{os.getppid()}/task').iterdir()\n"
        "agents = {int(pid) for task in tasks for pid in (task / 'children').read_text().split()} - {os.getpid()}\n"
        "for pid in {os.getppid(), *agents}: resource.prlimit(pid, resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
    )
    job = airflow.job(body, publish="model")
    with pytest.raises((AirflowFailException, RunFailed), match="StoreFull|space"):
        job.execute(airflow.context())


def test_a_result_too_large_for_xcom_stays_in_the_store(airflow: Airflow) -> None:
    found = airflow.job("ctx.result({'big': 'x' * 100_000})").execute(airflow.context())
    assert found["result"] is None
    stored = json.loads((airflow.home / "store" / found["result_key"]).read_text())
    assert len(stored["big"]) == 100_000


class Answering(BaseHTTPRequestHandler):
    """An S3 server that gives every request the same status."""

    status = 503

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code = {403: "AccessDenied", 503: "SlowDown"}[self.status]
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.mark.parametrize(("status", "error"), [(403, AirflowFailException), (503, StoreUnavailable)])
def test_a_store_that_refuses_or_is_down(airflow: Airflow, status: int, error: type[Exception]) -> None:
    """Refused: no retry mends it. Down: the next try may."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answering,), {"status": status}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        extra = {"uri": "s3://bucket/p", "endpoint_url": f"http://127.0.0.1:{server.server_port}", "region": "r"}
        connection = {"conn_type": "object_store", "login": "k", "password": "s", "extra": extra}
        airflow._monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps(connection))
        with pytest.raises(error, match="bucket|permission|allow|again|503|store"):
            airflow.job().execute(airflow.context())
    finally:
        server.shutdown()
        server.server_close()
