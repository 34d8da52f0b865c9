"""Put the `dags` folder on the import path, as Airflow does."""

from __future__ import annotations

import sys
from pathlib import Path

DAGS = str(Path(__file__).parents[2] / "dags")
if DAGS not in sys.path:
    sys.path.insert(0, DAGS)
