"""
Ranges of an S3 object into files of this node: parallel, each verified while it is written.

A range whose stream breaks goes on where it broke. One whose bytes are wrong is fetched once more. Of a server that
ignores ranges, and sends the object from its start each time, one stream is taken, and what is wanted of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from typing import Protocol

from airflow_gpu_burst.errors import ChecksumMismatch
from airflow_gpu_burst.transfer import ranges
from airflow_gpu_burst.transfer.answers import Kind
from airflow_gpu_burst.transfer.client import Ask, Client, Reply
from airflow_gpu_burst.transfer.connection import Answer, Broken, Into, Sink
from airflow_gpu_burst.transfer.flow import Halted
from airflow_gpu_burst.transfer.interface import Span
from airflow_gpu_burst.transfer.ranges import NotWritten, Piece
from airflow_gpu_burst.transfer.together import all_of

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_EXPECTED = (Kind.CHANGED, Kind.FINAL)
_IDLE_ANSWERS = 3  # successes in a row without a byte that is wanted


class _RangesIgnored(Exception):
    """The server sends the whole object, whatever part of it is asked for."""


class _Enough(Exception):
    """All that is wanted of an answer has come; its rest may be gigabytes."""


class Call(Protocol):
    """`Client.call`, or what does the same by RDMA."""

    def __call__(
        self, ask: Callable[[], Ask], *, into: Into | None, expected: Collection[Kind], halted: Halted
    ) -> Reply:
        """See `Client.call`."""
        ...


def fetch(
    client: Client, pool: Executor, key: str, spans: Sequence[Span], *, etag: str = "", call: Call | None = None
) -> None:
    """
    See `Mover.fetch`.

    :param pool: threads for pieces.
    :param call: makes the requests; None: `client` does.
    """
    what = f"{key!r} in {client.config.uri}"

    def some(wanted: Sequence[Span]) -> Sequence[Piece]:
        found = ranges.pieces(wanted)
        alone = len(found) == 1

        def one(piece: Piece, halted: Halted) -> None:
            _Download(client, call or client.call, key, what, etag, piece, alone=alone).run(halted)

        try:
            all_of(pool, found, one)
        except _RangesIgnored:
            found = ranges.whole(wanted)
            alone = True
            all_of(pool, found, one)
        return found

    ranges.verified(what, spans, some, lambda count: client.flow.count(retries=count))


class _Download:
    """
    One piece of an object.

    :param alone: no other stream brings a part of the same object.
    """

    def __init__(
        self, client: Client, call: Call, key: str, what: str, etag: str, piece: Piece, *, alone: bool
    ) -> None:
        self._config, self._call, self._key, self._what, self._etag = client.config, call, key, what, etag
        self._piece, self._alone = piece, alone
        self._skip = 0  # bytes of the present answer that come before what is wanted

    def run(self, halted: Halted) -> None:
        idle = 0
        while not self._piece.done:
            before = self._piece.at
            try:
                reply = self._call(self._ask, into=self._into, expected=_EXPECTED, halted=halted)
            except _Enough:
                return
            except NotWritten as error:
                raise ranges.not_written(error, self._what) from error
            if reply.fault is not None:
                raise self._error(reply.fault.status) or reply.fault.error("get", self._key, self._config)
            idle = idle + 1 if self._piece.at == before else 0
            if idle == _IDLE_ANSWERS:
                raise ranges.too_short(self._what, self._piece.at, self._piece.end)

    def _ask(self) -> Ask:
        headers = {"range": f"bytes={self._piece.at}-{self._piece.end - 1}", "accept-encoding": "identity"}
        if self._etag:
            headers["if-match"] = self._etag
        return Ask(action="get", method="GET", key=self._key, headers=headers)

    def _into(self, answer: Answer) -> Sink:
        if answer.status == 206:
            self._skip = self._ahead(answer.headers.get("content-range", ""))
        elif self._alone:
            self._skip = self._piece.at
            self._check_size(answer.headers.get("content-length", ""))
        else:
            raise _RangesIgnored
        return self._take

    def _take(self, view: memoryview) -> None:
        if self._skip:
            skipped = min(self._skip, len(view))
            self._skip -= skipped
            view = view[skipped:]
        more = len(view) > self._piece.end - self._piece.at
        self._piece.take(view)
        if more:
            raise _Enough

    def _ahead(self, told: str) -> int:
        """How many bytes of an answer come before what is wanted, by its Content-Range."""
        found = _CONTENT_RANGE.fullmatch(told.strip())
        start = int(found[1]) if found else -1
        if found is None or not start <= self._piece.at <= int(found[2]):
            raise Broken(f"a range of {told[:60]!r} where bytes from {self._piece.at} on were asked for")
        if found[3] != "*":
            self._check_size(found[3])
        return self._piece.at - start

    def _check_size(self, told: str) -> None:
        if told.isdecimal() and int(told) < self._piece.end:
            raise ranges.too_short(self._what, int(told), self._piece.end)

    def _error(self, status: int) -> ChecksumMismatch | None:
        if status == 412:
            return ChecksumMismatch(
                f"{self._what} is not the object with ETag {self._etag} any more: something wrote over it. Use an "
                "older one; see what writes there"
            )
        if status == 416:
            return ranges.too_short(self._what, self._piece.at, self._piece.end)
        return None
