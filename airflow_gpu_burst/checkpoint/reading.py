"""Getting a manifest, from a store or by a mover."""

from __future__ import annotations

import os
from typing import cast

from airflow_gpu_burst.checkpoint.manifest import Entries, decode, length_of
from airflow_gpu_burst.errors import ChecksumMismatch
from airflow_gpu_burst.store import Store
from airflow_gpu_burst.transfer import crc
from airflow_gpu_burst.transfer.interface import Mover, Span

TRIES = 3
"""A manifest has no checksum of its own on the wire: one wrong answer must not condemn a checkpoint for good."""


def read_manifest(source: Store | Mover, key: str, sha256: str) -> Entries:
    """
    What a saved tree consists of.

    :param sha256: of the manifest, as the run log has it.
    :raises ChecksumMismatch: its bytes are not the ones that were named.
    :raises ObjectMissing: it is not there.
    :raises CheckpointError: it is of another release, or leads out of its folder.
    """
    for left in reversed(range(TRIES)):
        data = _fetched(cast(Mover, source), key) if hasattr(source, "fetch") else source.get(key)
        try:
            return decode(data, key, sha256)
        except ChecksumMismatch:
            if not left:
                raise
    raise AssertionError("unreachable")


def read_bytes(store: Store, key: str, sha256: str) -> tuple[str, bytes]:
    """
    Key and content of the one file that `save_bytes` has saved.

    :param key: of its manifest.
    :raises ChecksumMismatch: manifest or content are not what was saved.
    :raises ObjectMissing: the store has lost one of them.
    """
    (file,) = read_manifest(store, key, sha256).files
    data = store.get(file.key) if file.size else b""
    if len(data) != file.size or crc.of_bytes(data) != file.crc64nvme:
        raise ChecksumMismatch(
            f"{file.key} is not what was saved ({len(data)} bytes, {file.size} by its manifest); run it again"
        )
    return file.key, data


def _fetched(mover: Mover, key: str) -> bytes:
    length = length_of(key)
    fd = os.memfd_create("manifest", os.MFD_CLOEXEC)
    try:
        mover.fetch(key, [Span(0, length, fd)])
        return os.pread(fd, length, 0)
    finally:
        os.close(fd)
