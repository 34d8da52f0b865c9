"""PinRequest: what can be asked for, checked when it is built."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.lake.pins import PinRequest, tag_name
from airflow_gpu_burst.state import RunKey


def request(**fields: Any) -> PinRequest:
    return PinRequest(**{"table": "fab.wafers", **fields})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"table": "wafers"}, "give namespace and name"),
        ({"snapshot_id": "1", "ref": "main"}, "snapshot_id and ref are both given.*give one"),
        ({"ref": "main", "as_of": "2026-01-01T00:00:00Z"}, "ref and as_of are both given"),
        ({"snapshot_id": "4e18"}, "digits as text"),
        ({"snapshot_id": 4.0e18}, "digits as text"),
        ({"snapshot_id": True}, "digits as text"),
        ({"snapshot_id": ""}, "digits as text"),
        ({"ref": " "}, "name of a tag or a branch"),
        ({"as_of": "yesterday"}, "is no time.*e.g. '2026"),
        ({"as_of": "2026-01-01"}, "no time zone.*data_interval_end"),
        ({"as_of": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001 (the point of the test)
        ({"retention_s": 0}, "at least 1 second, or None"),
        ({"retention_s": -1}, "at least 1 second"),
        ({"retention_s": float("nan")}, "at least 1 second"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        request(**fields)


@pytest.mark.parametrize(
    "text", ["2026-01-31T12:00:00Z", "2026-01-31 12:00:00+00:00", "2026-01-31T21:00:00+09:00", " 20260131T120000Z "]
)
def test_times_are_instants(text: str) -> None:
    assert request(as_of=text).as_of == datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_datetimes_of_any_zone() -> None:
    tokyo = timezone(timedelta(hours=9))
    assert request(as_of=datetime(2026, 1, 31, 21, tzinfo=tokyo)).as_of == datetime(2026, 1, 31, 12, tzinfo=UTC)


@given(st.integers(-(2**63), 2**63 - 1))
def test_ids_are_exact_text(number: int) -> None:
    assert request(snapshot_id=number).snapshot_id == str(number)
    assert request(snapshot_id=f" {number} ").snapshot_id == str(number)


def test_tag_names_do_not_collide_where_separators_move() -> None:
    keys = [
        RunKey(dag_id="a", task_id="b_c", run_id="r"),
        RunKey(dag_id="a_b", task_id="c", run_id="r"),
        RunKey(dag_id="a", task_id="b", run_id="c_r"),
        RunKey(dag_id="a", task_id="b_c", run_id="r", map_index=0),
    ]
    names = {tag_name(key, table) for key in keys for table in ("x.y", "x.z")}
    assert len(names) == 8


def test_tag_names_never_change() -> None:
    """A rename would orphan the pins of every run that is under way."""
    key = RunKey(dag_id="yield", task_id="pin", run_id="scheduled__2026-01-01T00:00:00+00:00")
    assert tag_name(key, "fab.wafers") == "pin-5bff9cd5de4b883a"
