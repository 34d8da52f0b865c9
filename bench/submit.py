"""
A task's way to its pod and back, and what 1,000 deferred jobs cost, in the lab's cluster (tests/lab/README.md) beside
KubernetesJobOperator and KubernetesJobTrigger: `make lab-build`, then `make bench NAME=submit`. LAB_DIR names a lab
that is up; without it one is started and taken down. Takes 15 minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import latency, load
from bench.cluster import cluster
from bench.recording import save


def main() -> int:
    """All rows; exit code 1 when a goal is not met."""
    with tempfile.TemporaryDirectory() as home, cluster() as found:
        rows = [*latency.submissions(found, home), *latency.ends(found, home), *load.rows(found, home)]
    save("submit", rows)
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
