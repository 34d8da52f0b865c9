"""Findings: joined, ranked, and the same after a trip through JSON and Arrow."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rca import features, findings, model
from rca.commonality import analyse
from rca.findings import Finding
from rca.synthetic import make_fab

NOW = datetime(2026, 1, 24, 6, 0, 0, 123456, tzinfo=UTC)
ORIGIN: dict[str, Any] = {
    "run_key": "yield_rca/train/manual/-1",
    "table": "fab.wafers",
    "snapshot_id": "8744736658442914487",
    "synthetic": True,
    "created_at": NOW,
}
SENSOR = Finding(
    rank=1,
    factor="etch_power",
    step="etch",
    kind="sensor",
    verdict="not_tested",
    shap_mean_abs=0.5,
    same_lots_as=(),
    **dict.fromkeys(findings.UNTESTED),
    **ORIGIN,
)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    frame = make_fab(7).frame
    matrix = features.build(frame)
    booster = model.train(matrix, matrix.target, rounds=20, every=20)
    return findings.combine(analyse(frame), model.attribute(booster, matrix), **ORIGIN)


def test_the_planted_chamber_is_rank_one_in_both_analyses(found: list[Finding]) -> None:
    first = found[0]
    assert (first.rank, first.factor, first.verdict) == (1, "ETCH-03/B", "suspect")
    assert first.shap_mean_abs == max(f.shap_mean_abs for f in found if f.shap_mean_abs is not None)
    assert first.shap_exposed is not None and first.shap_exposed < -3


def test_ranks_count_up_and_sensors_come_last_by_contribution(found: list[Finding]) -> None:
    assert [finding.rank for finding in found] == list(range(1, len(found) + 1))
    kinds = [finding.kind for finding in found]
    assert kinds.index("sensor") == len(found) - 12
    sensors = [f.shap_mean_abs or 0.0 for f in found if f.kind == "sensor"]
    assert sensors == sorted(sensors, reverse=True)
    assert {f.verdict for f in found if f.kind == "sensor"} == {"not_tested"}
    assert not any(f.factor.startswith("SYN-P") for f in found)  # products are no suspects


def test_findings_without_a_model_have_no_contributions() -> None:
    rows = findings.combine(analyse(make_fab(7).frame), [], **ORIGIN)
    assert {row.shap_mean_abs for row in rows} == {None}


def test_json_round_trip_is_exact(found: list[Finding]) -> None:
    assert findings.from_json(findings.to_json(found)) == found


@given(q=numbers, effect=numbers, name=st.text(), twins=st.lists(st.text(), max_size=3))
def test_any_finding_survives_json_and_arrow(
    q: float | None, effect: float | None, name: str, twins: list[str]
) -> None:
    finding = replace(SENSOR, q=q, effect_points=effect, factor=name, same_lots_as=tuple(twins))
    text = findings.to_json([finding])
    assert findings.from_json(text) == [finding]
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    try:
        name.encode(), "".join(twins).encode()
    except UnicodeEncodeError:
        return  # lone surrogates: JSON escapes them, Arrow's UTF-8 rightly does not take them
    assert findings.to_table([finding]).to_pylist() == findings.to_rows([finding])


def test_the_arrow_schema_has_the_fields_of_a_finding_and_the_right_nulls(found: list[Finding]) -> None:
    schema = findings.schema()
    assert schema.names == [field.name for field in fields(Finding)]
    assert schema.field("snapshot_id").type == pa.string()
    assert schema.field("created_at").type == pa.timestamp("us", tz="UTC")
    assert not schema.field("factor").nullable
    assert schema.field("q").nullable
    table = findings.to_table(found)
    assert table.schema == schema
    assert table.num_rows == len(found)
    assert table["created_at"][0].as_py() == NOW


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="use None"):
        replace(SENSOR, q=value)


def test_a_snapshot_id_is_a_string_and_a_time_has_a_zone() -> None:
    with pytest.raises(TypeError, match="snapshot_id"):
        replace(SENSOR, snapshot_id=8744736658442914487)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="time zone"):
        replace(SENSOR, created_at=datetime(2026, 1, 1))  # noqa: DTZ001
    elsewhere = replace(SENSOR, created_at=NOW.astimezone(timezone(timedelta(hours=9))))
    assert elsewhere == SENSOR
    assert elsewhere.created_at.tzinfo is UTC
