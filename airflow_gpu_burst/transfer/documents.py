"""The XML that S3 takes and gives in multipart uploads and deletions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import unescape
from xml.sax.saxutils import escape

from airflow_gpu_burst.transfer import crc


@dataclass(frozen=True, slots=True)
class Listed:
    """
    A part as the store has it.

    :param crc64nvme: None: the store does not tell.
    """

    number: int
    size: int
    etag: str
    crc64nvme: int | None = None


def completion(parts: Iterable[tuple[int, str, int]], *, checksums: bool) -> bytes:
    """The body of CompleteMultipartUpload, from (number, ETag, CRC)."""
    lines = ['<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">']
    for number, etag, crc64nvme in parts:
        sum_ = f"<ChecksumCRC64NVME>{crc.to_header(crc64nvme)}</ChecksumCRC64NVME>" if checksums else ""
        lines.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>{sum_}</Part>")
    return ("\n".join(lines) + "\n</CompleteMultipartUpload>").encode()


def deletion(names: Iterable[str]) -> bytes:
    """The body of DeleteObjects; the answer then names only what failed."""
    objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
    return f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{objects}<Quiet>true</Quiet></Delete>'.encode()


def listed_parts(body: bytes) -> tuple[list[Listed], str]:
    """The parts on a page of ListParts, and where the next page begins; empty: this was the last."""
    found = []
    for element in elements(body, "Part"):
        sum_ = text(element, "ChecksumCRC64NVME")
        number, size = int(text(element, "PartNumber")), int(text(element, "Size"))
        found.append(Listed(number, size, text(element, "ETag"), crc.from_header(sum_) if sum_ else None))
    more = text(body, "IsTruncated") == "true"
    return found, text(body, "NextPartNumberMarker") if more else ""


def elements(body: bytes, tag: str) -> Iterator[bytes]:
    """What stands inside each element of a name, for elements that do not contain their own kind."""
    name = tag.encode()
    for match in re.finditer(rb"<%b(?:\s[^>]*)?>(.*?)</%b>" % (name, name), body, re.DOTALL):
        yield match[1]


def text(body: bytes, tag: str) -> str:
    """The text of the first element of a name, or empty."""
    found = re.search(rb"<%b(?:\s[^>]*)?>([^<]*)</%b>" % (tag.encode(), tag.encode()), body)
    return unescape(found[1].decode(errors="replace")) if found else ""
