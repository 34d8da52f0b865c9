"""Who may import what, and what an import brings in."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORBIDDEN = ("airflow", "kubernetes", "boto3", "pyiceberg", "pyarrow", "numpy", "yaml")

IN_POD = [
    "airflow_gpu_burst.runtime",
    "airflow_gpu_burst.runtime.pod",
    "airflow_gpu_burst.cli",
    "airflow_gpu_burst.checkpoint",
    "airflow_gpu_burst.runlog",
    "airflow_gpu_burst.store",
    "airflow_gpu_burst.lake",
    "airflow_gpu_burst.lake.pins",
    "airflow_gpu_burst.lake.read",
    "airflow_gpu_burst.lake.write",
]


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", IN_POD)
def test_what_runs_in_the_pod_needs_neither_airflow_nor_kubernetes(module: str) -> None:
    program = f"import sys\nfor name in {FORBIDDEN!r}: sys.modules[name] = None\nimport {module}"
    done = python(program)
    assert done.returncode == 0, done.stderr


def test_layers_are_kept() -> None:
    from importlinter import cli

    assert cli.lint_imports(config_filename="pyproject.toml", no_cache=True) == 0


def test_an_operator_without_airflow_says_what_to_type() -> None:
    program = """
from importlib import metadata
def version(name): raise metadata.PackageNotFoundError(name)
metadata.version = version
try:
    import airflow_gpu_burst.operators.gpu_job
except ImportError as error:
    print(type(error).__name__, error)
"""
    assert "NotInstalledError" in (out := python(program).stdout)
    assert "pip install 'airflow-gpu-burst[airflow]'" in out


@pytest.mark.parametrize("version", ["3.2.2", "2.11.0"])
def test_an_operator_on_an_older_airflow_says_what_to_type(version: str) -> None:
    program = f"""
from importlib import metadata
metadata.version = lambda name: {version!r}
for part in ("operators.gpu_job", "operators.pin", "hooks.store", "triggers.gpu_job"):
    try:
        __import__("airflow_gpu_burst." + part)
    except ImportError as error:
        print(error)
"""
    out = python(program).stdout.splitlines()
    assert len(out) == 4 and all("pip install --upgrade 'apache-airflow>=3.3'" in line for line in out), out


@pytest.mark.parametrize(("version", "fits"), [("3.3.0", True), ("3.3.0rc1", True), ("3.10.1", True), ("4.0", True)])
def test_newer_airflows_are_accepted(version: str, fits: bool) -> None:
    program = f"from importlib import metadata\nmetadata.version = lambda name: {version!r}\n"
    program += "from airflow_gpu_burst.compat import require_airflow\nrequire_airflow()"
    assert (python(program).returncode == 0) is fits
