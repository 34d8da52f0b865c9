"""Every DAG file loads, and none does work or heavy imports while it is parsed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "dags").glob("*.py"), *(ROOT / "example_dags").glob("*.py")])
HEAVY = ("pyiceberg", "pyarrow", "pandas", "xgboost", "scipy", "boto3", "kubernetes")


def test_there_are_dags() -> None:
    assert len(FILES) >= 3  # if empty, it is just the detection that failed


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dag_file_loads_without_heavy_imports(path: Path) -> None:
    program = f"""
import runpy, sys
sys.path.insert(0, {str(path.parent)!r})
found = runpy.run_path({str(path)!r})
from airflow.sdk import DAG
dags = [value for value in found.values() if isinstance(value, DAG)]
from airflow.serialization.serialized_objects import DagSerialization
for dag in dags: DagSerialization.serialize_dag(dag)
print(len(dags), [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "1 []"
