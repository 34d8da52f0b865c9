"""Deletions, a thousand keys to a request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice

from airflow_gpu_burst.store.s3_errors import answered
from airflow_gpu_burst.transfer import documents
from airflow_gpu_burst.transfer.answers import Kind
from airflow_gpu_burst.transfer.client import Ask, Client

_MOST = 1000
_GONE = {"NoSuchKey", "NoSuchVersion"}


def delete(client: Client, keys: Iterable[str]) -> None:
    """
    Remove many. Those that are not there are fine; a server that cannot do many at once is asked for each.

    :raises StoreError: one could not be removed; others may be gone.
    """
    for some in _batches(keys):
        body = documents.deletion(client.name(key) for key in some)
        # The one request whose checksum S3 demands; MD5, since older servers know no other.
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        ask = Ask(
            action="delete", method="POST", key="", query={"delete": ""}, headers={"content-md5": digest}, body=body
        )
        reply = client.call(ask, expected=(Kind.UNSUPPORTED,))
        if reply.fault is not None:
            for key in some:
                client.call(Ask(action="delete", method="DELETE", key=key), expected=(Kind.MISSING,))
            continue
        for found in documents.elements(reply.answer.body, "Error"):
            code = documents.text(found, "Code")
            if code not in _GONE:
                key = documents.text(found, "Key").removeprefix(client.name(""))
                status = 403 if code == "AccessDenied" else 500
                raise answered(status, code, documents.text(found, "Message"), "delete", key, client.config)


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(keys)
    while some := list(islice(rest, _MOST)):
        yield some
