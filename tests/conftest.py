"""What every test needs: an Airflow home that is not the developer's own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before Airflow is imported anywhere: importing it makes the folder and reads its configuration.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")
atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)
for name in [
    name for name in os.environ if name.startswith(("AIRFLOW__", "AIRFLOW_CONN_", "GPU_BURST_", "PYICEBERG_"))
]:
    del os.environ[name]

pytest_plugins = ["tests.lab_fixtures"]
