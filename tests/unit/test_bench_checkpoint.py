"""The benchmark of transfers still runs: nothing else in the tests starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.transfer_rows import turned, windows
from bench.transfer_sink import TICK_S

ROOT = Path(__file__).parent.parent.parent
MEASURES = (
    "cpu http",
    "cpu http, absolute",
    "cpu tls",
    "cpu tls, absolute",
    "upload, loopback",
    "restore, loopback",
    "stall per save",
    "cap, 0.5 s windows: off by",
    "cap, fullest 100 ms",
    "CPU s/GB under the lowest cap",
    "files of 4 KB",
    "files of 4 KB, store answers in 5 ms",
    "files of 4 KB, store answers at once",
    "agent's memory, 1 GB in 8 shards",
)


def test_smoke() -> None:
    command = [sys.executable, str(ROOT / "bench" / "checkpoint.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)

    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line.removeprefix("ROW")) for line in done.stdout.splitlines() if line.startswith("ROW")]
    assert tuple(row["measure"] for row in rows) == MEASURES
    assert all(row["ours"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("ticks", "seconds", "rates"),
    [
        ([5, 5, 5], 2 * TICK_S, [1000.0, 1000.0]),
        ([5, 0, 10], TICK_S, [1000.0, 0.0, 2000.0]),
        ([5, 0, 10, 3], 3 * TICK_S, [1000.0, 13 / 3 / TICK_S]),
    ],
)
def test_windows(ticks: Sequence[int], seconds: float, rates: Sequence[float]) -> None:
    assert windows(ticks, seconds) == pytest.approx(rates)


def test_windows_longer_than_what_was_measured_are_none() -> None:
    with pytest.raises(ValueError, match="longer"):
        windows([1, 2], 3 * TICK_S)


def test_everyone_begins_once() -> None:
    names = ["ours", "a", "b"]

    assert [turned(names, number)[0] for number in range(3)] == names
    assert all(sorted(turned(names, number)) == sorted(names) for number in range(3))
