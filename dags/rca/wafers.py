"""
The wafer table: one row per wafer, and the naming rule that tells its columns apart.

| column              | type            | meaning                                                       |
|---------------------|-----------------|---------------------------------------------------------------|
| `lot`               | string          | lot id; wafers of a lot travel together                       |
| `wafer`             | integer         | slot in the lot, from 1                                       |
| `product`           | string          | products have different yields; lots are compared within one  |
| `lot_start`         | timestamp       | when the lot started; one value per lot                       |
| `<step>_tool`       | string, or null | the tool that ran the step; null if the wafer skipped it      |
| `<step>_chamber`    | string, or null | the chamber inside that tool                                  |
| `<step>_<sensor>`   | float, or null  | summary of a trace, in the tool's own unit                    |
| `yield_pct`         | float           | good dies in percent, 0 to 100                                |
| `synthetic`         | boolean         | optional; true where the row was made up                      |

Steps are not listed anywhere: a step is whatever has a `_tool` column. Every other module asks this one, so
that a new step in the table needs no change in the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

Kind = Literal["tool", "chamber"]

REQUIRED = ("lot", "wafer", "product", "lot_start", "yield_pct")
KINDS: tuple[Kind, ...] = ("tool", "chamber")


@dataclass(frozen=True, order=True)
class Factor:
    """One tool or chamber at one step. The same tool at two steps is two factors."""

    step: str
    kind: Kind
    name: str

    @property
    def column(self) -> str:
        """The wafer table's column that holds this factor's name."""
        return f"{self.step}_{self.kind}"

    @property
    def key(self) -> str:
        """Unique name, e.g. `etch_chamber=ETCH-03/B`; also the name of the model's feature."""
        return f"{self.column}={self.name}"


def check(frame: pd.DataFrame) -> None:
    """Raise `ValueError` with every way in which `frame` is not a wafer table."""
    problems = []
    missing = [column for column in REQUIRED if column not in frame]
    if missing:
        problems.append(f"columns missing: {', '.join(missing)}")
    if not steps(frame):
        problems.append("no step: there is no column named <step>_tool")
    if frame.empty:
        problems.append("no wafer: the table has no row")
    if "yield_pct" in frame:
        values = frame["yield_pct"].to_numpy(dtype=float, na_value=np.nan)
        wrong = int((~((values >= 0) & (values <= 100))).sum())
        if wrong:
            problems.append(f"yield_pct is not between 0 and 100 in {wrong} rows: drop wafers not yet probed")
    if not missing:
        if frame.duplicated(["lot", "wafer"]).any():
            problems.append("a wafer (lot, wafer) appears twice")
        if (frame.groupby("lot")[["product", "lot_start"]].nunique() > 1).any(axis=None):
            problems.append("a lot has more than one product or lot_start")
    if problems:
        raise ValueError("not a wafer table: " + "; ".join(problems))


def steps(frame: pd.DataFrame) -> list[str]:
    """Names of the steps, in the order of their `_tool` columns."""
    return [str(column).removesuffix("_tool") for column in frame if str(column).endswith("_tool")]


def factors(frame: pd.DataFrame) -> list[Factor]:
    """Every tool and chamber that a wafer went through: by step, tools first, then by name."""
    return [
        Factor(step, kind, str(name))
        for step in steps(frame)
        for kind in KINDS
        if f"{step}_{kind}" in frame
        for name in sorted(frame[f"{step}_{kind}"].dropna().unique())
    ]


def sensors(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """`(step, column)` of every sensor summary: numeric columns named after a step, in table order."""
    found = []
    # The longest step name wins, so that `etch_poly_power` belongs to a step `etch_poly`, not to `etch`.
    by_length = sorted(steps(frame), key=len, reverse=True)
    for column in map(str, frame.columns):
        step = next((step for step in by_length if column.startswith(f"{step}_")), None)
        if step is not None and pd.api.types.is_float_dtype(frame[column]):
            found.append((step, column))
    return found


def is_synthetic(frame: pd.DataFrame) -> bool:
    """True if any row says that it was made up: a mixture counts as synthetic."""
    return "synthetic" in frame and bool(frame["synthetic"].any())
