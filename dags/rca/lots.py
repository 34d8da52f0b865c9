"""
From wafers to lots: a lot's yield, which lots are bad, which lots went through a factor.

The lot is the unit of the commonality test: wafers of a lot share most of their history, so counting them as
independent would turn one unlucky lot into twenty-five pieces of evidence.

**A bad lot** is one in the lowest quarter of product-adjusted lot yield. A quantile, not "median − k·MAD":
the test takes the number of bad lots as given anyway, a quantile never leaves one side empty in a calm month,
and it needs no assumption on scale. The price is that a quarter of the lots is called bad even when all are
fine; the test is then right to find nothing.

**Product-adjusted**: a product's median over its lots is subtracted, or a low-yield product would blame the
tools that are dedicated to it. Products with fewer than four lots are compared with the median of all lots:
with one lot, the median would be that very lot, and it could never be bad.

**A lot went through a factor** if at least half of its wafers did (`EXPOSED_SHARE`). "Any wafer" would expose
almost every lot to every chamber of a tool that spreads wafers over its chambers.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rca.wafers import Factor, factors

BAD_FRACTION = 0.25
EXPOSED_SHARE = 0.5
MIN_LOTS_PER_PRODUCT = 4


def low(values: NDArray[np.float64], fraction: float = BAD_FRACTION) -> NDArray[np.bool_]:
    """Which values lie strictly below the `fraction` quantile; none does where all are equal."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction must be between 0 and 1, not {fraction}")
    return np.asarray(values < np.quantile(values, fraction), dtype=np.bool_)


def lot_table(frame: pd.DataFrame, bad_fraction: float = BAD_FRACTION) -> pd.DataFrame:
    """
    One row per lot, sorted by lot id (the index).

    Columns: `product`, `lot_start`, `wafers`, `yield_pct` (mean), `adjusted` (yield points from the product's
    median), `bad`.
    """
    lots = frame.groupby("lot", sort=True).agg(
        product=("product", "first"),
        lot_start=("lot_start", "first"),
        wafers=("wafer", "size"),
        yield_pct=("yield_pct", "mean"),
    )
    by_product = lots.groupby("product")["yield_pct"]
    enough = by_product.transform("size") >= MIN_LOTS_PER_PRODUCT
    level = by_product.transform("median").where(enough, lots["yield_pct"].median())
    lots["adjusted"] = lots["yield_pct"] - level
    # Rounded: two lots of equal yield must not differ by the order in which their wafers were added up.
    lots["bad"] = low(lots["adjusted"].to_numpy(dtype=float).round(9), bad_fraction)
    return lots


def exposures(frame: pd.DataFrame, share: float = EXPOSED_SHARE) -> tuple[list[Factor], NDArray[np.bool_]]:
    """
    Which lots went through which factor: the factors, and a matrix of shape (lots, factors).

    Lots are in the order of `lot_table`. The share is taken over all wafers of the lot, including those that
    skipped the step.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    lot, names = pd.factorize(frame["lot"], sort=True)
    wafers = np.bincount(lot, minlength=len(names))
    found = factors(frame)
    exposed = np.zeros((len(names), len(found)), dtype=np.bool_)
    columns = {name: frame[name].to_numpy(dtype=object) for name in {factor.column for factor in found}}
    for index, factor in enumerate(found):
        through = np.bincount(lot[columns[factor.column] == factor.name], minlength=len(names))
        exposed[:, index] = through >= share * wafers
    return found, exposed
