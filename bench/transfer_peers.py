"""
The tools beside which transfers are measured: got once into a folder of their own, never into this environment.

boto3 and awscrt are there anyhow. A tool that cannot be had is left out, and it is said why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BUILT_IN = {"boto3": "boto3", "boto3, tuned": "boto3", "awscrt": "awscrt"}
PYTHON = {"obstore": "obstore", "obstore, tuned": "obstore", "s3torchconnector": "s3torchconnectorclient"}
PROGRAMS = {
    "s5cmd": "github.com/peak/s5cmd/v2@v2.3.0",
    "rclone": "github.com/rclone/rclone@v1.71.0",
}
TIMEOUT_S = 900
TORCH = "torch"


def folder() -> Path:
    """Where they are kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-burst-bench"


def gather(place: Path, *, install: bool) -> tuple[list[str], list[str]]:
    """
    Names of the clients that can be measured, and what is to be said about the others.

    :param install: get what is not there; needs a network, and Go for the programs.
    """
    names, notes = list(BUILT_IN), []
    for package in sorted(set(PYTHON.values())):
        if install and not (place / "python" / package).exists():
            _pip(place / "python", package)
        if (place / "python" / package).exists():
            names += [name for name, needed in PYTHON.items() if needed == package]
        else:
            notes.append(f"{package}: not installed, left out")
    for name, source in PROGRAMS.items():
        if install and not (place / "bin" / name).exists():
            _go(place / "bin", source)
        if (place / "bin" / name).exists():
            names.append(name)
        else:
            notes.append(f"{name}: not built ({source}), left out")
    return names, notes


def torch(place: Path, *, install: bool) -> Path | None:
    """A Python with torch, for its distributed checkpoints; None: there is none. About 3 GB."""
    python = place / "torch" / "bin" / "python"
    if install and not python.exists():
        _quietly(_uv() + ["venv", "--quiet", "--python", sys.executable, str(place / "torch")])
        _quietly(_uv() + ["pip", "install", "--quiet", "--python", str(python), TORCH, "numpy"])
    asked = [str(python), "-c", "import torch.distributed.checkpoint"]
    return python if python.exists() and subprocess.run(asked, capture_output=True).returncode == 0 else None


def _pip(target: Path, package: str) -> None:
    _quietly(_uv() + ["pip", "install", "--quiet", "--no-deps", "--target", str(target), package])


def _go(target: Path, source: str) -> None:
    """
    Build one program of an exact version.

    In a module of its own: `go install` asks for the list of all versions besides, which not every proxy has.
    """
    if not shutil.which("go"):
        return
    package, _, _ = source.partition("@")
    with tempfile.TemporaryDirectory() as module:
        (Path(module) / "go.mod").write_text(f"module peers\n\ngo 1.24\n\nrequire {source.replace('@', ' ')}\n")
        _quietly(["go", "build", "-p=2", "-mod=mod", "-o", f"{target}/", package], cwd=module)


def _uv() -> list[str]:
    beside = Path(sys.executable).with_name("uv")
    return [str(beside) if beside.exists() else "uv", "--system-certs"]


def _quietly(command: list[str], cwd: str | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return
    if done.returncode:
        print(f"{' '.join(command)}: {done.stderr.strip()[-600:]}", file=sys.stderr)
