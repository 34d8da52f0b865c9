"""The model matrix keeps its columns; the booster resumes exactly; contributions point at the planted chamber."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rca import features, model
from rca.features import ModelMatrix
from rca.synthetic import make_fab

ROUNDS = 40


@pytest.fixture(scope="module")
def matrix() -> ModelMatrix:
    return features.build(make_fab(7).frame)


def test_every_one_hot_group_adds_up_to_one(matrix: ModelMatrix) -> None:
    groups: dict[str, list[int]] = {}
    for index, feature in enumerate(matrix.features):
        if feature.kind != "sensor":
            groups.setdefault(feature.key.split("=")[0], []).append(index)
    assert len(groups) == 13  # product, and six steps with tool and chamber
    for columns in groups.values():
        assert (matrix.values[:, columns].sum(axis=1) == 1).all()


def test_names_lead_back_to_factors(matrix: ModelMatrix) -> None:
    found = {feature.key: feature for feature in matrix.features}
    assert found["etch_chamber=ETCH-03/B"].factor == "ETCH-03/B"
    assert found["etch_chamber=ETCH-03/B"].step == "etch"
    assert found["etch_pressure_mean_mtorr"].kind == "sensor"
    assert len(set(matrix.names)) == len(matrix.names) == matrix.values.shape[1]
    assert matrix.values.dtype == np.float32
    assert 0.2 < matrix.low.mean() <= 0.25


def test_columns_do_not_depend_on_the_order_of_rows() -> None:
    frame = make_fab(1, lots=20, wafers_per_lot=3).frame
    shuffled = frame.sample(frac=1.0, random_state=0)
    one, other = features.build(frame), features.build(shuffled)
    assert one.features == other.features
    order = shuffled.index.to_numpy()
    assert (one.values[order] == other.values).all()


def test_a_skipped_step_is_no_tool_and_a_missing_sensor_stays_missing() -> None:
    frame = make_fab(1, lots=20, wafers_per_lot=3).frame
    frame.loc[0, ["etch_tool", "etch_chamber"]] = None
    frame.loc[0, "etch_rf_power_mean_w"] = None
    built = features.build(frame)
    etch = [i for i, f in enumerate(built.features) if f.step == "etch" and f.kind != "sensor"]
    assert built.values[0, etch].sum() == 0
    assert np.isnan(built.values[0, built.names.index("etch_rf_power_mean_w")])
    model.train(built, built.target, rounds=2, every=2)


@settings(max_examples=10, deadline=None)
@given(stop=st.integers(1, ROUNDS - 1), every=st.integers(1, ROUNDS))
def test_stopping_and_resuming_gives_the_same_bytes(stop: int, every: int) -> None:
    built = features.build(make_fab(7).frame)
    straight = model.train(built, built.target, rounds=ROUNDS, every=ROUNDS)
    half = model.to_bytes(model.train(built, built.target, rounds=stop, every=every))
    resumed = model.train(built, built.target, rounds=ROUNDS, every=every, resume_from=half)
    assert model.to_bytes(resumed) == model.to_bytes(straight)
    assert (model.predict(resumed, built) == model.predict(straight, built)).all()


def test_checkpoints_come_at_each_multiple_and_at_the_end(matrix: ModelMatrix) -> None:
    seen: list[tuple[int, bytes]] = []
    booster = model.train(
        matrix, matrix.target, rounds=11, every=4, on_checkpoint=lambda done, kept: seen.append((done, kept))
    )
    assert [done for done, _ in seen] == [4, 8, 11]
    assert seen[-1][1] == model.to_bytes(booster)
    again: list[int] = []
    model.train(
        matrix,
        matrix.target,
        rounds=11,
        every=4,
        resume_from=seen[1][1],
        on_checkpoint=lambda done, _: again.append(done),
    )
    assert again == [11]


def test_a_finished_model_is_not_trained_further(matrix: ModelMatrix) -> None:
    done = model.to_bytes(model.train(matrix, matrix.target, rounds=5, every=5))
    assert model.to_bytes(model.train(matrix, matrix.target, rounds=5, every=5, resume_from=done)) == done


def test_a_checkpoint_of_other_columns_is_refused(matrix: ModelMatrix) -> None:
    other = features.build(make_fab(7).frame.drop(columns=["clean_chamber"]))
    kept = model.to_bytes(model.train(other, other.target, rounds=2, every=2))
    with pytest.raises(ValueError, match="other columns"):
        model.train(matrix, matrix.target, rounds=4, every=2, resume_from=kept)


@pytest.mark.parametrize(("rounds", "every"), [(0, 1), (1, 0)])
def test_nothing_to_do_is_refused(matrix: ModelMatrix, rounds: int, every: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        model.train(matrix, matrix.target, rounds=rounds, every=every)


def test_contributions_add_up_to_the_prediction_and_find_the_chamber(matrix: ModelMatrix) -> None:
    booster = model.from_bytes(model.to_bytes(model.train(matrix, matrix.target, rounds=ROUNDS, every=ROUNDS)))
    values = model.contributions(booster, matrix)
    assert values.shape == (len(matrix.target), len(matrix.features) + 1)
    assert values.sum(axis=1) == pytest.approx(model.predict(booster, matrix), abs=1e-3)
    suspects = [row for row in model.attribute(booster, matrix) if row.kind != "product"]
    assert suspects[0].factor == "ETCH-03/B"
    assert suspects[0].mean_exposed is not None and suspects[0].mean_exposed < -3


def test_names_that_xgboost_refuses_are_carried(matrix: ModelMatrix) -> None:
    frame = make_fab(1, lots=20, wafers_per_lot=3).frame
    frame["etch_tool"] = frame["etch_tool"].replace({"ETCH-01": "E[1]<%", "ETCH-02": "E%5B1]<%"})
    built = features.build(frame)
    booster = model.train(built, built.target, rounds=2, every=2)
    assert {row.factor for row in model.attribute(booster, built)} >= {"E[1]<%", "E%5B1]<%"}


def test_device_is_the_cpu_without_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.xgb, "build_info", lambda: {"USE_CUDA": False})
    monkeypatch.setattr(model, "_gpus", lambda: 1)
    assert model.device() == "cpu"


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (2, "cuda")])
def test_device_with_a_cuda_build(monkeypatch: pytest.MonkeyPatch, gpus: int, expected: str) -> None:
    monkeypatch.setattr(model.xgb, "build_info", lambda: {"USE_CUDA": True})
    monkeypatch.setattr(model, "_gpus", lambda: gpus)
    assert model.device() == expected


def test_pandas_types_from_arrow_make_the_same_matrix() -> None:
    import pyarrow as pa

    frame = make_fab(1, lots=20, wafers_per_lot=3).frame
    back: pd.DataFrame = pa.Table.from_pandas(frame, preserve_index=False).to_pandas()
    objects = frame.astype({"etch_tool": object, "etch_chamber": object, "product": object})
    for other in (back, objects):
        assert features.build(other).features == features.build(frame).features
        assert (features.build(other).values == features.build(frame).values).all()
