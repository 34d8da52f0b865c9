"""Save a folder under a key prefix with a manifest; restore it, verified, from the manifest alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch
from airflow_gpu_burst.store import Store

MANIFEST_VERSION = 1
_BLOCK = 1 << 20  # hashing and copying granularity: big enough for the disk, small enough for a pod


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """
    A saved tree: where its manifest lies, and the SHA-256 of the manifest's bytes.

    :param size: bytes of all files.
    """

    key: str
    sha256: str
    files: int
    size: int


def save_tree(store: Store, folder: Path, prefix: str) -> Manifest:
    """
    Upload every file under `folder` to `prefix`/data/…, then the manifest to `prefix`/manifest.json.

    `prefix` must be one that no other writer uses (the run log's `data_prefix` is such a one).

    :raises CheckpointError: a link, a special file, or a file that changed while it was read.
    """
    entries: list[dict[str, Any]] = []
    for path in _walk(folder):
        relative = path.relative_to(folder).as_posix()
        _safe(relative)
        if path.is_dir():
            entries.append({"path": relative, "directory": True})
            continue
        key = f"{prefix}/data/{len(entries):06d}-{hashlib.sha256(relative.encode()).hexdigest()[:12]}"
        size, sha256 = _upload_frozen(store, path, key)
        entries.append({"path": relative, "size": size, "sha256": sha256, "key": key})
    return _save_manifest(store, prefix, entries)


def save_bytes(store: Store, data: bytes, prefix: str, name: str) -> Manifest:
    """A tree of one file, given as bytes."""
    key = f"{prefix}/data/{name}"
    store.put(key, data)
    entry = {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "key": key}
    return _save_manifest(store, prefix, [entry])


def restore_tree(store: Store, key: str, sha256: str, target: Path) -> int:
    """
    Bring the tree of a manifest back under `target`, verified; returns the bytes restored.

    :raises ChecksumMismatch: manifest or file are not what was saved.
    :raises ObjectMissing: the store has lost one of them.
    """
    return restore_trees(store, [(key, sha256)], target)


def restore_trees(store: Store, manifests: Sequence[tuple[str, str]], target: Path) -> int:
    """
    Bring several trees back into one folder; returns the bytes restored.

    Where two trees have the same path, or one a file where the other has a folder, the earlier manifest wins, and what
    loses is not even fetched.

    :param manifests: (key, SHA-256), the most important one first.
    :raises ChecksumMismatch: a manifest or file is not what was saved.
    :raises ObjectMissing: the store has lost one of them.
    """
    total = 0
    target.mkdir(parents=True, exist_ok=True)
    for number, (key, entry) in enumerate(_chosen(store, manifests)):
        path = target / _safe(entry["path"])
        if entry.get("directory"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the tree first: what stands under its own name is verified, and no name of the tree is in the way.
        landed = target.with_name(f".landing-{number}")
        store.download(entry["key"], str(landed))
        found = _hash(landed)
        if found != entry["sha256"] or landed.stat().st_size != entry["size"]:
            landed.unlink()
            raise ChecksumMismatch(
                f"{entry['key']}: SHA-256 {found[:12]}…, and the manifest {key} says {entry['sha256'][:12]}…"
            )
        landed.rename(path)
        total += int(entry["size"])
    return total


def _chosen(store: Store, manifests: Sequence[tuple[str, str]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The entries to restore, each with the key of its manifest: none of them stands in another's way."""
    chosen: list[tuple[str, Mapping[str, Any]]] = []
    files: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    for key, sha256 in manifests:
        for entry in read_manifest(store, key, sha256):
            path = _safe(entry["path"])
            above = set(path.parents)
            is_folder = bool(entry.get("directory"))
            if path in files or above & files or (path in folders and not is_folder):
                continue
            folders |= above | ({path} if is_folder else set())
            if not is_folder:
                files.add(path)
            chosen.append((key, entry))
    return chosen


def read_manifest(store: Store, key: str, sha256: str) -> list[Mapping[str, Any]]:
    """
    The entries of a manifest.

    :raises ChecksumMismatch: its bytes are not the ones that were named.
    """
    data = store.get(key)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ChecksumMismatch(f"manifest {key}: SHA-256 {found[:12]}…, and the run log says {sha256[:12]}…")
    content = json.loads(data)
    if content.get("version") != MANIFEST_VERSION:
        raise CheckpointError(
            f"manifest {key} has version {content.get('version')!r}, and this package reads {MANIFEST_VERSION}; "
            "use the release of airflow-gpu-burst that wrote it"
        )
    files: list[Mapping[str, Any]] = content["files"]
    return files


def _save_manifest(store: Store, prefix: str, entries: list[dict[str, Any]]) -> Manifest:
    content = {"version": MANIFEST_VERSION, "files": entries}
    data = json.dumps(content, sort_keys=True, ensure_ascii=False).encode()
    key = f"{prefix}/manifest.json"
    store.put(key, data)
    files = [e for e in entries if "key" in e]
    return Manifest(
        key=key,
        sha256=hashlib.sha256(data).hexdigest(),
        files=len(files),
        size=sum(int(e["size"]) for e in files),
    )


def _walk(folder: Path) -> Iterator[Path]:
    """Files, and folders that are empty (they do not exist in an object store), in a stable order."""
    for root, directories, names in os.walk(folder):
        directories.sort()
        here = Path(root)
        for name in sorted(names + [d for d in directories if (here / d).is_symlink()]):
            path = here / name
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(
                    f"{path.relative_to(folder)} is a link or a special file; save plain files and folders only"
                )
            yield path
        if not names and not directories and here != folder:
            yield here


def _upload_frozen(store: Store, path: Path, key: str) -> tuple[int, str]:
    before = path.stat()
    sha256 = _hash(path)
    store.upload(key, str(path))
    after = path.stat()
    if (before.st_ino, before.st_size, before.st_mtime_ns) != (
        after.st_ino,
        after.st_size,
        after.st_mtime_ns,
    ):
        raise CheckpointError(
            f"{path.name} changed while it was uploaded; write the whole checkpoint before saying that it is ready"
        )
    return after.st_size, sha256


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _safe(relative: str) -> PurePosixPath:
    path = PurePosixPath(relative)
    try:
        relative.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"file name {relative!r} is no UTF-8; rename the file") from error
    if path.is_absolute() or ".." in path.parts or "\\" in relative or "\0" in relative or not path.parts:
        raise CheckpointError(f"path {relative!r} has a backslash or leaves its folder: neither saved nor restored")
    return path
