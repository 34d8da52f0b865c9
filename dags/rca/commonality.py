"""
Commonality: which tool or chamber do the bad lots have in common?

For each factor the lots fall into a 2x2 table (a lot is bad or not, went through the factor or not; both are
defined in `rca.lots`), and three numbers are taken from it:

* **p**: Fisher's exact test, one-sided for an excess of bad lots. One-sided because only that can be a cause
  to act on; a chamber with fewer bad lots than others is the same fact seen from the other side.
* **odds ratio** with the Haldane-Anscombe correction, 0.5 added to each cell, always: it stays finite when a
  cell is empty, and the correction does not switch on and off between neighbouring factors. The interval is
  Woolf's on the same cells: exp(log OR ± 1.96 · sqrt(Σ 1/cell)).
  Haldane (1956), Ann. Hum. Genet. 20, 309; Anscombe (1956), Biometrika 43, 461; Woolf (1955), Ann. Hum.
  Genet. 19, 251.
* **effect**: mean adjusted yield of the exposed lots minus that of the others, in yield points; a loss is
  negative.

Fifty factors at p < 0.05 give two or three false alarms, so the verdict uses **q**, Benjamini-Hochberg over
all factors tested (Benjamini & Hochberg (1995), J. R. Stat. Soc. B 57, 289). It holds under the positive
dependence that a tool and its chambers have.

A factor with fewer than three lots on either side is *inconclusive*: it stays in the answer, without p and q,
because "could not be tested" is not "fine". It is left out of the family; who is left out depends on where
lots went, not on how they did, so that q stays valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import hypergeom

from rca.lots import BAD_FRACTION, EXPOSED_SHARE, exposures, lot_table
from rca.wafers import Factor, Kind, check

ALPHA = 0.05
MIN_LOTS = 3
Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution

# suspect: q below alpha. explained: the same, but its excess vanishes without the lots of a better suspect.
Verdict = Literal["suspect", "explained", "not_significant", "inconclusive"]


@dataclass(frozen=True)
class OddsRatio:
    """Odds ratio with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class CommonalityRow:
    """What the lots say about one factor. p and q are None exactly when the verdict is inconclusive."""

    factor: str
    step: str
    kind: Kind
    key: str
    lots_exposed: int
    lots_bad_exposed: int
    lots_other: int
    lots_bad_other: int
    odds_ratio: float
    odds_low: float
    odds_high: float
    p: float | None
    q: float | None
    effect_points: float | None  # None if one side is empty
    verdict: Verdict
    explained_by: str | None  # key of the better suspect
    same_lots_as: tuple[str, ...]  # keys of factors that no lot tells apart from this one


def odds_ratio(bad_exposed: int, good_exposed: int, bad_other: int, good_other: int) -> OddsRatio:
    """Odds ratio of a 2x2 table of counts, 0.5 added to each cell, with Woolf's 95 % interval."""
    a, b, c, d = (count + 0.5 for count in (bad_exposed, good_exposed, bad_other, good_other))
    log = math.log(a * d / (b * c))
    half = Z_95 * math.sqrt(1 / a + 1 / b + 1 / c + 1 / d)
    return OddsRatio(math.exp(log), math.exp(log - half), math.exp(log + half))


def fisher_excess(bad_exposed: int, good_exposed: int, bad_other: int, good_other: int) -> float:
    """Fisher's exact p for an excess of bad lots among the exposed: P(that many or more), margins fixed."""
    exposed = bad_exposed + good_exposed
    bad = bad_exposed + bad_other
    total = exposed + bad_other + good_other
    return min(1.0, float(hypergeom.sf(bad_exposed - 1, total, bad, exposed)))


