"""PinSnapshotOperator and LakeHook, with a connection from the environment and no Airflow database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from pyiceberg import exceptions as ice

from airflow_gpu_burst.errors import CatalogUnavailable, SpecError
from airflow_gpu_burst.hooks.lake import LakeHook
from airflow_gpu_burst.lake import pins, read
from airflow_gpu_burst.operators.pin import PinSnapshotOperator
from airflow_gpu_burst.provider_info import get_provider_info
from airflow_gpu_burst.spec import TablePin
from tests import lake_fixtures
from tests.lake_fixtures import WAFERS, Faults, Lake, refused, wafers

lake = lake_fixtures.lake
faults = lake_fixtures.faults

Connect = Callable[..., None]


@pytest.fixture
def connect(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """The lake as the default connection."""

    def connect(conn_id: str = "iceberg_lake_default", **other: Any) -> None:
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps({**lake.connection(), **other}))

    connect()
    return connect


def context(run_id: str = "manual__2026-01-01T00:00:00+00:00") -> dict[str, Any]:
    ti = SimpleNamespace(dag_id="yield", task_id="pin", run_id=run_id, map_index=-1, try_number=1)
    return {"ti": ti}


def operator(**fields: Any) -> PinSnapshotOperator:
    return PinSnapshotOperator(**{"task_id": "pin", "table": WAFERS, **fields})


class TestOperator:
    def test_returns_a_pin_that_survives_xcom(
        self, lake: Lake, connect: Connect, capsys: pytest.CaptureFixture[str]
    ) -> None:
        head = lake.append(wafers(1, 2))
        found = operator().execute(context())
        assert found["snapshot_id"] == head
        assert found["catalog"] == "iceberg_lake_default"
        pin = TablePin.from_dict(json.loads(json.dumps(found), parse_int=float) | {"schema_id": 0})
        assert read.table(LakeHook().config(), pin).num_rows == 2
        lines = [line for line in capsys.readouterr().out.splitlines() if "Pinned" in line]
        assert len(lines) == 1
        assert head in lines[0]

    def test_a_retry_returns_the_same(self, lake: Lake, connect: Connect) -> None:
        lake.append(wafers(1))
        first = operator().execute(context())
        lake.append(wafers(2))
        again = context()
        again["ti"].try_number = 2
        assert operator().execute(again) == first
        assert operator().execute(context("manual run 2 ü"))["snapshot_id"] == lake.head()

    @pytest.mark.parametrize("empty", [None, "", " ", "None", "null"])
    def test_an_empty_field_is_not_given(self, lake: Lake, connect: Connect, empty: str | None) -> None:
        lake.append(wafers(1))
        head = lake.append(wafers(2))
        task = operator(snapshot_id=empty, ref=empty, as_of=empty)
        assert task.execute(context())["snapshot_id"] == head

    def test_an_id_as_text_or_as_int(self, lake: Lake, connect: Connect) -> None:
        first = lake.append(wafers(1))
        lake.append(wafers(2))
        assert operator(snapshot_id=first).execute(context("a"))["snapshot_id"] == first
        assert operator(snapshot_id=int(first)).execute(context("b"))["snapshot_id"] == first

    def test_as_of_the_way_templates_render_it(self, lake: Lake, connect: Connect) -> None:
        head = lake.append(wafers(1))
        at = str(datetime.now(UTC) + timedelta(seconds=1))  # {{ data_interval_end }} renders like this
        assert operator(as_of=at).execute(context())["snapshot_id"] == head

    def test_retention(self, lake: Lake, connect: Connect) -> None:
        lake.append(wafers(1))
        found = operator(retention=timedelta(days=3)).execute(context("a"))
        ahead = datetime.fromisoformat(found["expires_at"]) - datetime.now(UTC)
        assert timedelta(days=2, hours=23) < ahead <= timedelta(days=3)
        assert operator(retention=None).execute(context("b"))["expires_at"] == ""

    def test_every_argument_that_may_differ_per_run_is_a_template(self) -> None:
        assert set(PinSnapshotOperator.template_fields) == {
            "table",
            "lake_conn_id",
            "snapshot_id",
            "ref",
            "as_of",
        }

    def test_two_literals_fail_when_the_dag_is_parsed(self) -> None:
        with pytest.raises(SpecError, match="task 'pin': snapshot_id and ref are both given. Give one"):
            operator(snapshot_id="1", ref="main")
        with pytest.raises(SpecError, match="ref and as_of"):
            operator(ref="main", as_of=datetime.now(UTC))
        operator(snapshot_id="{{ params.snapshot_id }}", ref="main")  # may render to nothing
        operator(snapshot_id="", ref="main")

    def test_what_no_retry_mends_spends_none(self, lake: Lake, connect: Connect) -> None:
        lake.append(wafers(1))
        with pytest.raises(AirflowFailException, match="SnapshotGone: .*no snapshot 4711") as caught:
            operator(snapshot_id="4711").execute(context())
        assert caught.value.__cause__ is not None

    def test_what_a_retry_may_mend_is_left_to_airflow(
        self, lake: Lake, connect: Connect, faults: Faults, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lake.append(wafers(1))
        monkeypatch.setattr(pins, "ATTEMPTS", 1)
        faults.play(refused(ice.ServiceUnavailableError("503")))
        with pytest.raises(CatalogUnavailable):
            operator().execute(context())

    def test_import_is_light(self) -> None:
        """A scheduler parses many DAGs, and a triggerer has little memory."""
        code = (
            "import sys, airflow_gpu_burst.operators.pin\n"
            "print(sorted(m for m in sys.modules if m in ('pyiceberg', 'pyarrow', 'pandas')))"
        )
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert answer.stdout.splitlines()[-1] == "[]"


class TestHook:
    def test_names_are_those_of_the_form(self) -> None:
        name = f"{LakeHook.__module__}.{LakeHook.__qualname__}"
        entries = get_provider_info()["connection-types"]
        entry = next(entry for entry in entries if entry["hook-class-name"] == name)
        assert (LakeHook.conn_type, LakeHook.hook_name) == (entry["connection-type"], entry["hook-name"])

    def test_a_connection_becomes_a_config(self, connect: Connect) -> None:
        connect("fab", host="https://polaris/api/catalog", login="me", password="hush-hush", extra={})
        found = LakeHook("fab").config()
        assert found.name == "fab"
        assert found.properties["uri"] == "https://polaris/api/catalog"
        assert found.secrets == {"credential": "me:hush-hush"}

    def test_the_test_button(self, lake: Lake, connect: Connect) -> None:
        assert LakeHook().test_connection() == (True, "The catalog answers; it shows 0 namespaces")
        lake.append(wafers(1))
        assert LakeHook().test_connection() == (True, "The catalog answers; it shows 1 namespace")
        connect(host="sqlite:////no/such/folder/c.db", extra={"type": "sql"}, login="", password="")
        worked, text = LakeHook().test_connection()
        assert not worked
        assert "Check the connection's uri" in text
        connect(extra={"warehous": "x"})
        assert LakeHook().test_connection()[1].startswith("connection 'iceberg_lake_default': unknown extra")

    def test_no_such_connection_tells_how_to_create_it(self) -> None:
        with pytest.raises(SpecError, match="(?s)airflow connections add nowhere.*AIRFLOW_CONN_NOWHERE"):
            LakeHook("nowhere").config()
        assert LakeHook("nowhere").test_connection()[0] is False
