"""What is in the lab's images, and when they are built again."""

from __future__ import annotations

import compileall
import hashlib
import importlib.metadata
import importlib.util
import py_compile
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from core import HERE, Lab, LabError, sh
from image import ENV, add_folder, add_programs, complete, libraries, write_image

BASE = "lab.local/base:1"
REPOSITORY = HERE.parent.parent
PACKAGE = "airflow_gpu_burst"
JOB_EXTRAS = ("airflow-gpu-burst[lake]", "xgboost-cpu", "pandas", "scipy")
"""What the trainers of dags/ import: in the image of the GPU jobs, from the environment that runs this program."""
SYSTEM_LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1")
RECIPE = "1"  # counted up when a recipe of a kept layer changes


def base_image(lab: Lab) -> Path:
    """Busybox, a shell and nothing else; also the pause image of the pods."""
    out = lab.images / "base.tar"
    if not complete(out):
        with _folder(lab) as root:
            _base(root)
            write_image(root, BASE, out, cmd=["/bin/busybox", "sleep", "2147483647"])
    return out


def python_image(lab: Lab) -> Path:
    """The interpreter, its standard library and no package: where the runtime comes by an init container."""
    out = lab.images / f"python-{_key()}.tar"
    if not complete(out):
        with _folder(lab) as root:
            _base(root)
            _python(root)
            add_programs(root, *_system_libraries())
            write_image(root, "lab.local/python:1", out)
    return out


def gpu_burst_image(lab: Lab) -> Path:
    """
    An image for GPU jobs, as a team has one: the runtime with `gpu-burst` on the PATH, what the trainers import, and
    the trainers in /opt/dags. Two layers: after a change of the code only the small one is built again.
    """
    site = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix}))
    out = lab.images / "gpu-burst.tar"
    with _folder(lab) as root:
        inside = root / str(site).lstrip("/")
        _copy(REPOSITORY / PACKAGE, inside / PACKAGE)
        info = Path(str(_distribution("airflow-gpu-burst")._path))  # type: ignore[attr-defined]
        _copy(info, inside / info.name)
        for name in ("trainers", "rca"):
            _copy(REPOSITORY / "dags" / name, root / "opt" / "dags" / name)
        script = root / "usr/local/bin/gpu-burst"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/usr/bin/python3\nimport sys\nfrom {PACKAGE}.cli import main\nsys.exit(main())\n")
        script.chmod(0o755)
        _compiled(root)
        write_image(root, "lab.local/gpu-burst:1", out, base=_dependencies(lab, site), env={**ENV, "HOME": "/tmp"})
    return out


def _dependencies(lab: Lab, site: Path) -> Path:
    """The fat layer: interpreter and packages, kept by the versions they have."""
    out = lab.images / f"gpu-burst-deps-{_key()}.tar"
    if complete(out):
        return out
    with _folder(lab) as root:
        _base(root)
        _python(root)
        needed: list[Path] = []
        for name in _closure(JOB_EXTRAS):
            if name != "airflow-gpu-burst":
                needed += _add_distribution(root / str(site).lstrip("/"), _distribution(name))
        ours = Path(sysconfig.get_path("purelib"))
        outside = [path for path in libraries(needed) if not path.is_relative_to(ours)]
        add_programs(root, *map(str, outside))
        _compiled(root)
        write_image(root, f"lab.local/gpu-burst-deps:{_key()}", out)
    return out


def fat_layers(lab: Lab) -> None:
    """All that takes longer than seconds, once per version of the dependencies."""
    python_image(lab)
    gpu_burst_image(lab)
    if not complete(_runtime_dependencies(lab)):
        runtime_image(lab)


def _runtime_dependencies(lab: Lab) -> Path:
    return lab.images / f"runtime-deps-{_key()}.tar"


def runtime_image(lab: Lab) -> Path:
    """The runtime that an init container copies beside images without it, in /opt/gpu-burst."""
    out, deps = lab.images / "runtime.tar", _runtime_dependencies(lab)
    with _folder(lab) as root, _folder(lab) as fat:
        _base(fat)
        bundle = root / "opt" / "gpu-burst"
        bundle.parent.mkdir(parents=True)
        sh(sys.executable, "-m", f"{PACKAGE}.cli", "bundle", bundle)
        ours = (bundle / "site").glob(f"{PACKAGE}*")
        kept = root / "kept"
        kept.mkdir()
        for path in list(ours):
            path.rename(kept / path.name)
        (fat / "opt" / "gpu-burst").mkdir(parents=True)
        (bundle / "site").rename(fat / "opt" / "gpu-burst" / "site")
        kept.rename(bundle / "site")
        if not complete(deps):
            write_image(fat, f"lab.local/runtime-deps:{_key()}", deps)
        write_image(root, "lab.local/runtime:1", out, base=deps)
    return out


# --- parts ---------------------------------------------------------------------------------------------------------


def _key() -> str:
    """Changes with the interpreter, the pinned packages and the recipe."""
    pins = (REPOSITORY / "constraints.txt").read_text()
    names = sorted(_closure(JOB_EXTRAS))
    return hashlib.sha256(f"{RECIPE} {sys.version} {names} {pins}".encode()).hexdigest()[:12]


@contextmanager
def _folder(lab: Lab) -> Iterator[Path]:
    """An empty image folder."""
    lab.images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=lab.images, prefix=".root-") as name:
        root = Path(name) / "root"
        root.mkdir()
        yield root


def _base(root: Path) -> None:
    busybox = shutil.which("busybox")
    if not busybox:
        raise LabError("no busybox: run `make lab-build`, it installs it")
    for folder in ("bin", "etc", "tmp", "usr/bin"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(busybox, root / "bin/busybox")
    for applet in sh(busybox, "--list").split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "usr/bin/env").symlink_to("/bin/busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")


