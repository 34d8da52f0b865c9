"""
The report's five plots as inline SVG. Each takes data and returns one `<svg>` element.

All share a width, so that they align in a grid and keep a readable text size on a phone. What a plot singles
out is drawn as diamonds in the `hot` colour, the rest as circles in `cool`: shape and colour say the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from rca.findings import Finding
from rca.lots import exposures, lot_table
from rca.svg import CHARACTER, Canvas, Scale, decades, nice_ticks, shorten
from rca.variance import VarianceSplit
from rca.wording import THIN_SPACE, points, probability, ratio, superscript

WIDTH = 460.0
ROW = 26.0
TALLEST_ROW = 56.0  # few rows of many dots
MAX_ROWS = 10
# Leaves over half of the width to the data; longer names are cut, the table has the whole name.
LABEL_LIMIT = 190.0


def forest(findings: Sequence[Finding]) -> str:
    """Odds ratios with their 95 % intervals on a log scale, the best `MAX_ROWS` that were tested."""
    rows = [f for f in findings if f.q is not None][:MAX_ROWS]
    left = _label_width([row.factor for row in rows])
    right = 112.0
    bottom = 30 + ROW * len(rows)
    canvas = Canvas(WIDTH, bottom + 40, "Odds ratios with 95 % intervals, log scale")
    ticks = decades(min(r.odds_low or 1.0 for r in rows), max(r.odds_high or 1.0 for r in rows))
    scale = Scale(ticks[0], ticks[-1], left, WIDTH - right, log=True)
    canvas.x_axis(scale, [(tick, _plain(tick)) for tick in ticks], 22, bottom)
    canvas.line(scale(1.0), 22, scale(1.0), bottom, "reference")
    canvas.text(WIDTH - 58, 14, "ratio", "tick", "end")
    canvas.text(WIDTH, 14, "q", "tick", "end")
    for index, row in enumerate(rows):
        y = 30 + ROW * (index + 0.5)
        hot = row.verdict == "suspect"
        css = "hot" if hot else "cool"
        canvas.text(left - 10, y + 4, shorten(row.factor, left - 10), "strong" if hot else "", "end")
        canvas.line(scale(row.odds_low or 1.0), y, scale(row.odds_high or 1.0), y, f"{css} whisker")
        canvas.dot(scale(row.odds_ratio or 1.0), y, css, diamond=hot)
        canvas.text(WIDTH - 58, y + 4, ratio(row.odds_ratio), "number", "end")
        canvas.text(WIDTH, y + 4, probability(row.q), "number", "end")
    canvas.text((left + WIDTH - right) / 2, bottom + 36, "odds of a bad lot, times", "axis", "middle")
    return canvas.svg()


def by_factor(frame: pd.DataFrame, top: Finding) -> str:
    """Lots' yield by chamber (or tool) of the top finding's step: a dot per lot, a bar at the median."""
    lots = lot_table(frame)
    factors, exposed = exposures(frame)
    chosen = [i for i, f in enumerate(factors) if f.step == top.step and f.kind == top.kind]
    own = [i for i in chosen if factors[i].name == top.factor]
    chosen = sorted(own + [i for i in chosen if i not in own][: MAX_ROWS - 1])
    left = _label_width([factors[i].name for i in chosen])
    row = min(MAX_ROWS * ROW / len(chosen), TALLEST_ROW)
    bottom = 10 + row * len(chosen)
    canvas = Canvas(WIDTH, bottom + 40, f"Lot yield by {top.kind} at step {top.step}")
    values = lots["adjusted"].to_numpy(dtype=float)
    ticks = nice_ticks(float(values.min()), float(values.max()))
    scale = Scale(ticks[0], ticks[-1], left, WIDTH - 14)
    canvas.x_axis(scale, [(tick, _signed(tick)) for tick in ticks], 6, bottom)
    canvas.line(scale(0.0), 6, scale(0.0), bottom, "reference")
    for index, column in enumerate(chosen):
        y = 10 + row * (index + 0.5)
        name = factors[column].name
        hot = name == top.factor
        canvas.text(left - 10, y + 4, shorten(name, left - 10), "strong" if hot else "", "end")
        through = np.flatnonzero(exposed[:, column])
        for order, lot in enumerate(through.tolist()):
            # Three heights in turn keep lots of equal yield apart, the same way in each rendering.
            tip = f"{lots.index[lot]}: {points(values[lot])}"
            canvas.dot(scale(values[lot]), y + 0.14 * row * (order % 3 - 1), "hot" if hot else "cool", tip, diamond=hot)
        if len(through):
            middle = scale(float(np.median(values[through])))
            canvas.line(middle, y - 0.34 * row, middle, y + 0.34 * row, "median")
    label = "lot yield, points from the product's median"
    canvas.text((left + WIDTH - 14) / 2, bottom + 36, label, "axis", "middle")
    return canvas.svg()


def over_time(frame: pd.DataFrame, top: Finding) -> str:
    """Lots' yield over their start time; lots that went through the top finding's factor stand out."""
    lots = lot_table(frame)
    factors, exposed = exposures(frame)
    column = next(i for i, f in enumerate(factors) if (f.step, f.kind, f.name) == (top.step, top.kind, top.factor))
    through = exposed[:, column]
    values = lots["adjusted"].to_numpy(dtype=float)
    starts = np.array([pd.Timestamp(start).timestamp() for start in lots["lot_start"]])
    height, left, bottom = 310.0, 44.0, 266.0
    canvas = Canvas(WIDTH, height, f"Lot yield over time, lots through {top.factor} highlighted")
    ticks = nice_ticks(float(values.min()), float(values.max()))
    y = Scale(ticks[0], ticks[-1], bottom, 12)
    days = _day_ticks(float(starts.min()), float(starts.max()))
    x = Scale(float(starts.min()), max(float(starts.max()), float(starts.min()) + 1), left + 8, WIDTH - 14)
    for tick in ticks:
        canvas.line(left, y(tick), WIDTH - 6, y(tick), "reference" if tick == 0 else "grid")
        canvas.text(left - 8, y(tick) + 4, _signed(tick), "tick", "end")
    for second, label in days:
        canvas.line(x(second), bottom, x(second), bottom + 4, "reference")
        canvas.text(x(second), bottom + 18, label, "tick", "middle")
    for lot in np.argsort(through, kind="stable"):  # highlighted lots last, on top
        tip = f"{lots.index[lot]}, {lots['lot_start'].iloc[lot]:%d %b}: {points(values[lot])}"
        hot = bool(through[lot])
        canvas.dot(x(starts[lot]), y(values[lot]), "hot" if hot else "cool", tip, diamond=hot)
    canvas.text((left + WIDTH) / 2, height - 6, "lot start (UTC)", "axis", "middle")
    return canvas.svg()


def contributions(findings: Sequence[Finding]) -> str:
    """Mean absolute SHAP value per factor and sensor, the largest `MAX_ROWS`."""
    known = [(f, f.shap_mean_abs) for f in findings if f.shap_mean_abs is not None]
    rows = sorted(known, key=lambda row: (-row[1], row[0].rank))[:MAX_ROWS]
    left = _label_width([row.factor for row, _ in rows])
    bottom = 10 + ROW * len(rows)
    canvas = Canvas(WIDTH, bottom + 40, "Mean absolute SHAP value per factor")
    ticks = nice_ticks(0.0, max(value for _, value in rows), 4)
    scale = Scale(0.0, ticks[-1], left, WIDTH - 44)
    canvas.x_axis(scale, [(tick, f"{tick:g}") for tick in ticks], 6, bottom)
    for index, (row, value) in enumerate(rows):
        y = 10 + ROW * (index + 0.5)
        hot = row.verdict == "suspect"
        canvas.text(left - 10, y + 4, shorten(row.factor, left - 10), "strong" if hot else "", "end")
        canvas.rect(left, y - 7, scale(value) - left, 14, "hot" if hot else "cool")
        canvas.text(scale(value) + 6, y + 4, f"{value:.2f}", "number")
    canvas.line(left, 6, left, bottom, "reference")
    canvas.text((left + WIDTH - 44) / 2, bottom + 36, "mean |SHAP|, yield points", "axis", "middle")
    return canvas.svg()


def variance(split: VarianceSplit) -> str:
    """One bar of the whole variance, cut into lot, wafer and site."""
    canvas = Canvas(WIDTH, 86, "Share of variance: lot, wafer, site")
    start = 0.0
    for (name, share), css in zip(split.shares.items(), ("part-1", "part-2", "part-3"), strict=True):
        width = share * WIDTH
        canvas.rect(start, 26, max(width - 2, 0), 34, css)
        label = f"{100 * share:.0f} %"
        if width > len(label) * CHARACTER + 6:
            canvas.text(start + (width - 2) / 2, 48, label, "inside", "middle")
        if width > len(name) * CHARACTER:
            canvas.text(start + (width - 2) / 2, 16, name, "", "middle")
        start += width
    canvas.text(0, 80, "share of the variance", "axis")
    return canvas.svg()


def _label_width(names: Sequence[str]) -> float:
    longest = max((len(name) for name in names), default=0)
    return min(longest * CHARACTER, LABEL_LIMIT) + 14


def _plain(value: float) -> str:
    """A power of ten, written out while that is shorter: 0.01, 1, 1 000, 10⁵."""
    if 1e-3 <= value <= 1e4:
        return f"{value:,g}".replace(",", THIN_SPACE)
    return f"10{superscript(round(math.log10(value)))}"


def _signed(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def _day_ticks(first: float, last: float) -> list[tuple[float, str]]:
    """Midnights (UTC) between two times, about five of them, as (seconds, `12 Jan`)."""
    day = 86400.0
    span = max((last - first) / day, 1e-9)
    step = next((days for days in (1, 2, 5, 7, 14, 30, 60, 90, 180) if span / days <= 6), 365) * day
    start = -(-first // day) * day
    count = int((last - start) // step) + 1
    moments = [start + step * index for index in range(max(count, 0))]
    return [(second, f"{datetime.fromtimestamp(second, UTC):%d %b}".lstrip("0")) for second in moments]
