"""What an S3 server's answer asks the sender to do. Pure: no answer is acted on here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from airflow_gpu_burst.errors import StoreError, StoreUnavailable
from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.store.s3_errors import answered
from airflow_gpu_burst.transfer.connection import Answer
from airflow_gpu_burst.transfer.documents import text


class Kind(Enum):
    """What to do about an answer that is no success."""

    AGAIN = "the same again, after a pause"
    SLOW = "less, then again"
    SKEWED = "again, by the server's clock"
    EXPIRED = "again, with new credentials"
    DAMAGED = "the bytes are not those of the checksum"
    NO_UPLOAD = "the multipart upload is not known"
    BAD_PART = "a part that was uploaded is not there, or is another"
    MISSING = "there is no such object"
    CHANGED = "the object is not the one that was asked for"
    UNSUPPORTED = "the server cannot do this"
    FINAL = "nothing helps"


_BY_CODE = {
    "SlowDown": Kind.SLOW,
    "SlowDownWrite": Kind.SLOW,
    "SlowDownRead": Kind.SLOW,
    "TooManyRequests": Kind.SLOW,
    "Throttling": Kind.SLOW,
    "ThrottlingException": Kind.SLOW,
    "RequestTimeTooSkewed": Kind.SKEWED,
    "ExpiredToken": Kind.EXPIRED,
    "BadDigest": Kind.DAMAGED,
    "XAmzContentChecksumMismatch": Kind.DAMAGED,
    "NoSuchUpload": Kind.NO_UPLOAD,
    "InvalidPart": Kind.BAD_PART,
    "NoSuchKey": Kind.MISSING,
    "PreconditionFailed": Kind.CHANGED,
    "NotImplemented": Kind.UNSUPPORTED,
    "OperationAborted": Kind.AGAIN,
    "ConditionalRequestConflict": Kind.AGAIN,
    "RequestTimeout": Kind.AGAIN,
    "InternalError": Kind.AGAIN,
    "IncompleteBody": Kind.AGAIN,
    "ServiceUnavailable": Kind.SLOW,
    "AccessDenied": Kind.FINAL,
    "InvalidAccessKeyId": Kind.FINAL,
    "SignatureDoesNotMatch": Kind.FINAL,
    "EntityTooSmall": Kind.FINAL,
    "EntityTooLarge": Kind.FINAL,
}
_BY_STATUS = {
    408: Kind.AGAIN,
    409: Kind.AGAIN,
    412: Kind.CHANGED,
    425: Kind.AGAIN,
    429: Kind.SLOW,
    501: Kind.UNSUPPORTED,
    503: Kind.SLOW,
    507: Kind.FINAL,
}
_RETRY_AFTER_MOST_S = 120.0  # a longer one would look like a hang; the request is made again then


@dataclass(frozen=True, slots=True)
class Fault:
    """
    :param code: S3's, e.g. `SlowDown`; empty: the answer has none.
    :param retry_after_s: what the server asked for.
    """

    kind: Kind
    status: int
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None

    def error(self, action: str, key: str, config: StoreConfig) -> StoreError:
        """As an error of the package; `action` as in `store.s3_errors`."""
        # An error inside a 200 came after the server had begun: it may have been done, or not.
        status = self.status if self.status >= 300 else 500
        if self.kind is Kind.UNSUPPORTED:
            where = config.endpoint_url or "the region's own endpoint"
            said = f"{action} {key!r} in {config.uri}: HTTP {status} {self.code} {self.message}".rstrip()
            return StoreError(f"{said}. The store at {where} cannot do this; use one that can")
        return answered(status, self.code, self.message, action, key, config)


def fault(answer: Answer, *, late: bool = False, head: bool = False) -> Fault | None:
    """
    None: a success.

    :param late: the request is one whose error may come in the body of a 200 (complete, copy).
    :param head: it was a HEAD, so that an error has no code.
    """
    status, code = answer.status, text(answer.body, "Code")
    if 200 <= status < 300:
        if not late or b"Result" in answer.body:
            return None
        # Neither: cut off between the early 200 and the outcome, and a proxy made a whole answer of it.
        return Fault(_BY_CODE.get(code, Kind.AGAIN), status, code, text(answer.body, "Message") or "no outcome")
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is None:
        kind = Kind.AGAIN if status >= 500 else Kind.FINAL
    if status == 404 and not code:  # a proxy that has no backend just now says so too; but a HEAD's answer has no code
        kind = Kind.MISSING if head else Kind.AGAIN
    return Fault(kind, status, code, text(answer.body, "Message"), _retry_after(answer))


def unanswered(problem: Exception, action: str, key: str, config: StoreConfig) -> StoreError:
    """No answer, or half of one, as an error of the package."""
    where = config.endpoint_url or "the region's own endpoint"
    said = f"{action} {key!r} in {config.uri}: {problem}"
    if "CERTIFICATE_VERIFY_FAILED" in str(problem):
        return StoreError(f"{said}. Set AWS_CA_BUNDLE to the file with the server's certificate authority")
    return StoreUnavailable(f"{said}. No answer, or half of one, from {where}; check the way to it")


def _retry_after(answer: Answer) -> float | None:
    asked = answer.headers.get("retry-after", "")
    return min(float(asked), _RETRY_AFTER_MOST_S) if asked.isdecimal() else None
