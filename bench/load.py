"""
1,000 deferred jobs in one process, logs followed on 50 of them, beside the peer's triggers on the same jobs.

Nearly all CPU of ours goes with the lines, so it depends on LINE_EVERY_S: each of the 50 prints one so often.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.cluster import Cluster, described
from bench.recording import Row, row
from tests.lab_fixtures import GpuCluster

PROGRAM = Path(__file__).parent / "deferred.py"
JOBS, FOLLOWED = 1000, 50
LINE_EVERY_S = 5.0
WINDOW_S, SETTLE_S = 30.0, 15.0
RUNS = 2
PEER = "KubernetesJobTrigger, 10 s"
POLL_S = 10.0


def address(gpu: GpuCluster) -> str:
    """Host and port of the API server."""
    config = json.loads(gpu.kubectl("config", "view", "-o", "json"))
    url = urlsplit(config["clusters"][0]["cluster"]["server"])
    return f"{url.hostname}:{url.port or 443}"


def deferred(
    cluster: Cluster, which: str, jobs: list[dict[str, Any]], seconds: float, poll_s: float, home: str
) -> dict[str, float]:
    """One process that defers on these jobs."""
    plan = {
        "jobs": jobs,
        "seconds": seconds,
        "settle_s": SETTLE_S,
        "poll_s": poll_s,
        "host": address(cluster.gpu),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        command = [sys.executable, str(PROGRAM), which, file.name]
        done = subprocess.run(command, env=cluster.env(home), capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"{which}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(line.removeprefix("RESULT"))
    print(which, len(jobs), found, flush=True)
    if found["fired"]:
        raise SystemExit(f"{which}: {found['fired']:.0f} fired, though no job had ended: {done.stdout[-3000:]}")
    return found


def rows(cluster: Cluster, home: str) -> list[Row]:
    """Make the jobs, measure, delete them."""
    began = time.monotonic()
    printing = cluster.printing(FOLLOWED, LINE_EVERY_S)
    waiting = cluster.waiting(JOBS - FOLLOWED)
    print(f"{JOBS} jobs made in {time.monotonic() - began:.0f} s", flush=True)
    jobs = [*described(printing, time.time()), *described(waiting, time.time())]
    many: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for _ in range(RUNS):
        for which, found in many.items():
            found.append(deferred(cluster, which, jobs, WINDOW_S, POLL_S, home))

    def both(name: str) -> tuple[list[float], list[float]]:
        return [f[name] for f in many["ours"]], [f[name] for f in many["peer"]]

    return [
        row("requests per second", "1/s", *both("requests_per_s"), PEER, 0.1),
        row("cpu seconds per minute", "CPU s", *both("cpu_s_per_minute"), PEER, 0.1),
        row("memory per job", "MiB", both("mib_per_job")[0], None, "", 1.0),
        row("loop lag p99", "s", both("late_p99_s")[0], None, "", 0.1),
        row("loop lag p99 while all begin", "s", both("start_late_p99_s")[0], None, "", 0.1),
    ]
