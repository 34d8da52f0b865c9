"""What an import costs: the operators beside KubernetesJobOperator, and the in-pod runtime alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.recording import row, save

RUNS = 7
PROGRAM = """
import json, resource, sys, time
before = resource.getrusage(resource.RUSAGE_SELF); began = time.perf_counter()
{imports}
seconds = time.perf_counter() - began; after = resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print("RESULT", json.dumps([cpu, seconds, "airflow" in sys.modules]))
"""
OURS = "import airflow_gpu_burst.operators.gpu_job, airflow_gpu_burst.operators.pin"
PEER = "import airflow.providers.cncf.kubernetes.operators.job"
RUNTIME = "import airflow_gpu_burst.runtime"


def measure(imports: str, home: str) -> tuple[float, float, bool]:
    """CPU and wall seconds of the imports in a fresh interpreter, and whether they brought in Airflow."""
    env = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)], env=env, capture_output=True, text=True, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    cpu, seconds, airflow = json.loads(line.removeprefix("RESULT"))
    return cpu, seconds, airflow


def main() -> int:
    """Alternate ours and the peer, one warm-up each; exit code 1 when a goal is not met."""
    with tempfile.TemporaryDirectory() as home:
        for imports in (OURS, PEER, RUNTIME):
            measure(imports, home)
        ours, peer, runtime, wall = [], [], [], []
        for _ in range(RUNS):
            ours.append(measure(OURS, home)[0])
            peer.append(measure(PEER, home)[0])
            cpu, seconds, airflow = measure(RUNTIME, home)
            if airflow:
                raise SystemExit("importing the runtime brings in Airflow")
            runtime.append(cpu)
            wall.append(seconds)
            time.sleep(0.05)
    rows = [
        row("operators import", "CPU s", ours, peer, "KubernetesJobOperator", 1.0),
        row("runtime import", "CPU s", runtime, None, "", 0.15),
        row("runtime import, wall", "s", wall, None, "", 0.15),
    ]
    save("import_time", rows)
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
