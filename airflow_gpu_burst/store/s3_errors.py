"""What an S3 server's answer means: the one place that turns it, and botocore's errors, into ours."""

from __future__ import annotations

from typing import Any

from airflow_gpu_burst.errors import (
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreUnavailable,
)
from airflow_gpu_burst.store.config import StoreConfig

_PERMISSION = {
    "get": "s3:GetObject, and s3:ListBucket (without it S3 says 403 of a key that does not exist)",
    "download": "s3:GetObject",
    "put": "s3:PutObject",
    "create": "s3:PutObject",
    "upload": "s3:PutObject, s3:AbortMultipartUpload and s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}

_MISSING = {"NoSuchKey", "NoSuchUpload"}
_PASSING = {
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "OperationAborted",
}
_FORBIDDEN = {"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"}


def mapped(error: Exception, action: str, key: str, config: StoreConfig) -> StoreError:
    """The error of ours that `error` means for `action` on `key`."""
    from botocore.exceptions import ClientError

    if isinstance(error, ClientError):
        answer: Any = error.response
        detail = answer.get("Error", {})
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return answered(status, str(detail.get("Code", "")), str(detail.get("Message", "")), action, key, config)
    return _unanswered(error, f"{action} {key!r} in {config.uri}", config)


def answered(status: int, code: str, message: str, action: str, key: str, config: StoreConfig) -> StoreError:
    """The error of ours that an answer means: HTTP status, S3's own error code (empty: none) and its message."""
    doing = f"{action} {key!r} in {config.uri}"
    text = f"{doing}: HTTP {status} {code} {message}".rstrip()
    endpoint = config.endpoint_url or "the region's own endpoint"

    if code in _MISSING:
        return ObjectMissing(text)
    if code == "NoSuchBucket":
        return StoreError(f"{text}. Create bucket {config.bucket!r} at {endpoint}, or correct GPU_BURST_STORE")
    if status == 507 or "QuotaExceeded" in code or "StorageFull" in code:
        return StoreFull(f"{text}. Free space in the store, raise its quota, or set GPU_BURST_STORE to another")
    if status in (401, 403) or code in _FORBIDDEN:
        return _refused(text, code, action)
    if status == 412:
        if action == "create":
            return ObjectExists(f"{doing}: there is an object already")
        return StoreError(f"{text}. The object changed while it was read: keys of data are written once")
    if action == "create" and status in (400, 501) and code in ("NotImplemented", "InvalidArgument", ""):
        return StoreError(f"{text}. The store cannot do `If-None-Match: *`; use one that can")
    if status in (409, 429) or status >= 500 or code in _PASSING:
        return StoreUnavailable(f"{text}. Nothing is known about the object; try again")
    if status == 404:
        # A proxy without a backend says 404 too. Taken for "no such key", it would wipe a run's memory.
        return StoreUnavailable(f"{text}. That is no answer of an S3 server; check endpoint {endpoint}")
    return StoreError(f"{text}. Check bucket, region ({config.region or 'default'}) and endpoint ({endpoint})")


def _refused(text: str, code: str, action: str) -> StoreError:
    if code == "RequestTimeTooSkewed":
        return StoreUnavailable(f"{text}. This machine's clock, or the store's, is off: set it right, then try again")
    return StoreForbidden(f"{text}. This needs {_PERMISSION[action]}; check the store's credentials and policy")


def _unanswered(error: Exception, doing: str, config: StoreConfig) -> StoreError:
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    text = f"{doing}: {error}"
    if isinstance(
        error,
        boto.NoCredentialsError
        | boto.PartialCredentialsError
        | boto.CredentialRetrievalError
        | boto.TokenRetrievalError,
    ):
        return StoreForbidden(f"{text}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role")
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StoreError(f"{text}. Set AWS_CA_BUNDLE to the file with the server's certificate authority")
    if isinstance(
        error,
        boto.HTTPClientError | boto.ConnectionError | boto.IncompleteReadError | ResponseParserError,
    ):
        where = config.endpoint_url or "the region's own endpoint"
        return StoreUnavailable(f"{text}. No answer, or half of one, from {where}; check the way to it")
    return StoreError(f"{text}. Correct the store's configuration")
