"""
A synthetic fab with a planted cause. **Nothing in here was measured.**

No fab publishes wafer histories with tool and chamber names, so the example needs made-up ones; and a made-up
one has what a real one never has: the right answer, against which the analysis is tested. Synthetic data says
so three times: lots are named `SYN-…`, products `SYN-P…`, and the column `synthetic` is true in every row.

What is imitated, because it decides whether an analysis works:

* a lot runs on one tool per step, and load is levelled over tools (shuffled rounds, not independent dice);
* at some steps a lot stays in one chamber, at others its wafers are spread over the tool's chambers;
* yield has a product level, a lot effect and a wafer effect: wafers of a lot are not independent, which is
  why the commonality test counts lots, not wafers;
* one innocent sensor moves yield a little, so that the planted cause is not the only signal.

The planted cause: wafers that went through one chamber lose `effect_points` of yield, and one sensor of that
step is shifted for them. `cause=None` plants nothing: the fab for measuring false alarms.

Measured with `rca.commonality.analyse` at the default size: the default cause is rank 1 with q < 0.05 in 99 % of
500 seeds (92 % at 5 points, 75 % at 4, 38 % at 3); a chamber of a step that spreads a lot's wafers, such as
DEPO-02/A, in 63 % of 200. Without a cause, 1.8 % of 1000 seeds raise a false alarm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

START = pd.Timestamp("2026-01-05 06:00", tz="UTC")
LOT_SPACING_H = 7.0
PRODUCT_YIELD = {"SYN-P1": 92.0, "SYN-P2": 88.5, "SYN-P3": 94.0}  # percent
LOT_SD = 1.8  # yield points
WAFER_SD = 1.5  # yield points
SENSOR_SHIFT_SD = 2.5  # of the sensor's own spread: visible to a model, not to the eye on a single wafer


@dataclass(frozen=True)
class Step:
    """A process step: `tools` tools with `chambers` chambers each; sensors as (name, mean, sd)."""

    name: str
    prefix: str
    tools: int
    chambers: int
    allocation: Literal["lot", "wafer"]  # what stays together in a chamber
    sensors: tuple[tuple[str, float, float], ...]

    def chamber(self, tool: int, chamber: int) -> str:
        """Name of a chamber, both counted from 0: `ETCH-03/B`."""
        return f"{self.tool(tool)}/{'ABCD'[chamber]}"

    def tool(self, tool: int) -> str:
        """Name of a tool, counted from 0: `ETCH-03`."""
        return f"{self.prefix}-{tool + 1:02d}"


STEPS = (
    Step("litho", "LITHO", 3, 2, "lot", (("dose_mean_mj_cm2", 28.0, 0.15), ("focus_mean_nm", -20.0, 4.0))),
    Step("etch", "ETCH", 4, 2, "lot", (("pressure_mean_mtorr", 12.0, 0.2), ("rf_power_mean_w", 850.0, 6.0))),
    Step("depo", "DEPO", 3, 2, "wafer", (("temp_mean_c", 400.0, 1.2), ("flow_mean_sccm", 150.0, 1.5))),
    Step("cmp", "CMP", 3, 2, "wafer", (("downforce_mean_kpa", 21.0, 0.3), ("slurry_mean_ml_min", 200.0, 3.0))),
    Step("implant", "IMPL", 3, 1, "lot", (("beam_mean_ma", 5.0, 0.05), ("tilt_mean_deg", 7.0, 0.02))),
    Step("clean", "CLEAN", 2, 2, "lot", (("temp_mean_c", 65.0, 0.5), ("bath_mean_us_cm", 0.06, 0.002))),
)


@dataclass(frozen=True)
class Planted:
    """The right answer: which chamber, at which step, what it costs, which sensor gives it away."""

    chamber: str
    step: str
    effect_points: float
    sensor: str


@dataclass(frozen=True)
class SyntheticFab:
    """A made-up wafer table (see `rca.wafers`) and the cause planted in it, if any."""

    frame: pd.DataFrame
    planted: Planted | None


def make_fab(
    seed: int = 7,
    *,
    lots: int = 60,
    wafers_per_lot: int = 12,
    cause: str | None = "ETCH-03/B",
    effect_points: float = 6.5,
) -> SyntheticFab:
    """Make up a fab: `lots * wafers_per_lot` rows, the same ones for the same arguments."""
    if lots < 1 or wafers_per_lot < 1:
        raise ValueError("lots and wafers_per_lot must be at least 1")
    planted = None if cause is None else _plan(cause, effect_points)
    rng = np.random.default_rng(seed)
    lot = np.repeat(np.arange(lots), wafers_per_lot)
    frame = _travellers(rng, lots, wafers_per_lot)
    hit = np.zeros(len(frame), dtype=bool)
    for step in STEPS:
        tool, chamber = _allocate(rng, step, lots, wafers_per_lot)
        frame[f"{step.name}_tool"] = [step.tool(t) for t in tool]
        frame[f"{step.name}_chamber"] = [step.chamber(t, c) for t, c in zip(tool, chamber, strict=True)]
        for name, mean, sd in step.sensors:
            column = f"{step.name}_{name}"
            noise = 0.6 * rng.normal(size=lots)[lot] + 0.8 * rng.normal(size=len(frame))
            if planted is not None and planted.sensor == column:
                hit = (frame[f"{step.name}_chamber"] == planted.chamber).to_numpy(dtype=bool)
                noise = noise + SENSOR_SHIFT_SD * hit
            frame[column] = mean + sd * noise
    level = frame["product"].map(PRODUCT_YIELD).to_numpy(dtype=float)
    spread = LOT_SD * rng.normal(size=lots)[lot] + WAFER_SD * rng.normal(size=len(frame))
    innocent = -0.4 * (frame["cmp_downforce_mean_kpa"].to_numpy(dtype=float) - 21.0) / 0.3
    loss = effect_points * hit
    frame["yield_pct"] = np.clip(level + spread + innocent - loss, 0.0, 100.0).round(2)
    frame["synthetic"] = True
    return SyntheticFab(frame=frame, planted=planted)


def _plan(cause: str, effect_points: float) -> Planted:
    for step in STEPS:
        if cause in {step.chamber(t, c) for t in range(step.tools) for c in range(step.chambers)}:
            return Planted(cause, step.name, effect_points, f"{step.name}_{step.sensors[0][0]}")
    raise ValueError(f"cause={cause!r} is no chamber of this fab; one would be ETCH-03/B")


def _travellers(rng: np.random.Generator, lots: int, wafers: int) -> pd.DataFrame:
    hours = LOT_SPACING_H * (np.arange(lots) + rng.uniform(0.0, 0.8, size=lots))
    starts = START + pd.to_timedelta((hours * 60).round(), unit="min")
    product = rng.choice(sorted(PRODUCT_YIELD), size=lots)
    lot = np.repeat(np.arange(lots), wafers)
    return pd.DataFrame(
        {
            "lot": [f"SYN-{index + 1:04d}" for index in lot],
            "wafer": np.tile(np.arange(1, wafers + 1), lots),
            "product": product[lot],
            "recipe": [f"{name}-R1" for name in product[lot]],
            "lot_start": starts[lot].as_unit("us"),  # Iceberg's timestamps have microseconds
        }
    )


def _allocate(rng: np.random.Generator, step: Step, lots: int, wafers: int) -> tuple[np.ndarray, np.ndarray]:
    """Tool and chamber index of every wafer, each of shape (lots * wafers,)."""
    # Places are dealt out in shuffled rounds: dispatchers level the load.
    places = step.tools * step.chambers
    rounds = -(-lots // places)
    place = np.concatenate([rng.permutation(places) for _ in range(rounds)])[:lots]
    tool = np.repeat(place // step.chambers, wafers)
    chamber = np.repeat(place % step.chambers, wafers)
    if step.allocation == "wafer":
        # The lot's share in its main chamber; the rest goes where there is room.
        share = np.repeat(rng.uniform(0.4, 1.0, size=lots), wafers)
        elsewhere = rng.random(lots * wafers) > share
        chamber = np.where(elsewhere, (chamber + 1) % step.chambers, chamber)
    return tool, chamber
