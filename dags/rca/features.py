"""
Wafer table -> model matrix, with the way back from each column to the factor it stands for.

Columns, in this order, the same for the same set of names whatever the order of the rows:

1. `product=<name>` one-hot: products differ in yield, and the trees must be able to say so, or they would put
   it on whatever tool the product is dedicated to;
2. `<step>_tool=<name>` and `<step>_chamber=<name>` one-hot, all of them (trees need no reference level, and
   leaving one out would leave one factor without an answer);
3. sensor summaries as they are; missing values stay NaN, which the trees handle themselves.

The target is yield in percent, not a low/high label: contributions then come in yield points, the unit that
the fab argues in. The label is there too (`low`), for whoever wants to train a classifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rca.lots import BAD_FRACTION, low
from rca.wafers import check, factors, sensors


@dataclass(frozen=True)
class Feature:
    """One column of the matrix. `factor` is what a person calls it: ETCH-03/B, or the sensor's column."""

    key: str
    factor: str
    step: str  # empty for a product
    kind: Literal["product", "tool", "chamber", "sensor"]


@dataclass(frozen=True)
class ModelMatrix:
    """Model input: `values` of shape (wafers, features), `target` in percent and `low`, both (wafers,)."""

    values: NDArray[np.float32]
    target: NDArray[np.float32]
    low: NDArray[np.bool_]
    features: tuple[Feature, ...]

    @property
    def names(self) -> list[str]:
        """The features' keys, in column order."""
        return [feature.key for feature in self.features]


def build(frame: pd.DataFrame, bad_fraction: float = BAD_FRACTION) -> ModelMatrix:
    """Turn a wafer table into a model matrix; row i of the matrix is row i of the table."""
    check(frame)
    features: list[Feature] = []
    columns: list[NDArray[np.float32]] = []
    for name in sorted(frame["product"].dropna().unique()):
        features.append(Feature(f"product={name}", str(name), "", "product"))
        columns.append(_one_hot(frame["product"], str(name)))
    for factor in factors(frame):
        features.append(Feature(factor.key, factor.name, factor.step, factor.kind))
        columns.append(_one_hot(frame[factor.column], factor.name))
    for step, column in sensors(frame):
        features.append(Feature(column, column, step, "sensor"))
        columns.append(frame[column].to_numpy(dtype=np.float32, na_value=np.nan))
    target = frame["yield_pct"].to_numpy(dtype=np.float64)
    return ModelMatrix(
        values=np.column_stack(columns),
        target=target.astype(np.float32),
        low=low(target, bad_fraction),
        features=tuple(features),
    )


def _one_hot(column: pd.Series[str], name: str) -> NDArray[np.float32]:
    # As objects: a null compares unequal there, while pandas' own string type would answer null.
    return np.asarray(column.to_numpy(dtype=object) == name, dtype=np.float32)
