"""Small files share an object: one request for thousands of them instead of one each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from airflow_gpu_burst.checkpoint.manifest import File
from airflow_gpu_burst.checkpoint.walking import Found, Identity, changed, unreadable
from airflow_gpu_burst.transfer import crc

SMALL = 1 << 20
"""Bytes: files below are packed. A request costs about what sending a megabyte does."""
PACK = 32 << 20
"""Bytes of an object that holds several files: like a part of an upload, and two of them fit the agent's memory."""
AT_ONCE = 2
"""Packs in memory: one is read while another is sent."""


def batches(files: Iterable[Found], limit: int = PACK) -> Iterator[list[Found]]:
    """Files in their order, as many together as fit `limit` bytes. Pure."""
    batch: list[Found] = []
    size = 0
    for file in files:
        if batch and size + file.size > limit:
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size
    if batch:
        yield batch


def object_name(files: Iterable[Found]) -> str:
    """
    A name for the object that holds exactly these files as they are now.

    The same files give the same name, so that a repeated save goes on; a file that was written anew gives another.
    """
    digest = hashlib.blake2b(digest_size=10)
    for file in files:
        digest.update(f"{file.path}\0{'-'.join(map(str, file.identity))}\n".encode())
    return digest.hexdigest()


def read_pack(folder: Path, files: list[Found], key: str, buffer: memoryview) -> list[File]:
    """
    The files' contents, one after the other, into `buffer`; where each of them is.

    :raises CheckpointError: one of them is not what it was when it was found.
    """
    root = os.fspath(folder)
    entries = []
    offset = 0
    for file in files:
        place = buffer[offset : offset + file.size]
        _read(f"{root}/{file.path}", file, place)
        entries.append(
            File(
                path=file.path,
                size=file.size,
                crc64nvme=crc.of_bytes(place),
                key=key if file.size else "",
                offset=offset if file.size else None,
                mode=file.mode,
            )
        )
        offset += file.size
    return entries


def _read(path: str, file: Found, place: memoryview) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise unreadable(file.path, error) from error
    try:
        n = os.readv(fd, [place])  # a regular file of this size comes in one piece, or is not what it was
        if n != file.size or Identity.of(os.fstat(fd)) != file.identity:
            raise changed(file.path)
    except OSError as error:
        raise unreadable(file.path, error) from error
    finally:
        os.close(fd)
