"""The wafer table: what counts as a step, a factor, a sensor; which tables are refused; lots made of wafers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rca import lots, wafers
from rca.synthetic import make_fab


def table(**changes: list[object]) -> pd.DataFrame:
    columns: dict[str, list[object]] = {
        "lot": ["A", "A", "B", "B"],
        "wafer": [1, 2, 1, 2],
        "product": ["P", "P", "P", "P"],
        "lot_start": [pd.Timestamp("2026-01-01", tz="UTC")] * 4,
        "etch_tool": ["E1", "E1", "E2", None],
        "etch_chamber": ["E1/A", "E1/B", "E2/A", None],
        "etch_power_mean_w": [1.0, 2.0, None, 4.0],
        "yield_pct": [90.0, 80.0, 70.0, 60.0],
    }
    return pd.DataFrame({**columns, **changes})


def test_steps_factors_and_sensors_come_from_column_names() -> None:
    frame = table()
    assert wafers.steps(frame) == ["etch"]
    assert [factor.key for factor in wafers.factors(frame)] == [
        "etch_tool=E1",
        "etch_tool=E2",
        "etch_chamber=E1/A",
        "etch_chamber=E1/B",
        "etch_chamber=E2/A",
    ]
    assert wafers.sensors(frame) == [("etch", "etch_power_mean_w")]


def test_a_sensor_belongs_to_the_step_with_the_longest_name() -> None:
    frame = table(etch_poly_tool=["X"] * 4, etch_poly_power=[1.0] * 4)
    assert ("etch_poly", "etch_poly_power") in wafers.sensors(frame)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (table().drop(columns="product"), "columns missing: product"),
        (table().drop(columns="etch_tool"), "no step"),
        (table().iloc[:0], "no wafer"),
        (table(yield_pct=[1.0, np.nan, 101.0, 2.0]), "in 2 rows"),
        (table(wafer=[1, 1, 1, 2]), "appears twice"),
        (table(product=["P", "Q", "P", "P"]), "more than one product"),
    ],
)
def test_what_is_no_wafer_table_is_refused(frame: pd.DataFrame, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wafers.check(frame)


def test_a_good_table_passes_and_is_not_synthetic() -> None:
    wafers.check(table())
    assert not wafers.is_synthetic(table())
    assert wafers.is_synthetic(table(synthetic=[False, False, True, False]))


def test_a_lot_is_exposed_from_half_of_its_wafers_on_skipped_ones_included() -> None:
    factors, exposed = lots.exposures(table())
    assert dict(zip([f.name for f in factors], exposed.T.tolist(), strict=True)) == {
        "E1": [True, False],
        "E2": [False, True],
        "E1/A": [True, False],
        "E1/B": [True, False],
        "E2/A": [False, True],
    }
    _, strict = lots.exposures(table(), share=0.51)
    assert strict.sum() == 1  # only E1, which ran both wafers of lot A


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_low_marks_at_most_the_fraction_and_only_values_below_all_others(values: list[float]) -> None:
    marked = lots.low(np.array(values), 0.25)
    assert marked.sum() <= np.ceil(0.25 * len(values))
    if marked.any():
        assert np.array(values)[marked].max() < np.array(values)[~marked].min()


def test_equal_yields_are_all_good() -> None:
    assert not lots.low(np.full(8, 90.0)).any()


def test_products_are_compared_with_themselves_unless_they_are_few() -> None:
    frame = pd.DataFrame(
        {
            "lot": [f"L{i}" for i in range(9)],
            "wafer": 1,
            "product": ["P"] * 4 + ["Q"] * 4 + ["R"],
            "lot_start": pd.Timestamp("2026-01-01", tz="UTC"),
            "yield_pct": [90.0, 91.0, 92.0, 93.0, 50.0, 51.0, 52.0, 53.0, 40.0],
        }
    )
    adjusted = lots.lot_table(frame)["adjusted"].tolist()
    # R has one lot: its own median would call it perfect. The median of all nine lots is 53.
    assert adjusted == [-1.5, -0.5, 0.5, 1.5, -1.5, -0.5, 0.5, 1.5, -13.0]


def test_synthetic_fab_is_the_same_for_a_seed_and_says_what_it_is() -> None:
    first, again, other = make_fab(3), make_fab(3), make_fab(4)
    pd.testing.assert_frame_equal(first.frame, again.frame)
    assert not first.frame["yield_pct"].equals(other.frame["yield_pct"])
    wafers.check(first.frame)
    assert first.frame["synthetic"].all()
    assert first.frame["lot"].str.startswith("SYN-").all()
    assert len(first.frame) == 60 * 12


def test_planted_cause_costs_what_it_says_and_moves_its_sensor() -> None:
    fab = make_fab(1, lots=400, effect_points=8.0)
    assert fab.planted is not None
    hit = fab.frame["etch_chamber"] == fab.planted.chamber
    product = fab.frame.groupby("product")["yield_pct"].transform("median")
    loss = (fab.frame["yield_pct"] - product)[hit].mean() - (fab.frame["yield_pct"] - product)[~hit].mean()
    assert loss == pytest.approx(-8.0, abs=0.8)
    sensor = fab.frame[fab.planted.sensor]
    assert sensor[hit].mean() > sensor[~hit].mean() + 1.5 * sensor[~hit].std()


def test_no_cause_plants_nothing_and_an_unknown_one_is_refused() -> None:
    assert make_fab(1, cause=None).planted is None
    with pytest.raises(ValueError, match="ETCH-03/B"):
        make_fab(1, cause="ETCH-99/Z")


def test_lots_stay_on_one_tool_per_step() -> None:
    frame = make_fab(2).frame
    tools = [f"{step}_tool" for step in wafers.steps(frame)]
    assert (frame.groupby("lot")[tools].nunique() == 1).all(axis=None)
    assert frame.groupby("lot")["etch_chamber"].nunique().max() == 1
    assert frame.groupby("lot")["depo_chamber"].nunique().max() == 2
