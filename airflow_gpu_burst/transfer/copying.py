"""Copies within one S3 server: it moves the bytes, this node only asks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from airflow_gpu_burst.errors import ChecksumMismatch, ObjectMissing, StoreError
from airflow_gpu_burst.transfer import documents
from airflow_gpu_burst.transfer.answers import Fault, Kind
from airflow_gpu_burst.transfer.client import Ask, Client
from airflow_gpu_burst.transfer.flow import Halted, never
from airflow_gpu_burst.transfer.interface import MIB
from airflow_gpu_burst.transfer.multipart import abort
from airflow_gpu_burst.transfer.parts import MOST, Part, cut
from airflow_gpu_burst.transfer.signing import quoted

_CANNOT = (Kind.UNSUPPORTED,)
_AT_ONCE = 256 * MIB
"""
Bytes per request. S3 takes 5 GiB, but many servers say nothing until they are done, and 60 s of silence count as a dead
connection: this is 4.5 MB/s.
"""


def copy(origin: Client, source: str, client: Client, target: str, size: int, pool: ThreadPoolExecutor) -> None:
    """
    Copy an object of `origin` to one of `client`, both of the same server.

    :raises NotImplementedError: the server cannot copy.
    :raises ObjectMissing: there is no such source.
    :raises ChecksumMismatch: source or copy are not of that size.
    """
    _has(origin, source, size)
    where = quoted(f"/{origin.config.bucket}/{origin.name(source)}")
    if size <= _AT_ONCE:
        ask = Ask(action="put", method="PUT", key=target, headers={"x-amz-copy-source": where}, late=True)
        _done(client, ask)
    else:
        _in_parts(client, target, where, size, pool)
    _has(client, target, size)


def _has(client: Client, key: str, size: int) -> None:
    reply = client.call(Ask(action="get", method="HEAD", key=key), expected=(Kind.MISSING,))
    if reply.fault is not None:
        raise ObjectMissing(f"copy: {key!r} is not in {client.config.uri}; see whether it was collected as garbage")
    found = reply.answer.headers.get("content-length")
    if found != str(size):
        raise ChecksumMismatch(
            f"{key!r} in {client.config.uri} has {found} bytes and should have {size}. See whether something else "
            "writes there; then copy it again"
        )


def _in_parts(client: Client, target: str, where: str, size: int, pool: ThreadPoolExecutor) -> None:
    reply = client.call(Ask(action="upload", method="POST", key=target, query={"uploads": ""}), expected=_CANNOT)
    _refuse(reply.fault)
    upload_id = documents.text(reply.answer.body, "UploadId")
    failed = False

    def one(part: Part) -> tuple[int, str, int]:
        ask = Ask(
            action="upload",
            method="PUT",
            key=target,
            query={"partNumber": str(part.number), "uploadId": upload_id},
            headers={
                "x-amz-copy-source": where,
                "x-amz-copy-source-range": f"bytes={part.start}-{part.start + part.length - 1}",
            },
            late=True,
        )
        return part.number, documents.text(_done(client, ask, halted=lambda: failed), "ETag"), 0

    try:
        parts = list(pool.map(one, cut(size, max(_AT_ONCE, -(-size // MOST)))))
        body = documents.completion(parts, checksums=False)
        query = {"uploadId": upload_id}
        ask = Ask(action="upload", method="POST", key=target, query=query, body=body, late=True)
        client.call(ask, expected=(Kind.NO_UPLOAD,))  # done by an attempt whose answer was lost; the size tells
    except BaseException:
        failed = True
        with suppress(StoreError):
            abort(client, target, upload_id)
        raise


def _done(client: Client, ask: Ask, halted: Halted = never) -> bytes:
    reply = client.call(ask, expected=_CANNOT, halted=halted)
    _refuse(reply.fault)
    return reply.answer.body


def _refuse(found: Fault | None) -> None:
    if found is not None:
        raise NotImplementedError(f"the store cannot copy: HTTP {found.status} {found.code}")
