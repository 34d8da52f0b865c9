"""
`gpu-burst bundle FOLDER`: the runtime as a folder that an init container copies into a pod.

    site/      this package and what it needs in a pod (boto3, pyiceberg, pyarrow), from this environment
    trainer/   a link to this package alone: the trainer's PYTHONPATH, so that none of our dependencies shadows its own
    run.py     starts it: python3 FOLDER/run.py run -- CMD
    install    copies the folder to its argument; a shell is all that it needs

Nothing is downloaded. The folder fits images whose Python is the one that this runs on (version, C library, processor).
"""

from __future__ import annotations

import compileall
import shutil
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from py_compile import PycInvalidationMode

import airflow_gpu_burst
from airflow_gpu_burst.errors import NotInstalledError, SpecError

PACKAGE = "airflow-gpu-burst"
EXTRAS = ("lake",)
_LEFT_OUT = frozenset({"__pycache__", "tests", "include"})
"""Folders of packages that no pod needs: pyarrow's alone are 9 MB."""

_INSTALL = """#!/bin/sh
# Not cp -a: an init container may not change owners, and busybox says so for each of thousands of files.
set -e
[ -n "$1" ] || { echo "usage: install TARGET" >&2; exit 2; }
mkdir -p "$1"
exec cp -R -P -f "$(dirname "$0")/." "$1"
"""


def build(folder: Path) -> int:
    """
    Build the folder; returns its size in bytes.

    :param folder: must not exist, or be empty.
    :raises SpecError: it holds something.
    :raises NotInstalledError: something that a pod needs is not installed here.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SpecError(f"{folder} is not empty: name a new folder, or remove it first")
    names = list(closure())
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    for name in names:
        _copy_distribution(name, site)
    package = Path(airflow_gpu_burst.__file__).parent
    shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    # Checked by nothing: copies get new times, and a pod must not compile all of it again at every start.
    compileall.compile_dir(site, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    (folder / "trainer").mkdir()
    (folder / "trainer" / package.name).symlink_to(Path("..") / "site" / package.name)
    launcher = (package / "runtime" / "launcher.py").read_text(encoding="utf-8")
    soabi = str(sysconfig.get_config_var("SOABI"))
    (folder / "run.py").write_text(launcher.replace("@SOABI@", soabi), encoding="utf-8")
    (folder / "install").write_text(_INSTALL, encoding="utf-8")
    (folder / "install").chmod(0o755)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def closure() -> Iterator[str]:
    """
    The distributions that a pod needs beside this package, each once.

    :raises NotInstalledError: one is not installed here.
    """
    try:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name
    except ImportError as error:
        raise NotInstalledError("gpu-burst bundle needs packaging: pip install packaging") from error
    pending: list[tuple[str, tuple[str, ...]]] = [(PACKAGE, EXTRAS)]
    visited: set[tuple[str, tuple[str, ...]]] = set()
    given: set[str] = {PACKAGE}
    while pending:
        name, extras = pending.pop()
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError as error:
            raise NotInstalledError(
                f"{name} is not installed here, and pods need it: pip install '{PACKAGE}[{','.join(EXTRAS)}]'"
            ) from error
        if name not in given:
            given.add(name)
            yield name
        for text in requires:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                pending.append((canonicalize_name(requirement.name), tuple(sorted(requirement.extras))))


def _copy_distribution(name: str, site: Path) -> None:
    """What was installed for it, but for scripts outside the packages' folder, bytecode and what no pod needs."""
    for file in metadata.distribution(name).files or []:
        if ".." in file.parts or file.suffix in (".pyc", ".pth") or _LEFT_OUT & set(file.parts[:-1]):
            continue
        source = Path(str(file.locate()))
        if source.is_file():
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
