"""
What a saved tree consists of, and the one object that says so. Pure: values, JSON and rules, no I/O.

A manifest lies beside its data and names it by place: `<prefix>/manifest-<bytes>-<hash>.json` and `<prefix>/data/...`.
Its name has its length, so that it is read by one ranged request, and the begin of its SHA-256, so that another one is
another object; the whole of that stands in the run log.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from airflow_gpu_burst.checkpoint.paths import Link, check_links, safe_path
from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, GpuBurstError
from airflow_gpu_burst.store import check_key

VERSION = 2
"""Of the form of a manifest. Raised by hand when a field changes its meaning."""
_NAME = re.compile(r"manifest-([1-9]\d{0,11})-[0-9a-f]{16}\.json")

Extent: TypeAlias = tuple[int, int, int]
"""Start, length and CRC64NVME of bytes in a sparse file; around them are zeros."""


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


class File(NamedTuple):
    """
    :param crc64nvme: of the whole content.
    :param key: the object that holds it; empty for an empty file.
    :param offset: where it begins in an object that holds several; None: the object is this file.
    :param mode: permission bits.
    :param extents: of a sparse file: all its bytes that are not known to be zeros; None: not sparse.
    """

    path: str
    size: int
    crc64nvme: int
    key: str
    offset: int | None = None
    mode: int = 0o644
    extents: tuple[Extent, ...] | None = None


class Same(NamedTuple):
    """A further name (hard link) of the file `same_as`."""

    path: str
    same_as: str


@dataclass(frozen=True)
class Entries:
    """
    What a tree consists of, each kind sorted by path.

    :param folders: those that are empty; others follow from the paths.
    """

    files: tuple[File, ...] = ()
    folders: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    same: tuple[Same, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def keys(self) -> frozenset[str]:
        """The objects that hold the data."""
        return frozenset(file.key for file in self.files if file.key)


def encode(entries: Entries, prefix: str) -> tuple[Manifest, bytes]:
    """The manifest of a tree whose data lies below `prefix`, and its bytes: equal trees are equal bytes."""
    objects = sorted(entries.keys)
    number = {key: index for index, key in enumerate(objects)}
    content = {
        "version": VERSION,
        "objects": [_relative(key, prefix) for key in objects],
        "files": [_row(file, number.get(file.key)) for file in entries.files],
        "folders": entries.folders,
        "links": entries.links,
        "same": entries.same,
    }
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    sha256 = hashlib.sha256(data).hexdigest()
    manifest = Manifest(
        key=f"{prefix}/manifest-{len(data)}-{sha256[:16]}.json",
        sha256=sha256,
        files=len(entries.files),
        size=entries.size,
    )
    return manifest, data


def decode(data: bytes, key: str, sha256: str) -> Entries:
    """
    Back from `encode`.

    :param key: where it was read: names of objects begin there.
    :param sha256: what the run log says.
    :raises ChecksumMismatch: these are not the bytes that were named.
    :raises CheckpointError: another version, or a path that leads out of its folder.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ChecksumMismatch(
            f"manifest {key}: SHA-256 {found[:12]}…, and the run log says {sha256[:12]}…; restore another checkpoint"
        )
    try:
        content = json.loads(data)
        version = content.get("version")
    except (ValueError, AttributeError) as error:
        raise _malformed(key, error) from error
    if version != VERSION:
        raise CheckpointError(
            f"manifest {key} has version {version!r}, and this package reads {VERSION}; "
            "use the release of airflow-gpu-burst that wrote it"
        )
    try:
        return _entries(content, key.rpartition("/")[0])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, GpuBurstError):
            raise
        raise _malformed(key, error) from error


def length_of(key: str) -> int:
    """
    How many bytes a manifest has, by its name.

    :raises CheckpointError: that is no manifest's name.
    """
    found = _NAME.fullmatch(key.rpartition("/")[2])
    if found is None:
        raise CheckpointError(
            f"{key!r} is no manifest of this release (manifest-<bytes>-<hash>.json); use the release that wrote it"
        )
    return int(found[1])


def _relative(key: str, prefix: str) -> str:
    assert key.startswith(f"{prefix}/"), key
    return key[len(prefix) + 1 :]


def _row(file: File, number: int | None) -> tuple[Any, ...]:
    row = (file.path, file.size, f"{file.crc64nvme:016x}", number, file.offset, file.mode)
    return row if file.extents is None else (*row, [(start, n, f"{crc:016x}") for start, n, crc in file.extents])


def _entries(content: Mapping[str, Any], prefix: str) -> Entries:
    objects = [check_key(f"{prefix}/{safe_path(name)}") for name in content["objects"]]
    entries = Entries(
        files=tuple(_files(content["files"], objects)),
        folders=tuple(safe_path(path) for path in content["folders"]),
        links=tuple(Link(safe_path(path), _text(target)) for path, target in content["links"]),
        same=tuple(Same(safe_path(path), safe_path(same_as)) for path, same_as in content["same"]),
    )
    check_links(entries.links)
    return entries


def _files(rows: list[list[Any]], objects: list[str]) -> Iterator[File]:
    for row in rows:
        path, size, crc, number, offset, mode, *more = row
        if size < 0 or (offset or 0) < 0 or (number is None) != (size == 0):
            raise ValueError(f"size {size}, offset {offset}, object {number} of {path!r}")
        extents = tuple((start, length, int(part, 16)) for start, length, part in more[0]) if more else None
        key = "" if number is None else objects[number]
        yield File(safe_path(path), size, int(crc, 16), key, offset, mode & 0o777, extents)


def _text(target: str) -> str:
    if not target or "\0" in target:
        raise ValueError(f"link to {target!r}")
    return target


def _malformed(key: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"manifest {key} does not read as one ({error}). Nothing of this package writes such; find out what else "
        "writes to the store, and restore another checkpoint"
    )
