"""OCI images without a daemon: folders become layers of an image tarball that `ctr images import` takes."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import LabError, sh

ENV = {"PATH": "/bin:/usr/bin:/usr/local/bin:/sbin"}
OCI = "application/vnd.oci.image"


def write_image(
    root: Path,
    ref: str,
    out: Path,
    *,
    base: Path | None = None,
    entrypoint: Sequence[str] = (),
    cmd: Sequence[str] = (),
    env: Mapping[str, str] = ENV,
) -> None:
    """
    Write `root` as the image `ref` into the OCI layout tarball `out`, and beside it what `import_order` needs.

    The same files give the same digests.

    :param base: tarball of an image whose layers come first. They are not written again: whoever imports this image
        imports that one before.
    """
    below = _facts(base)["layers"] if base else []
    layer = out.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        tar.add(root, arcname=".", filter=_anonymous)
    blobs: dict[str, Path | bytes] = {}

    def blob(kind: str, data: Path | bytes) -> dict[str, Any]:
        digest = _sha(data) if isinstance(data, Path) else hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        return {"mediaType": f"{OCI}.{kind}", "digest": f"sha256:{digest}", "size": size}

    layers = [*below, blob("layer.v1.tar", layer)]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Cmd": list(cmd), "Env": [f"{k}={v}" for k, v in env.items()]},
        "rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": blob("config.v1+json", json.dumps(config).encode()),
        "layers": layers,
    }
    names = {"io.containerd.image.name": ref, "org.opencontainers.image.ref.name": ref.rsplit(":", 1)[1]}
    found = {**blob("manifest.v1+json", json.dumps(manifest).encode()), "annotations": names}
    _write_layout(out, json.dumps({"schemaVersion": 2, "manifests": [found]}).encode(), blobs)
    layer.unlink()
    facts = {"ref": ref, "digest": found["digest"], "base": str(base) if base else None, "layers": layers}
    out.with_suffix(".json").write_text(json.dumps(facts))


def _write_layout(out: Path, index: bytes, blobs: Mapping[str, Path | bytes]) -> None:
    scratch, partial = out.with_suffix(".scratch"), out.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:

        def put(name: str, data: Path | bytes) -> None:
            if isinstance(data, bytes):
                scratch.write_bytes(data)
                data = scratch
            tar.add(data, arcname=name)

        put("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        put("index.json", index)
        for digest, data in blobs.items():
            put(f"blobs/sha256/{digest}", data)
    scratch.unlink()
    partial.replace(out)


def _facts(out: Path) -> dict[str, Any]:
    return dict(json.loads(out.with_suffix(".json").read_text()))


def import_order(out: Path) -> list[tuple[str, str, Path]]:
    """Reference, digest and tarball of what has to be imported for this image, in this order."""
    facts = _facts(out)
    before = import_order(Path(facts["base"])) if facts["base"] else []
    return [*before, (facts["ref"], facts["digest"], out)]


def complete(out: Path) -> bool:
    """True when the image was written to its end, and what it stands on too."""
    if not (out.exists() and out.with_suffix(".json").exists()):
        return False
    base = _facts(out)["base"]
    return base is None or complete(Path(base))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _sha(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# --- what goes into the folders ------------------------------------------------------------------------------------


def add_programs(root: Path, *programs: str) -> None:
    """Copy host programs and the shared libraries they name into `root`, at the same paths; what is there stays."""
    paths = [Path(program if program.startswith("/") else shutil.which(program) or "") for program in programs]
    for program, path in zip(programs, paths, strict=True):
        if not path.is_file():
            raise LabError(f"no program {program} to put into an image: install it, or take it out of the recipe")
    for source in {*paths, *libraries(paths)}:
        if source.is_relative_to(root):
            continue
        target = root / str(source).lstrip("/")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source.resolve(), target)


def libraries(paths: Sequence[Path]) -> set[Path]:
    """The shared libraries that programs and libraries name."""
    lines = sh("ldd", *paths, check=False).splitlines() if paths else []
    words = {word for line in lines if not line.endswith(":") for word in line.split()}
    return {Path(word) for word in words if word.startswith("/")}


def add_folder(root: Path, source: Path, at: str) -> None:
    """Copy a host folder into `root`; nothing is copied twice."""
    target = root / at.lstrip("/")
    if not target.exists():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
