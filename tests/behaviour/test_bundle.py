"""The runtime brought by an init container, into an image that has a Python and nothing of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import ExitCode, SpecError
from airflow_gpu_burst.runtime import bundle
from tests.behaviour.conftest import trainer
from tests.behaviour.test_ranks import World


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "gpu-burst"
    size = bundle.build(folder)
    assert 50e6 < size < 500e6
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image's own Python: no packages but one of its own, which ours must not hide."""
    folder = tmp_path_factory.mktemp("image") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "mdurl.py").write_text("mine = True\n")
    return folder / "bin" / "python"


def installed(built: Path, target: Path, shell: list[str], path: str) -> Path:
    subprocess.run([*shell, str(built / "install"), str(target)], check=True, env={"PATH": path})
    return target


def test_a_trainer_without_our_packages_runs_with_them_and_keeps_its_own(
    built: Path, python: Path, tmp_path: Path
) -> None:
    # Where an init container mounts it, without the Python that built it and without the right to write.
    target = installed(built, tmp_path / "brought", ["/bin/sh"], "/usr/bin:/bin")
    body = """
import boto3, pyiceberg, mdurl
import airflow_gpu_burst
(ctx.checkpoint_folder(1) / "state").write_text("x")
ctx.ready(1)
ctx.result({
    "own": mdurl.__file__, "boto3": boto3.__file__, "pyiceberg": pyiceberg.__file__,
    "package": airflow_gpu_burst.__file__,
    "PYTHONPATH": os.environ["PYTHONPATH"], "path": sys.path,
})
"""
    world = World(tmp_path, trainer(body), 1)
    command = [str(python), *world.command[1:]]
    done = subprocess.run(
        [str(python), str(target / "run.py"), "run", "--", *command], env=world.env, capture_output=True, text=True
    )
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    found = world.result()
    assert Path(found["own"]).parent == next((python.parents[1] / "lib").glob("python*/site-packages"))
    assert found["boto3"].startswith(f"{target}/site/") and found["pyiceberg"].startswith(f"{target}/site/")
    assert found["PYTHONPATH"] == f"{target}/trainer" and os.listdir(target / "trainer") == ["airflow_gpu_burst"]
    assert found["package"].startswith(f"{target}/trainer/") and found["path"][-1] == f"{target}/site"
    assert world.steps() == [1]
    assert not list(tmp_path.glob("brought/site/airflow_gpu_burst/__pycache__/*.pyc.*")), "compiled again"


@pytest.mark.skipif(not shutil.which("busybox"), reason="no busybox here")
def test_busybox_is_enough_to_install_it_and_again_over_what_is_there(built: Path, tmp_path: Path) -> None:
    busybox = str(shutil.which("busybox"))
    (tmp_path / "bin").mkdir()
    for applet in ("cp", "mkdir", "dirname"):
        (tmp_path / "bin" / applet).symlink_to(busybox)
    for _ in range(2):
        target = installed(built, tmp_path / "brought", [busybox, "sh"], str(tmp_path / "bin"))
    assert (target / "trainer" / "airflow_gpu_burst" / "runtime" / "__init__.py").is_file()
    assert (target / "trainer" / "airflow_gpu_burst").is_symlink()
    assert sorted(p.name for p in target.iterdir()) == ["install", "run.py", "site", "trainer"]


def test_another_python_is_told_what_to_do(built: Path, tmp_path: Path) -> None:
    launcher = (built / "run.py").read_text()
    (tmp_path / "run.py").write_text(launcher.replace('BUILT_FOR = "cpython-3', 'BUILT_FOR = "cpython-2'))
    word = tmp_path / "word.json"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), "run", "--", "true"],
        env={"GPU_BURST_TERMINATION_FILE": str(word)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == ExitCode.REQUEST_WRONG
    assert "is built for cpython-2" in done.stderr and "gpu-burst bundle FOLDER" in done.stderr
    assert '"code": 3' in word.read_text()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="not empty"):
        bundle.build(tmp_path)


def test_nothing_of_airflow_is_brought() -> None:
    names = set(bundle.closure())
    assert {"boto3", "pyiceberg", "pyarrow", "sqlalchemy"} <= names
    assert not {name for name in names if name.startswith(("apache-airflow", "kubernetes"))}