def _python(root: Path) -> None:
    """The interpreter that runs this program, with its standard library, at the paths it has here."""
    program = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    add_programs(root, str(program), *map(str, library.glob("lib-dynload/*.so")))
    unwanted = ("site-packages", "test", "__pycache__", "idlelib", "tkinter", "ensurepip", "config-*", "lib2to3")
    target = root / str(library).lstrip("/")
    shutil.copytree(library, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*unwanted))
    for name in ("python", "python3"):
        (root / "usr/bin" / name).symlink_to(program)


def _system_libraries() -> list[str]:
    """What every image that is not built from nothing has, and wheels such as pyarrow's rely on."""
    found: dict[str, str] = {}
    for line in sh("/sbin/ldconfig", "-p").splitlines():
        words = line.split()
        if "x86-64" in line and words[0] in SYSTEM_LIBRARIES:
            found.setdefault(words[0], words[-1])
    return list(found.values())


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


def _compiled(root: Path) -> None:
    """Bytecode that is never checked against its source: importing the trainers' packages costs seconds without."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(root, quiet=2, stripdir=str(root), invalidation_mode=unchecked, workers=2)


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise LabError(
            f"{name} is not installed where the lab runs ({sys.executable}): use the project's .venv (make lab-up)"
        ) from None


def _closure(requirements: tuple[str, ...]) -> list[str]:
    """The names of all distributions that these need here."""
    from packaging.requirements import Requirement

    done: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            if (wanted.name, extra) in done:
                continue
            done.add((wanted.name, extra))
            for text in _distribution(wanted.name).requires or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return sorted({name for name, _ in done})


def _add_distribution(site: Path, found: importlib.metadata.Distribution) -> list[Path]:
    """Copy the files of a distribution below `site`, its tests excepted; the shared libraries among them."""
    shared: list[Path] = []
    for file in found.files or []:
        if ".." in file.parts or "__pycache__" in file.parts or "tests" in file.parts:
            continue
        source, target = Path(str(file.locate())), site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        if ".so" in file.suffixes:
            shared.append(source)
    return shared


# --- images of controllers that no test uses yet --------------------------------------------------------------------


def pip_folder(lab: Lab, name: str, *requirements: str, dependencies: bool = True) -> Path:
    """Python packages in a folder of the cache."""
    folder = lab.cache / name
    if not folder.exists():
        sh(
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--target",
            folder,
            *([] if dependencies else ["--no-deps"]),
            *requirements,
        )
    return folder


def spark_image(lab: Lab) -> Path:
    """Spark 4.0.1 as PySpark ships it, a small JRE and Python; driver and executor start as in Spark's own image."""
    out, pyspark = lab.images / "spark.tar", pip_folder(lab, "pyspark", "pyspark==4.0.1", dependencies=False)
    if not complete(out):
        with _folder(lab) as root:
            _base(root)
            _python(root)
            _spark(root, pyspark)
            env = {**ENV, "PATH": f"/opt/jre/bin:{ENV['PATH']}", "JAVA_HOME": "/opt/jre", "SPARK_HOME": "/opt/spark"}
            write_image(root, "lab.local/spark:4.0.1", out, entrypoint=["/opt/entrypoint.sh"], env=env)
    return out


def _spark(root: Path, pyspark: Path) -> None:
    add_programs(root, "/bin/bash")
    jre = root / "opt/jre"
    modules = (
        "java.se,jdk.unsupported,jdk.crypto.ec,jdk.zipfs,jdk.management,"
        "jdk.security.auth,jdk.naming.dns,jdk.incubator.vector"
    )
    sh("jlink", "--strip-debug", "--no-header-files", "--no-man-pages", "--add-modules", modules, "--output", jre)
    add_programs(root, str(jre / "bin/java"), *map(str, (jre / "lib").rglob("*.so")))
    add_folder(root, pyspark / "pyspark", "/opt/spark")
    for script in (root / "opt/spark/bin").iterdir():
        script.chmod(0o755)
    entrypoint = root / "opt/entrypoint.sh"
    shutil.copy(HERE / "manifests" / "spark-entrypoint.sh", entrypoint)
    entrypoint.chmod(0o755)


def ray_image(lab: Lab) -> Path:
    """Ray with its dashboard (job submission needs it) and Python."""
    out, packages = lab.images / "ray.tar", pip_folder(lab, "ray", "ray[default]==2.52.1")
    if complete(out):
        return out
    with _folder(lab) as root:
        _base(root)
        _python(root)
        _ray(root, packages)
        write_image(root, "lab.local/ray:2.52.1", out, env={**ENV, "PYTHONPATH": "/opt/ray", "HOME": "/tmp"})
    return out


def _ray(root: Path, packages: Path) -> None:
    add_programs(root, "/bin/bash")
    add_folder(root, packages, "/opt/ray")
    add_programs(
        root,
        *map(str, (root / "opt/ray").rglob("*.so")),
        str(root / "opt/ray/ray/core/src/ray/raylet/raylet"),
        str(root / "opt/ray/ray/core/src/ray/gcs/gcs_server"),
    )
    (root / "usr/bin/ray").write_text("#!/usr/bin/python3\nfrom ray.scripts.scripts import main\nmain()\n")
    (root / "usr/bin/ray").chmod(0o755)


IMAGES: dict[str, Callable[[Lab], Path]] = {
    "python": python_image,
    "gpu-burst": gpu_burst_image,
    "runtime": runtime_image,
    "spark": spark_image,
    "ray": ray_image,
}
