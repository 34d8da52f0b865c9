"""`make ui`: `airflow standalone` with the example DAG and the demo's connections, under `.demo/`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from demo.run import environment

PORT = 8080
HEALTH = f"http://127.0.0.1:{PORT}/api/v2/monitor/health"


def main() -> int:
    """Until Ctrl-C, or until Airflow ends by itself."""
    stop = [False]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.__setitem__(0, True))
    print("starting Airflow ...", flush=True)
    with (Path(environment()["AIRFLOW_HOME"]).parent / "ui.log").open("wb") as log:
        # In a session of its own: Ctrl-C goes to us alone, and we tell Airflow's parent process, which ends its
        # children in order. All of them interrupted at once would wait for each other.
        airflow = subprocess.Popen(
            [sys.executable, "-m", "airflow", "standalone"],
            env=variables(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        announced = False
        while not stop[0] and airflow.poll() is None:
            if not announced and answers():
                print(f"open http://localhost:{PORT}, trigger yield_rca; Ctrl-C ends it. Log: {log.name}", flush=True)
                announced = True
            time.sleep(0.5)
        return end(airflow)


def variables() -> dict[str, str]:
    """Environment of `airflow standalone`, which starts `airflow` from PATH."""
    return {
        **os.environ,
        **environment(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",  # loopback only, so no password to look for
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(PORT),
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
    }


def answers() -> bool:
    """Whether the UI can be opened."""
    try:
        with urllib.request.urlopen(HEALTH, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def end(airflow: subprocess.Popen[bytes]) -> int:
    """Airflow's own shutdown, and the end of what that leaves."""
    if airflow.poll() is not None:
        print("Airflow ended by itself; see .demo/ui.log", file=sys.stderr)
        return 1
    print("\nending Airflow ...", flush=True)
    airflow.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        airflow.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(airflow.pid, signal.SIGKILL)
    airflow.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
