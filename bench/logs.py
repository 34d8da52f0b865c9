"""
What it costs to bring a container's lines into a task's log, beside the peer's PodManager: CPU, and memory while 1 GB
passes. Both read the same bytes from the same server (log_server.py), and their loggers drop every line.

A kubelet sends each line by itself while it is printed; of what had been printed before, an API server makes pieces of
2.5 KB on average (measured, 1.34). Hence two rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.log_server import LINE, STAMP
from bench.recording import Row, row, save

RUNS = 5
LINES = 200_000
PIECE = 2500
GIGABYTE = 10**9 // len(STAMP % 0 + LINE % 0)
HERE = Path(__file__).parent
PEER = "PodManager.fetch_container_logs"


@contextmanager
def server() -> Iterator[int]:
    """The server of logs, in a process of its own; its port."""
    process = subprocess.Popen([sys.executable, str(HERE / "log_server.py")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def read(which: str, port: int, pod: str, home: str) -> dict[str, float]:
    """One reading in a fresh process."""
    env = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    command = [sys.executable, str(HERE / "log_readers.py"), which, str(port), pod]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return dict(json.loads(line.removeprefix("RESULT")))


def speed(name: str, port: int, piece: int, home: str) -> Row:
    """Lines per CPU second of both, alternating."""
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(RUNS):
        for which, found in rates.items():
            result = read(which, port, f"lines-{LINES}-{piece}-{number}-{which}", home)
            if result["lines"] < LINES:
                raise SystemExit(f"{which} printed {result['lines']:.0f} of {LINES} lines")
            found.append(result["lines"] / result["cpu_s"])
    return row(name, "lines", rates["ours"], rates["peer"], PEER, 1.0, more_is_better=True)


def main() -> int:
    """All rows; exit code 1 when a goal is not met."""
    lines = -(-GIGABYTE // 10_000) * 10_000
    with tempfile.TemporaryDirectory() as home, server() as port:
        rows = [
            speed("lines per CPU second", port, PIECE, home),
            speed("lines per CPU second, one by one", port, 0, home),
        ]
        whole = read("ours", port, f"lines-{lines}-{PIECE}-whole", home)
        still = read("still", port, f"lines-{lines}-{PIECE}-still", home)
    rows += [
        row("memory while 1 GB passes", "MiB", [whole["grown_mib"]], None, "", 64),
        row("memory, 1 GB before a reader that stands still", "MiB", [still["grown_mib"]], None, "", 64),
    ]
    save("logs", rows)
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
