"""
Uploads: verified, and all or nothing.

Every request carries the CRC64NVME of its bytes, so that the store refuses what was damaged on the way. What is stored
is then checked: its size always, and the CRC of the whole where the store tells one of type FULL_OBJECT. Some stores
tell none, or the composite of the parts: there only the size is compared (`Tally.unverified` counts them), since
reading all back would double the traffic, and a restore verifies every byte in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, StoreError, StoreUnavailable
from airflow_gpu_burst.transfer import crc
from airflow_gpu_burst.transfer.answers import Fault, Kind
from airflow_gpu_burst.transfer.client import Ask, Client, Reply
from airflow_gpu_burst.transfer.connection import Answer, FileRange
from airflow_gpu_burst.transfer.flow import Halted, never
from airflow_gpu_burst.transfer.frozen import Frozen, frozen
from airflow_gpu_burst.transfer.interface import Buffer, Stored
from airflow_gpu_burst.transfer.parts import LARGEST, part_size

CRC_HEADER = "x-amz-checksum-crc64nvme"
_DAMAGED_MOST = 3  # times that one request's bytes may arrive damaged
_LATE = 5  # looks for an object that was stored and is not seen yet


class Sender:
    """
    What uploads of one mover share.

    :param pool: threads for parts.
    :param width: parts of one file at once.
    :param part: bytes of a part; files up to this size go in one request.
    :param call: makes the requests with the bytes of objects; None: `client.call`.
    """

    def __init__(
        self,
        client: Client,
        pool: ThreadPoolExecutor,
        *,
        width: int,
        part: int,
        call: Callable[..., Reply] | None = None,
    ) -> None:
        self.client, self.pool, self.width, self.part = client, pool, width, min(part, LARGEST)
        self._call = call or client.call
        self.checksums = True  # until the store refuses the headers

    def file(self, key: str, path: Path, state: Path | None) -> Stored:
        """See `Mover.upload`."""
        from airflow_gpu_burst.transfer.multipart import Multipart

        with frozen(path) as file:
            if file.size > self.part:
                return Multipart(self, key, file, state, part_size(file.size, self.part)).run()
            stored = self.one(key, FileRange(file.fd, 0, file.size), file)
            try:
                file.check()
            except CheckpointError:
                self._forget(key)
                raise
            return stored

    def bytes(self, key: str, data: Buffer) -> Stored:
        """See `Mover.put`."""
        return self.one(key, data)

    def one(self, key: str, body: Buffer | FileRange, file: Frozen | None = None) -> Stored:
        """An object in one request."""
        ask = Ask(action="put", method="PUT", key=key, body=body)
        reply, sum_ = self.verified(ask, file, never)
        if reply.answer.headers.get(CRC_HEADER) == crc.to_header(sum_):
            return Stored(key=key, size=ask.size, crc64nvme=sum_, etag=reply.answer.headers.get("etag", ""))
        return self.seen(key, ask.size, sum_)

    def verified(
        self, ask: Ask, file: Frozen | None, halted: Halted, *, sum_: int | None = None, expected: tuple[Kind, ...] = ()
    ) -> tuple[Reply, int]:
        """
        A request with the CRC of its body, made again when the bytes did not arrive as they were.

        :param sum_: the body's CRC, when it is known.
        :returns: the answer, and the CRC.
        :raises CheckpointError: the file changed.
        :raises ChecksumMismatch: the bytes are damaged each time.
        """
        for _ in range(_DAMAGED_MOST):
            found = self._sum(ask.body, file, halted)
            if sum_ is not None and found != sum_:
                raise file.changed() if file else AssertionError("memory changed under an upload")
            sum_ = found
            reply = self._with_sum(ask, sum_, file, halted, (Kind.DAMAGED, *expected))
            if reply.fault is None or reply.fault.kind is not Kind.DAMAGED:
                return reply, sum_
        raise ChecksumMismatch(
            f"{ask.action} {ask.key!r} in {self.client.config.uri}: the store received other bytes than were sent, "
            f"{_DAMAGED_MOST} times. Something on the way damages them: check network and memory of this node"
        )

    def seen(self, key: str, size: int, sum_: int) -> Stored:
        """
        What the store says of an object that was just stored.

        :raises ChecksumMismatch: it is not what was sent.
        :raises StoreUnavailable: it is not there (yet).
        """
        found = self._look(key)
        where = f"{key!r} in {self.client.config.uri}"
        if found is None:
            raise StoreUnavailable(
                f"{where} was stored and is not there: upload it again, and look at the store's health"
            )
        problem = difference(found, size, sum_)
        if problem:
            raise ChecksumMismatch(f"{where} {problem}. Upload it again; if it recurs, look at the store's disks")
        if found.headers.get(CRC_HEADER) != crc.to_header(sum_):
            self.client.flow.count(unverified=1)
        return Stored(key=key, size=size, crc64nvme=sum_, etag=found.headers.get("etag", ""))

    def matches(self, key: str, size: int, sum_: int) -> Answer | None:
        """The object's head, if it is there and is what was sent."""
        found = self._look(key, looks=1)
        return found if found is not None and not difference(found, size, sum_) else None

    def refuses_checksums(self, found: Fault | None) -> bool:
        """Whether that may be about the checksum headers; they are then left out from now on."""
        refused = self.checksums and found is not None and _about_headers(found)
        if refused:
            self.checksums = False
        return refused

    def _look(self, key: str, looks: int = _LATE) -> Answer | None:
        headers = {"x-amz-checksum-mode": "ENABLED"}
        ask = Ask(action="get", method="HEAD", key=key, headers=headers)
        for look in range(looks):
            self.client.flow.pause(0.2 * look, never)
            reply = self.client.call(ask, expected=(Kind.MISSING,))
            if reply.fault is None:
                return reply.answer
        return None

    def _sum(self, body: Buffer | FileRange | None, file: Frozen | None, halted: Halted) -> int:
        if not isinstance(body, FileRange):
            return crc.of_bytes(body or b"")
        try:
            return crc.of_range(body.fd, body.start, body.length, check=lambda: self.client.flow.check(halted))
        except crc.FileEnded as error:
            raise _of(file).changed("was truncated") from error

    def _with_sum(self, ask: Ask, sum_: int, file: Frozen | None, halted: Halted, expected: tuple[Kind, ...]) -> Reply:
        while True:
            extra = {CRC_HEADER: crc.to_header(sum_)} if self.checksums else {}
            sent = Ask(
                action=ask.action, method=ask.method, key=ask.key, query=ask.query, headers={**ask.headers, **extra},
                body=ask.body,
            )  # fmt: skip
            may_refuse = (Kind.UNSUPPORTED, Kind.FINAL) if extra else ()
            try:
                reply = self._call(sent, expected=(*expected, *may_refuse), halted=halted)
            except crc.FileEnded as error:
                raise _of(file).changed("was truncated") from error
            found = reply.fault
            if found is None or found.kind in expected:
                return reply
            if not self.refuses_checksums(found):
                raise found.error(ask.action, ask.key, self.client.config)

    def _forget(self, key: str) -> None:
        with suppress(StoreError):
            self.client.call(Ask(action="delete", method="DELETE", key=key), expected=(Kind.MISSING,), attempts=2)


def difference(found: Answer, size: int, sum_: int) -> str:
    """How an object's head differs from what was sent; empty: not at all, as far as the store tells."""
    headers = found.headers
    if headers.get("content-length") != str(size):
        return f"has {headers.get('content-length')} bytes, and {size} were sent"
    told = headers.get(CRC_HEADER)
    if told and headers.get("x-amz-checksum-type") == "FULL_OBJECT" and told != crc.to_header(sum_):
        return f"has CRC64NVME {told}, and {crc.to_header(sum_)} was sent"
    return ""


def _about_headers(found: Fault) -> bool:
    codes = {"InvalidRequest", "InvalidArgument", "NotImplemented", "InvalidChecksum", ""}
    return found.kind is Kind.UNSUPPORTED or (found.status == 400 and found.code in codes)


def _of(file: Frozen | None) -> Frozen:
    assert file is not None, "a range of a file comes with its file"
    return file
