"""A multipart upload of one file, which goes on where a killed process left it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path

from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, StoreError, StoreUnavailable
from airflow_gpu_burst.transfer import crc, documents
from airflow_gpu_burst.transfer.answers import Kind
from airflow_gpu_burst.transfer.client import Ask, Client
from airflow_gpu_burst.transfer.connection import FileRange
from airflow_gpu_burst.transfer.documents import Listed
from airflow_gpu_burst.transfer.flow import Stopped
from airflow_gpu_burst.transfer.frozen import Frozen
from airflow_gpu_burst.transfer.interface import Stored
from airflow_gpu_burst.transfer.parts import Part, cut
from airflow_gpu_burst.transfer.resuming import Progress, StateFile
from airflow_gpu_burst.transfer.uploading import CRC_HEADER, Sender

NOTE = ".upload"
"""`<key>.upload` in the store names the upload of `<key>` that is under way, for whoever must abort it."""
_BEGINNINGS = 2


class _Lost(Exception):
    """The store has forgotten the upload, or a part of it."""


class Multipart:
    """
    :param part_size: bytes of each part, unless it is gone on with.
    """

    def __init__(self, sender: Sender, key: str, file: Frozen, state: Path | None, part_size: int) -> None:
        self._sender, self._client, self._key, self._file = sender, sender.client, key, file
        self._state, self._part_size = StateFile(state), part_size
        self._failed = threading.Event()
        self._listed: dict[int, Listed] = {}

    def run(self) -> Stored:
        """The stored object. See `Mover.upload`."""
        for left in reversed(range(_BEGINNINGS)):
            progress = self._resumed() or self._begun()
            try:
                stored = self._finished(progress)
            except _Lost as lost:
                self._abort(progress.upload_id)
                self._forget()
                if not left:
                    raise StoreUnavailable(
                        f"upload {self._key!r} in {self._client.config.uri}: {lost}, {_BEGINNINGS} times. See whether "
                        "something removes unfinished uploads; then try again"
                    ) from lost
            except BaseException as error:
                # What can be gone on with is left: a later call with the same state does.
                if not self._state.kept or isinstance(error, CheckpointError | ChecksumMismatch):
                    self._abort(progress.upload_id)
                    self._forget()
                raise
            else:
                self._forget()
                return stored
        raise AssertionError("unreachable")

    # --- beginning ------------------------------------------------------------------------------------------------

    def _resumed(self) -> Progress | None:
        found = self._state.load(self._client.config.uri, self._key)
        if found is None:
            return None
        if found.identity != self._file.identity:
            self._abort(found.upload_id)
            self._forget()
            raise self._file.changed()
        try:
            self._listed = {part.number: part for part in listed(self._client, self._key, found.upload_id)}
        except _Lost:
            return found if len(found.parts) == -(-self._file.size // found.part_size) else None
        return found

    def _begun(self) -> Progress:
        if self._state.kept:  # the state of an earlier attempt may be lost, while its upload still takes room
            abandon(self._client, self._key, listing=False)
        self._listed = {}
        upload_id = self._created()
        progress = Progress(
            uri=self._client.config.uri, key=self._key, upload_id=upload_id, part_size=self._part_size,
            identity=self._file.identity, checksums=self._sender.checksums,
        )  # fmt: skip
        self._state.save(progress, now=True)
        note = json.dumps({"key": self._key, "upload_id": upload_id}).encode()
        self._client.call(Ask(action="put", method="PUT", key=self._key + NOTE, body=note))
        return progress

    def _created(self) -> str:
        while True:
            headers = {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
            sent = headers if self._sender.checksums else {}
            ask = Ask(action="upload", method="POST", key=self._key, query={"uploads": ""}, headers=sent)
            reply = self._client.call(ask, expected=(Kind.UNSUPPORTED, Kind.FINAL) if sent else ())
            if reply.fault is None:
                return _upload_id(reply.answer.body, self._client)
            if not self._sender.refuses_checksums(reply.fault):
                raise reply.fault.error("upload", self._key, self._client.config)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _finished(self, progress: Progress) -> Stored:
        parts = list(cut(self._file.size, progress.part_size))
        # All sent, and the upload is not known: it was completed, and then this process was killed.
        if self._listed or len(progress.parts) < len(parts):
            kept = {n for n, (etag, _) in progress.parts.items() if n in self._listed and self._listed[n].etag == etag}
            progress.parts = {n: progress.parts[n] for n in kept if self._listed[n].size == parts[n - 1].length}
            self._client.flow.count(resumed_bytes=sum(parts[n - 1].length for n in progress.parts))
            self._send([part for part in parts if part.number not in progress.parts], progress)
            self._state.save(progress, now=True)
        self._file.check()
        return self._completed(progress, parts)

    def _send(self, parts: list[Part], progress: Progress) -> None:
        """All of `parts`; the first failure stops the others."""
        self._failed.clear()
        running: dict[Future[tuple[str, int]], int] = {}
        todo = iter(parts)
        try:
            while True:
                for part in _some(todo, self._sender.width - len(running)):
                    running[self._sender.pool.submit(self._part, part, progress)] = part.number
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    progress.parts[running.pop(done)] = done.result()
                self._state.save(progress)
        finally:
            self._failed.set()
            for future in running:
                future.cancel()
            wait(running)  # they use the file's descriptor
            for future in running:
                with suppress(BaseException):
                    progress.parts[running[future]] = future.result()
            if running:
                self._state.save(progress, now=True)

    def _part(self, part: Part, progress: Progress) -> tuple[str, int]:
        """Send one, unless the store has it. Its ETag and CRC."""
        body = FileRange(self._file.fd, part.start, part.length)
        known = self._listed.get(part.number)
        sum_ = None
        if known and known.crc64nvme is not None and known.size == part.length:
            sum_ = self._sum(body)
            if sum_ == known.crc64nvme:
                self._client.flow.count(resumed_bytes=part.length)
                return known.etag, sum_
        query = {"partNumber": str(part.number), "uploadId": progress.upload_id}
        ask = Ask(action="upload", method="PUT", key=self._key, query=query, body=body)
        reply, sum_ = self._sender.verified(ask, self._file, self._failed.is_set, sum_=sum_, expected=(Kind.NO_UPLOAD,))
        if reply.fault is not None:
            raise _Lost("the store does not know the upload any more")
        return reply.answer.headers.get("etag", ""), sum_

    def _sum(self, body: FileRange) -> int:
        try:
            check = self._client.flow.check
            return crc.of_range(body.fd, body.start, body.length, check=lambda: check(self._failed.is_set))
        except crc.FileEnded as error:
            raise self._file.changed("was truncated") from error

    # --- the end --------------------------------------------------------------------------------------------------

    def _completed(self, progress: Progress, parts: list[Part]) -> Stored:
        whole = crc.joined((progress.parts[part.number][1], part.length) for part in parts)
        checksums = progress.checksums and self._sender.checksums
        listing = ((n, etag, sum_) for n, (etag, sum_) in sorted(progress.parts.items()))
        ask = Ask(
            action="upload",
            method="POST",
            key=self._key,
            query={"uploadId": progress.upload_id},
            headers={CRC_HEADER: crc.to_header(whole), "x-amz-checksum-type": "FULL_OBJECT"} if checksums else {},
            body=documents.completion(listing, checksums=checksums),
            late=True,
        )
        found = self._client.call(ask, expected=(Kind.NO_UPLOAD, Kind.BAD_PART, Kind.DAMAGED)).fault
        if found is not None and found.kind is Kind.NO_UPLOAD:
            # Completed already, when the answer to an earlier request was lost.
            if self._sender.matches(self._key, self._file.size, whole) is None:
                raise _Lost("the store does not know the upload any more")
        elif found is not None:
            raise _Lost(f"the store says {found.code} of what it has received")
        return self._sender.seen(self._key, self._file.size, whole)

    def _forget(self) -> None:
        self._state.drop()
        with suppress(StoreError, Stopped):
            self._client.call(Ask(action="delete", method="DELETE", key=self._key + NOTE), attempts=2)

    def _abort(self, upload_id: str) -> None:
        with suppress(StoreError, Stopped):
            abort(self._client, self._key, upload_id)


def listed(client: Client, key: str, upload_id: str) -> Iterator[Listed]:
    """
    The parts that the store has of an upload.

    :raises _Lost: it does not know the upload.
    """
    marker = "0"
    while marker:
        query = {"uploadId": upload_id, "part-number-marker": marker, "max-parts": "1000"}
        reply = client.call(Ask(action="upload", method="GET", key=key, query=query), expected=(Kind.NO_UPLOAD,))
        if reply.fault is not None:
            raise _Lost("the store does not know the upload any more")
        page, following = documents.listed_parts(reply.answer.body)
        yield from page
        marker = following if following != marker else ""


def abort(client: Client, key: str, upload_id: str) -> None:
    """Give up an upload; one that is not known is fine."""
    ask = Ask(action="upload", method="DELETE", key=key, query={"uploadId": upload_id})
    client.call(ask, expected=(Kind.NO_UPLOAD, Kind.MISSING))


def abandon(client: Client, key: str, *, listing: bool = True) -> None:
    """
    Abort what uploads of a key were left half way: the one that its note names, and, when `listing`, those that the
    store lists. (By the exact key: some servers list by nothing else.)
    """
    noted = _noted(client, key)
    for upload_id in [*noted, *(_underway(client, key) if listing else ())]:
        abort(client, key, upload_id)
    if noted or listing:
        client.call(Ask(action="delete", method="DELETE", key=key + NOTE), expected=(Kind.MISSING,))


def _noted(client: Client, key: str) -> list[str]:
    try:
        reply = client.call(Ask(action="get", method="GET", key=key + NOTE), expected=(Kind.MISSING, Kind.FINAL))
        return [str(json.loads(reply.answer.body)["upload_id"])] if reply.fault is None else []
    except (ValueError, KeyError, TypeError):
        return []


def _underway(client: Client, key: str) -> list[str]:
    name = client.name(key)
    ask = Ask(action="list", method="GET", key="", query={"uploads": "", "prefix": name})
    reply = client.call(ask, expected=(Kind.FINAL, Kind.UNSUPPORTED))
    found = documents.elements(reply.answer.body, "Upload") if reply.fault is None else iter(())
    return [documents.text(one, "UploadId") for one in found if documents.text(one, "Key") == name]


def _upload_id(body: bytes, client: Client) -> str:
    found = documents.text(body, "UploadId")
    if not found:
        raise StoreError(
            f"{client.config.uri}: the answer to CreateMultipartUpload names no upload. Is this an S3 server?"
        )
    return found


def _some(parts: Iterator[Part], most: int) -> Iterator[Part]:
    for _ in range(most):
        part = next(parts, None)
        if part is None:
            return
        yield part
