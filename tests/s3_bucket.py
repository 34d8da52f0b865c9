"""An S3 bucket in memory, with the semantics that this package relies on. No network, no faults: see `faulty_s3`."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from awscrt.checksums import combine_crc64nvme, crc64nvme

CRC = "x-amz-checksum-crc64nvme"
TYPE = "x-amz-checksum-type"
XML = "application/xml"
_SMALLEST_PART = 5 << 20


@dataclass
class Body:
    """What came with a request: the bytes, or (when the bucket keeps none) only their number and sum."""

    size: int = 0
    crc: int = 0
    data: bytes | None = b""


@dataclass
class Object:
    """
    :param sum: CRC64NVME as the bucket tells it; None: not at all.
    :param late: listings that do not show it yet.
    """

    body: Body
    etag: str
    sum: int | None = None
    type: str = "FULL_OBJECT"
    late: int = 0


@dataclass
class Upload:
    """A multipart upload under way."""

    name: str
    parts: dict[int, Object] = field(default_factory=dict)
    algorithm: str = ""


@dataclass
class Reply:
    """An answer. `length` is Content-Length of a HEAD."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    length: int | None = None


@dataclass(frozen=True)
class Call:
    """
    A request as it came.

    :param kind: of the API: `PutObject`, `UploadPart`, ...
    :param name: of the object, decoded; empty: the bucket.
    :param peer: tells connections apart.
    """

    kind: str
    name: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body = field(default_factory=Body)
    peer: str = ""


