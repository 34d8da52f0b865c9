"""What S3 servers and networks do to requests. For `Gate`: functions of one request."""

from __future__ import annotations

import email.utils
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from tests.kill.gate import Asked, Spoilt, Weather

_DATE = re.compile(rb"(?im)^date:[^\r\n]*")
_SIGNED_AT = re.compile(rb"(?im)^x-amz-date:[ \t]*(\d{8}T\d{6}Z)")
_CHECKSUM = re.compile(rb"(?im)(^x-amz-checksum-crc64nvme:[ \t]*|<ChecksumCRC64NVME>)[A-Za-z0-9+/=]+")
SKEW_S = 15 * 60
"""S3 refuses what was signed further away from its own clock."""


def error(status: str, code: str, *headers: str) -> bytes:
    """An answer of S3 that refuses."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/xml", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def fair(asked: Asked) -> Spoilt | None:
    """Nothing happens."""
    return None


def rough(seed: str, share: float = 0.03) -> Weather:
    """Some requests are cut, refused for now, or slow."""
    rng, lock = random.Random(seed), threading.Lock()
    kinds = (
        Spoilt(cut="before"),
        Spoilt(cut="during"),
        Spoilt(cut="after"),
        Spoilt(answer=error("503 Slow Down", "SlowDown", "Retry-After: 1")),
        Spoilt(answer=error("500 Internal Server Error", "InternalError")),
        Spoilt(rate=1e6),
    )

    def of(asked: Asked) -> Spoilt | None:
        with lock:
            return rng.choice(kinds) if rng.random() < share else None

    return of


def once(matches: Callable[[Asked], bool], spoilt: Spoilt, *, times: int = 1) -> Weather:
    """The first requests that match are spoilt."""
    lock = threading.Lock()
    left = times

    def of(asked: Asked) -> Spoilt | None:
        nonlocal left
        with lock:
            if left and matches(asked):
                left -= 1
                return spoilt
        return None

    return of


def clock(
    ahead_s: float,
    matches: Callable[[Asked], bool] = lambda asked: True,
    *,
    jump_s: float = 0.0,
    after: int = 0,
    until: int = sys.maxsize,
) -> Weather:
    """
    The server's clock is not the node's: it says so in `Date`, and refuses what is signed too far from it.

    :param matches: these requests only.
    :param jump_s: what is added after so many requests, until so many.
    """
    lock = threading.Lock()
    count = 0

    def of(asked: Asked) -> Spoilt | None:
        nonlocal count
        if not matches(asked):
            return None
        with lock:
            count += 1
            now = time.time() + ahead_s + (jump_s if after < count <= until else 0.0)
        date = f"Date: {email.utils.formatdate(now, usegmt=True)}"
        signed = _SIGNED_AT.search(asked.head)
        if signed and abs(_seconds(signed[1].decode()) - now) > SKEW_S:
            return Spoilt(answer=error("403 Forbidden", "RequestTimeTooSkewed", date))
        return Spoilt(change=lambda answer: _DATE.sub(date.encode(), answer, count=1))

    return of


def wrong_checksum(answer: bytes) -> bytes:
    """The answer with another CRC64NVME in it."""
    return _CHECKSUM.sub(rb"\g<1>AAAAAAAAAAA=", answer)


def flipped(answer: bytes) -> bytes:
    """The answer with one bit of its body wrong."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    if not body:
        return answer
    spoilt = bytearray(body)
    spoilt[len(body) // 2] ^= 1
    return head + blank + bytes(spoilt)


def empty_listing(asked: Asked) -> bytes:
    """A listing that knows of nothing yet."""
    body = (
        b"<?xml version='1.0'?><ListBucketResult><Name>b</Name><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys>"
        b"<IsTruncated>false</IsTruncated></ListBucketResult>"
    )
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return head + body


def _seconds(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