def benjamini_hochberg(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """q of each p: the smallest false discovery rate at which it would still be called."""
    m = len(p)
    order = np.argsort(p)
    scaled = p[order] * m / np.arange(1, m + 1)
    q = np.empty(m)
    # From the largest p down, so that a larger p never has a smaller q.
    q[order] = np.minimum.accumulate(scaled[::-1])[::-1]
    return q


def analyse(
    frame: pd.DataFrame,
    *,
    bad_fraction: float = BAD_FRACTION,
    exposed_share: float = EXPOSED_SHARE,
    min_lots: int = MIN_LOTS,
    alpha: float = ALPHA,
) -> list[CommonalityRow]:
    """Test every tool and chamber of a wafer table; best first, the same order for the same lots."""
    check(frame)
    lots = lot_table(frame, bad_fraction)
    bad = lots["bad"].to_numpy(dtype=np.bool_)
    adjusted = lots["adjusted"].to_numpy(dtype=float)
    factors, exposed = exposures(frame, exposed_share)
    testable = _testable(exposed, min_lots)
    p = np.array([_excess(bad, column) for column in exposed.T])
    q = np.full(len(factors), np.nan)
    q[testable] = benjamini_hochberg(p[testable])
    effect = [_effect(adjusted, column) for column in exposed.T]

    def strength(index: int) -> tuple[bool, float, float, bool, Factor]:
        # Among equals the chamber goes before its tool: it is the more precise thing to look at.
        factor = factors[index]
        return (not testable[index], p[index], effect[index] or 0.0, factor.kind != "chamber", factor)

    order = sorted(range(len(factors)), key=strength)
    suspects = [i for i in order if testable[i] and q[i] < alpha and (effect[i] or 0.0) < 0]
    causes = _explain(suspects, exposed, bad, min_lots, alpha)
    rows = []
    for index in order:
        column = exposed[:, index]
        counts = _counts(bad, column)
        odds = odds_ratio(*counts)
        explained_by = causes.get(index)
        twins = np.flatnonzero((exposed == column[:, None]).all(axis=0))
        rows.append(
            CommonalityRow(
                factor=factors[index].name,
                step=factors[index].step,
                kind=factors[index].kind,
                key=factors[index].key,
                lots_exposed=counts[0] + counts[1],
                lots_bad_exposed=counts[0],
                lots_other=counts[2] + counts[3],
                lots_bad_other=counts[2],
                odds_ratio=odds.value,
                odds_low=odds.low,
                odds_high=odds.high,
                p=float(p[index]) if testable[index] else None,
                q=float(q[index]) if testable[index] else None,
                effect_points=effect[index],
                verdict=_verdict(bool(testable[index]), index in suspects, explained_by is not None),
                explained_by=None if explained_by is None else factors[explained_by].key,
                same_lots_as=tuple(factors[twin].key for twin in twins if twin != index),
            )
        )
    return rows


def _verdict(testable: bool, suspect: bool, explained: bool) -> Verdict:
    if not testable:
        return "inconclusive"
    if not suspect:
        return "not_significant"
    return "explained" if explained else "suspect"


def _testable(exposed: NDArray[np.bool_], min_lots: int) -> NDArray[np.bool_]:
    through = exposed.sum(axis=0)
    return np.asarray((through >= min_lots) & (len(exposed) - through >= min_lots))


def _counts(bad: NDArray[np.bool_], exposed: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """The 2x2 table: bad and good lots among the exposed, bad and good lots among the others."""
    return (
        int((bad & exposed).sum()),
        int((~bad & exposed).sum()),
        int((bad & ~exposed).sum()),
        int((~bad & ~exposed).sum()),
    )


def _excess(bad: NDArray[np.bool_], exposed: NDArray[np.bool_]) -> float:
    return fisher_excess(*_counts(bad, exposed))


def _effect(adjusted: NDArray[np.float64], exposed: NDArray[np.bool_]) -> float | None:
    if exposed.all() or not exposed.any():
        return None
    return float(adjusted[exposed].mean() - adjusted[~exposed].mean())


def _explain(
    suspects: list[int],
    exposed: NDArray[np.bool_],
    bad: NDArray[np.bool_],
    min_lots: int,
    alpha: float,
) -> dict[int, int]:
    """
    Suspects that a better one accounts for: {suspect: the better one}.

    A bad chamber makes its whole tool look bad. A suspect is tested again on the lots that did not go through
    a better suspect; if nothing is left of its excess, or too few lots to say, the better one explains it.
    """
    explained: dict[int, int] = {}
    causes: list[int] = []
    for suspect in suspects:
        for cause in causes:
            rest = ~exposed[:, cause]
            left = exposed[rest, suspect]
            enough = min_lots <= left.sum() <= len(left) - min_lots
            if not enough or _excess(bad[rest], left) >= alpha:
                explained[suspect] = cause
                break
        else:
            causes.append(suspect)
    return explained
