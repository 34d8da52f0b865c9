"""
One ranked table out of two analyses: what the lots say (commonality) and what the model leans on (SHAP).

The commonality test decides: it has an error rate. The model's contributions stand beside it as a second
opinion, and never turn a factor into a suspect. Ranks follow the commonality order; sensors come after, by
their contribution, with the verdict `not_tested`: no lot is "exposed" to a sensor, but what moves with the
yield tells the engineer where to look.

Findings are written to an Iceberg table (`schema`, `to_table`) and passed as JSON (`to_json`, `from_json`). A
number that does not exist is null, never NaN or infinity: neither JSON nor SQL agrees on what those mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa

from rca.commonality import CommonalityRow
from rca.model import Attribution

Kind = Literal["tool", "chamber", "sensor"]
Verdict = Literal["suspect", "explained", "not_significant", "inconclusive", "not_tested"]

# What a sensor has no value for.
UNTESTED = (
    *("lots_exposed", "lots_bad", "lots_other", "lots_bad_other", "odds_ratio", "odds_low", "odds_high"),
    *("p", "q", "effect_points", "shap_exposed", "explained_by"),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One factor's line in the answer. Numbers about lots are None for sensors."""

    run_key: str
    table: str
    snapshot_id: str  # a string: ids exceed 2^53, and JSON readers round such numbers
    rank: int  # from 1
    factor: str
    step: str
    kind: Kind
    verdict: Verdict
    lots_exposed: int | None
    lots_bad: int | None  # bad lots among the exposed
    lots_other: int | None
    lots_bad_other: int | None
    odds_ratio: float | None
    odds_low: float | None  # 95 % interval
    odds_high: float | None
    p: float | None
    q: float | None
    effect_points: float | None  # yield points; a loss is negative
    shap_mean_abs: float | None  # yield points, mean over all wafers
    shap_exposed: float | None  # yield points, signed mean over the exposed wafers
    explained_by: str | None  # key of the better suspect, e.g. etch_chamber=ETCH-03/B
    same_lots_as: tuple[str, ...]  # keys of factors that no lot tells apart from this one
    synthetic: bool
    created_at: datetime  # UTC

    def __post_init__(self) -> None:
        """Refuse what would be lost on the way to JSON or Iceberg."""
        if not isinstance(self.snapshot_id, str):
            raise TypeError("snapshot_id must be a string: as a number it may be rounded on its way")
        if self.created_at.tzinfo is None:
            raise ValueError("created_at needs a time zone: datetime.now(UTC)")
        object.__setattr__(self, "created_at", self.created_at.astimezone(UTC))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} of {self.factor} is {value}: use None")


def combine(
    rows: Iterable[CommonalityRow],
    attributions: Iterable[Attribution],
    *,
    run_key: str,
    table: str,
    snapshot_id: str,
    synthetic: bool,
    created_at: datetime,
) -> list[Finding]:
    """Join both analyses on the factor's key; one finding per tested factor and per sensor, ranked."""
    by_key = {attribution.key: attribution for attribution in attributions}
    origin: dict[str, Any] = {
        "run_key": run_key,
        "table": table,
        "snapshot_id": snapshot_id,
        "synthetic": synthetic,
        "created_at": created_at,
    }
    found: list[Finding] = []
    for row in rows:
        shap = by_key.get(row.key)
        found.append(
            Finding(
                rank=len(found) + 1,
                factor=row.factor,
                step=row.step,
                kind=row.kind,
                verdict=row.verdict,
                lots_exposed=row.lots_exposed,
                lots_bad=row.lots_bad_exposed,
                lots_other=row.lots_other,
                lots_bad_other=row.lots_bad_other,
                odds_ratio=row.odds_ratio,
                odds_low=row.odds_low,
                odds_high=row.odds_high,
                p=row.p,
                q=row.q,
                effect_points=row.effect_points,
                shap_mean_abs=None if shap is None else shap.mean_abs,
                shap_exposed=None if shap is None else shap.mean_exposed,
                explained_by=row.explained_by,
                same_lots_as=row.same_lots_as,
                **origin,
            )
        )
    sensors = [shap for shap in by_key.values() if shap.kind == "sensor"]
    for shap in sorted(sensors, key=lambda shap: (-shap.mean_abs, shap.key)):
        found.append(_sensor(shap, len(found) + 1, origin))
    return found


def _sensor(shap: Attribution, rank: int, origin: dict[str, Any]) -> Finding:
    # Any: mypy would hold the None of one field against the types of all others.
    missing: dict[str, Any] = dict.fromkeys(UNTESTED)
    return Finding(
        rank=rank,
        factor=shap.factor,
        step=shap.step,
        kind="sensor",
        verdict="not_tested",
        shap_mean_abs=shap.mean_abs,
        same_lots_as=(),
        **missing,
        **origin,
    )


def to_rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as plain dicts of Python values (`created_at` a datetime), keys in the order of `schema`."""
    return [{**asdict(finding), "same_lots_as": list(finding.same_lots_as)} for finding in findings]


def to_json(findings: Sequence[Finding]) -> str:
    """Findings as a JSON array; `created_at` in ISO 8601."""
    rows = [{**row, "created_at": row["created_at"].isoformat()} for row in to_rows(findings)]
    return json.dumps(rows, allow_nan=False)


def from_json(text: str) -> list[Finding]:
    """The findings that `to_json` wrote, equal to the last bit."""
    return [
        Finding(
            **{
                **row,
                "same_lots_as": tuple(row["same_lots_as"]),
                "created_at": datetime.fromisoformat(row["created_at"]),
            }
        )
        for row in json.loads(text)
    ]


def schema() -> pa.Schema:
    """Arrow schema of the findings table: fields, names and order of `Finding`; Iceberg takes it as it is."""
    types: dict[str, pa.DataType] = {
        "str": pa.string(),
        "int": pa.int32(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "datetime": pa.timestamp("us", tz="UTC"),
        "tuple[str, ...]": pa.list_(pa.string()),
        "Kind": pa.string(),
        "Verdict": pa.string(),
    }
    columns = []
    for field in fields(Finding):
        written = str(field.type)  # annotations are strings in this module
        name = written.removesuffix(" | None")
        columns.append(pa.field(field.name, types[name], nullable=name != written))
    return pa.schema(columns)


def to_table(findings: Sequence[Finding]) -> pa.Table:
    """Findings as an Arrow table with `schema`, to append to the Iceberg table."""
    return pa.Table.from_pylist(to_rows(findings), schema=schema())