class Refusal(Exception):
    """An error answer."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.reply = Reply(status, {"content-type": XML}, error(code, message))


def error(code: str, message: str = "") -> bytes:
    """The body of an error answer."""
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode()


class Bucket:
    """
    :param checksums: what is told of an object: `full`, `composite`, `wrong`, `none` (headers ignored), `refuse` (501).
    :param verify: whether a body with another CRC than its header's is refused, as S3 does.
    :param conditions: `honour`, `ignore`, or `refuse` (501) `If-None-Match`.
    :param page: entries on a page of a listing.
    :param lag: listings that a new object is missing from.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, Upload] = {}
        self.checksums, self.verify, self.conditions = "full", True, "honour"
        self.page, self.lag = 1000, 0
        self.copies = True
        self._lock = threading.RLock()

    def answer(self, call: Call) -> Reply:
        """Do what the request asks for."""
        with self._lock:
            try:
                reply: Reply = getattr(self, f"_{_snake(call.kind)}")(call)
            except Refusal as refusal:
                return refusal.reply
            return reply

    # --- objects --------------------------------------------------------------------------------------------------

    def _put_object(self, call: Call) -> Reply:
        if "if-none-match" in call.headers and self.conditions != "ignore":
            if self.conditions == "refuse":
                raise Refusal(501, "NotImplemented", "If-None-Match")
            if call.name in self.objects:
                raise Refusal(412, "PreconditionFailed")
        self._verified(call)
        stored = self._stored(call)
        self.objects[call.name] = stored
        return Reply(headers={"etag": stored.etag, **self._told(stored)})

    def _get_object(self, call: Call) -> Reply:
        found = self._found(call)
        headers = {"etag": found.etag, "accept-ranges": "bytes"}
        if call.headers.get("x-amz-checksum-mode") == "ENABLED" and "range" not in call.headers:
            headers |= self._told(found)
        if found.body.data is None:
            raise Refusal(500, "InternalError", "this bucket keeps no bytes")
        data = memoryview(found.body.data)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
        if not span:
            return Reply(200, headers, data)
        start, end = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
        if start >= len(data):
            raise Refusal(416, "InvalidRange")
        headers["content-range"] = f"bytes {start}-{end}/{len(data)}"
        return Reply(206, headers, data[start : end + 1])

    def _head_object(self, call: Call) -> Reply:
        try:
            found = self._found(call)
        except Refusal as refusal:
            return Reply(refusal.reply.status, length=0)
        asked = call.headers.get("x-amz-checksum-mode") == "ENABLED"
        return Reply(200, {"etag": found.etag, **(self._told(found) if asked else {})}, length=found.body.size)

    def _delete_object(self, call: Call) -> Reply:
        self.objects.pop(call.name, None)
        return Reply(204)

    def _delete_objects(self, call: Call) -> Reply:
        data = call.body.data or b""
        digest = base64.b64encode(hashlib.md5(data).digest()).decode()
        if call.headers.get("content-md5") != digest:
            raise Refusal(400, "InvalidRequest", "Missing required header for this request: Content-MD5")
        names = re.findall(rb"<Key>([^<]*)</Key>", data)
        if not 1 <= len(names) <= 1000:
            raise Refusal(400, "MalformedXML")
        for name in names:
            self.objects.pop(_unescape(name), None)
        return _xml("<DeleteResult></DeleteResult>")

    def _copy_object(self, call: Call) -> Reply:
        source = self._source(call)
        self.objects[call.name] = Object(source.body, source.etag, source.sum)
        return _xml(f"<CopyObjectResult><ETag>{source.etag}</ETag></CopyObjectResult>")

    def _list_objects_v2(self, call: Call) -> Reply:
        prefix, after = call.query.get("prefix", ""), call.query.get("continuation-token", "")
        after = after or call.query.get("start-after", "")
        names = []
        for name in sorted(self.objects):
            if name.startswith(prefix) and name > after:
                if self.objects[name].late > 0:
                    self.objects[name].late -= 1
                    continue
                names.append(name)
        page, more = names[: self.page], len(names) > self.page
        encoded = call.query.get("encoding-type") == "url"
        contents = "".join(
            f"<Contents><Key>{quote(name, safe='/') if encoded else escape(name)}</Key>"
            f"<Size>{self.objects[name].body.size}</Size></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        kind = "<EncodingType>url</EncodingType>" if encoded else ""
        return _xml(
            f"<ListBucketResult><KeyCount>{len(page)}</KeyCount>{kind}"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
        )

    # --- multipart ------------------------------------------------------------------------------------------------

    def _create_multipart_upload(self, call: Call) -> Reply:
        algorithm = call.headers.get("x-amz-checksum-algorithm", "")
        if algorithm and self.checksums == "refuse":
            raise Refusal(501, "NotImplemented", "checksums")
        upload_id = uuid.uuid4().hex
        self.uploads[upload_id] = Upload(call.name, algorithm=algorithm)
        return _xml(
            "<InitiateMultipartUploadResult>"
            f"<Key>{escape(call.name)}</Key><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )

    def _upload_part(self, call: Call) -> Reply:
        upload = self._upload(call)
        self._verified(call)
        stored = upload.parts[int(call.query["partNumber"])] = self._stored(call)
        return Reply(headers={"etag": stored.etag, **self._told(stored)})

    def _upload_part_copy(self, call: Call) -> Reply:
        upload, source = self._upload(call), self._source(call)
        start, end = map(int, re.findall(r"\d+", call.headers["x-amz-copy-source-range"]))
        data = (source.body.data or b"")[start : end + 1]
        stored = Object(Body(len(data), crc64nvme(data), data), _etag(data))
        upload.parts[int(call.query["partNumber"])] = stored
        return _xml(f"<CopyPartResult><ETag>{stored.etag}</ETag></CopyPartResult>")

    def _complete_multipart_upload(self, call: Call) -> Reply:
        upload = self._upload(call)
        wanted = re.findall(
            rb"<Part>\s*<PartNumber>(\d+)</PartNumber>\s*<ETag>([^<]*)</ETag>", call.body.data or b"", re.DOTALL
        )
        numbers = [int(number) for number, _ in wanted]
        if not numbers or numbers != sorted(set(numbers)):
            raise Refusal(400, "InvalidPartOrder" if numbers else "MalformedXML")
        for number, etag in wanted:
            part = upload.parts.get(int(number))
            if part is None or part.etag != _unescape(etag):
                raise Refusal(400, "InvalidPart", f"part {number.decode()}")
        parts = [upload.parts[number] for number in numbers]
        if any(part.body.size < _SMALLEST_PART for part in parts[:-1]):
            raise Refusal(400, "EntityTooSmall")
        whole = _joined(parts)
        told = call.headers.get(CRC)
        if self.verify and told and told != _header(whole.crc):
            raise Refusal(400, "BadDigest", "the sum of the whole")
        stored = Object(whole, f'"{uuid.uuid4().hex}-{len(parts)}"', whole.crc if upload.algorithm else None)
        stored.late = self.lag
        if self.checksums == "composite":
            stored.type, stored.sum = "COMPOSITE", whole.crc ^ 1
        self.objects[call.name] = stored
        del self.uploads[call.query["uploadId"]]
        return _xml(
            f"<CompleteMultipartUploadResult><Key>{escape(call.name)}</Key>"
            f"<ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>"
        )

    def _abort_multipart_upload(self, call: Call) -> Reply:
        self._upload(call)
        del self.uploads[call.query["uploadId"]]
        return Reply(204)

    def _list_parts(self, call: Call) -> Reply:
        upload = self._upload(call)
        after, most = int(call.query.get("part-number-marker", 0)), int(call.query.get("max-parts", 1000))
        numbers = sorted(number for number in upload.parts if number > after)
        page = numbers[: min(self.page, most)]
        more = len(numbers) > len(page)
        parts = "".join(_part(number, upload.parts[number], self._told(upload.parts[number])) for number in page)
        marker = f"<NextPartNumberMarker>{page[-1]}</NextPartNumberMarker>" if more else ""
        return _xml(f"<ListPartsResult><IsTruncated>{str(more).lower()}</IsTruncated>{marker}{parts}</ListPartsResult>")

    def _list_multipart_uploads(self, call: Call) -> Reply:
        # As MinIO has it: by the exact name alone.
        found = "".join(
            f"<Upload><Key>{escape(upload.name)}</Key><UploadId>{upload_id}</UploadId></Upload>"
            for upload_id, upload in self.uploads.items()
            if upload.name == call.query.get("prefix", "")
        )
        return _xml(f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{found}</ListMultipartUploadsResult>")

    # --- common ---------------------------------------------------------------------------------------------------

    def _found(self, call: Call) -> Object:
        found = self.objects.get(call.name)
        if found is None:
            raise Refusal(404, "NoSuchKey")
        if call.headers.get("if-match", found.etag) != found.etag:
            raise Refusal(412, "PreconditionFailed")
        return found

    def _source(self, call: Call) -> Object:
        if not self.copies:
            raise Refusal(501, "NotImplemented", "copies")
        name = unquote(call.headers["x-amz-copy-source"]).lstrip("/").partition("/")[2]
        if name not in self.objects:
            raise Refusal(404, "NoSuchKey")
        return self.objects[name]

    def _upload(self, call: Call) -> Upload:
        found = self.uploads.get(call.query["uploadId"])
        if found is None or found.name != call.name:
            raise Refusal(404, "NoSuchUpload")
        return found

    def _verified(self, call: Call) -> None:
        told = call.headers.get(CRC)
        if told and self.checksums == "refuse":
            raise Refusal(400, "InvalidRequest", "checksums")
        if told and self.verify and self.checksums != "none" and told != _header(call.body.crc):
            raise Refusal(400, "BadDigest", "the sum of the body")

    def _stored(self, call: Call) -> Object:
        etag = _etag(call.body.data) if call.body.data is not None else f'"{uuid.uuid4().hex}"'
        return Object(call.body, etag, call.body.crc if CRC in call.headers else None, late=self.lag)

    def _told(self, stored: Object) -> dict[str, str]:
        if stored.sum is None or self.checksums == "none":
            return {}
        sum_ = stored.sum ^ 1 if self.checksums == "wrong" else stored.sum
        return {CRC: _header(sum_), TYPE: stored.type}


def _part(number: int, part: Object, told: Mapping[str, str]) -> str:
    sum_ = f"<ChecksumCRC64NVME>{told[CRC]}</ChecksumCRC64NVME>" if CRC in told else ""
    return f"<Part><PartNumber>{number}</PartNumber><ETag>{part.etag}</ETag><Size>{part.body.size}</Size>{sum_}</Part>"


def _joined(parts: list[Object]) -> Body:
    whole = Body(0, 0, b"")
    for part in parts:
        whole.crc = combine_crc64nvme(whole.crc, part.body.crc, part.body.size)
        whole.size += part.body.size
    kept = all(part.body.data is not None for part in parts)
    whole.data = b"".join(part.body.data or b"" for part in parts) if kept else None
    return whole


def _xml(text: str) -> Reply:
    return Reply(200, {"content-type": XML}, f"<?xml version='1.0' encoding='UTF-8'?>\n{text}".encode())


def _etag(data: Any) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _header(sum_: int) -> str:
    return base64.b64encode(sum_.to_bytes(8, "big")).decode()


def _unescape(text: bytes) -> str:
    from html import unescape

    return unescape(text.decode())


def _snake(kind: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower().replace("objectsv2", "objects_v2")
