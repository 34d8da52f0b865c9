"""`make ui`: `airflow standalone` with the example DAGs and the demo's connections, under `.demo/`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from demo.run import environment


def main() -> None:
    """Never returns: becomes Airflow."""
    os.environ.update(environment())
    os.environ.update(
        AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS="True",  # loopback only, so no password to look for
        AIRFLOW__API__HOST="127.0.0.1",
        AIRFLOW__LOGGING__LOGGING_LEVEL="INFO",
    )
    print("Airflow starts; open http://localhost:8080 and trigger yield_rca. Ctrl-C ends it.", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "airflow", "standalone"])


if __name__ == "__main__":
    main()
