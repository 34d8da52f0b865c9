"""How a benchmark's rows are made and kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    One claim.

    :param ours: median.
    :param peer: median of the peer in the same run, or None where the goal is absolute.
    :param goal: largest ratio (largest value where there is no peer) that meets the claim; the smallest where more is
        better.
    :param spread: lowest and highest of ours, then of the peer.
    """

    measure: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    ratio: float | None
    goal: float
    met: bool
    spread: tuple[float, ...]


def row(
    measure: str,
    unit: str,
    ours: Sequence[float],
    peer: Sequence[float] | None,
    peer_name: str,
    goal: float,
    *,
    more_is_better: bool = False,
) -> Row:
    """Medians, their ratio and whether the goal is met."""
    our, their = statistics.median(ours), statistics.median(peer) if peer else None
    ratio = our / their if their else None
    value = our if ratio is None else ratio
    spread = (min(ours), max(ours), *((min(peer), max(peer)) if peer else ()))
    return Row(
        measure=measure,
        unit=unit,
        ours=round(our, 4),
        peer=None if their is None else round(their, 4),
        peer_name=peer_name,
        ratio=None if ratio is None else round(ratio, 3),
        goal=goal,
        met=value >= goal if more_is_better else value <= goal,
        spread=tuple(round(value, 4) for value in spread),
    )


def save(name: str, rows: Sequence[Row]) -> None:
    """Write the results file and show it."""
    RESULTS.mkdir(exist_ok=True)
    content = {
        "rows": [asdict(r) for r in rows],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for r in rows:
        peer = "" if r.peer is None else f", {r.peer_name} {r.peer} {r.unit}"
        peer += "" if r.ratio is None else f", ratio {r.ratio}"
        print(f"{r.measure}: {r.ours} {r.unit}{peer}; goal {r.goal}: {'met' if r.met else 'NOT met'}")
