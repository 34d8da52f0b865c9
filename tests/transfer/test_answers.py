from __future__ import annotations

import pytest

from airflow_gpu_burst import errors
from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.transfer.answers import Kind, fault, unanswered
from airflow_gpu_burst.transfer.connection import Answer
from airflow_gpu_burst.transfer.documents import completion, deletion, listed_parts
from tests.s3_bucket import error

CONFIG = StoreConfig(uri="s3://bucket", endpoint_url="http://store:9000")


@pytest.mark.parametrize(
    ("status", "code", "kind", "raised"),
    [
        (400, "BadDigest", Kind.DAMAGED, errors.StoreError),
        (400, "RequestTimeout", Kind.AGAIN, errors.StoreUnavailable),
        (400, "InvalidRequest", Kind.FINAL, errors.StoreError),
        (400, "ExpiredToken", Kind.EXPIRED, errors.StoreForbidden),
        (401, "", Kind.FINAL, errors.StoreForbidden),
        (403, "AccessDenied", Kind.FINAL, errors.StoreForbidden),
        (403, "RequestTimeTooSkewed", Kind.SKEWED, errors.StoreUnavailable),
        (403, "", Kind.FINAL, errors.StoreForbidden),
        (404, "NoSuchKey", Kind.MISSING, errors.ObjectMissing),
        (404, "NoSuchUpload", Kind.NO_UPLOAD, errors.ObjectMissing),
        (404, "NoSuchBucket", Kind.FINAL, errors.StoreError),
        (404, "", Kind.AGAIN, errors.StoreUnavailable),
        (409, "OperationAborted", Kind.AGAIN, errors.StoreUnavailable),
        (409, "ConditionalRequestConflict", Kind.AGAIN, errors.StoreUnavailable),
        (412, "PreconditionFailed", Kind.CHANGED, errors.StoreError),
        (429, "", Kind.SLOW, errors.StoreUnavailable),
        (500, "InternalError", Kind.AGAIN, errors.StoreUnavailable),
        (501, "NotImplemented", Kind.UNSUPPORTED, errors.StoreError),
        (501, "", Kind.UNSUPPORTED, errors.StoreError),
        (502, "", Kind.AGAIN, errors.StoreUnavailable),
        (503, "SlowDown", Kind.SLOW, errors.StoreUnavailable),
        (503, "", Kind.SLOW, errors.StoreUnavailable),
        (504, "", Kind.AGAIN, errors.StoreUnavailable),
        (507, "XMinioStorageFull", Kind.FINAL, errors.StoreFull),
        (301, "PermanentRedirect", Kind.FINAL, errors.StoreError),
    ],
)
def test_what_an_answer_asks_for(status: int, code: str, kind: Kind, raised: type[Exception]) -> None:
    found = fault(Answer(status, {}, error(code, "a < b") if code else b"<html>"))
    assert found is not None
    assert (found.kind, found.code) == (kind, code)
    made = found.error("upload", "key", CONFIG)
    assert type(made) is raised
    assert "'key'" in str(made)
    if code:
        assert "a < b" in str(made)


@pytest.mark.parametrize("status", [200, 204, 206])
def test_success(status: int) -> None:
    assert fault(Answer(status, {}, b"")) is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (error("InternalError"), Kind.AGAIN),
        (error("SlowDown"), Kind.SLOW),
        (error("NoSuchUpload"), Kind.NO_UPLOAD),
        (error("AccessDenied"), Kind.FINAL),
        (error("SomethingNew"), Kind.AGAIN),
        (b"", Kind.AGAIN),
        (b"<?xml version='1.0'?>\n   ", Kind.AGAIN),
        (b"<CompleteMultipartUploadResult><Key>k</Key></CompleteMultipartUploadResult>", None),
        (b"\n  <CopyObjectResult xmlns='x'/>", None),
    ],
)
def test_200_says_nothing_where_the_outcome_comes_late(body: bytes, kind: Kind | None) -> None:
    found = fault(Answer(200, {}, body), late=True)
    assert (found.kind if found else None) is kind
    if found and kind is not Kind.FINAL and kind is not Kind.NO_UPLOAD:
        assert isinstance(found.error("upload", "key", CONFIG), errors.StoreUnavailable)


def test_a_heads_404_has_no_code() -> None:
    found = fault(Answer(404, {}), head=True)
    assert found is not None and found.kind is Kind.MISSING


@pytest.mark.parametrize(("text", "seconds"), [("3", 3.0), ("99999", 120.0), ("", None), ("soon", None), ("-1", None)])
def test_retry_after(text: str, seconds: float | None) -> None:
    found = fault(Answer(503, {"retry-after": text}))
    assert found is not None and found.retry_after_s == seconds


def test_no_answer() -> None:
    assert isinstance(unanswered(OSError("refused"), "get", "key", CONFIG), errors.StoreUnavailable)
    wrong = unanswered(OSError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "get", "key", CONFIG)
    assert not wrong.retryable and "AWS_CA_BUNDLE" in str(wrong)


def test_documents() -> None:
    assert b"<Key>a&lt;b&amp;c</Key>" in deletion(["a<b&c"])
    body = completion([(1, '"e"', 1), (2, '"f"', 2)], checksums=True)
    assert body.count(b"<ChecksumCRC64NVME>AAAAAAAAAAE=</ChecksumCRC64NVME>") == 1
    assert b"Checksum" not in completion([(1, '"e"', 1)], checksums=False)
    page = (
        b"<R><IsTruncated>true</IsTruncated><NextPartNumberMarker>2</NextPartNumberMarker>"
        b"<Part><PartNumber>1</PartNumber><ETag>&quot;e&quot;</ETag><Size>5</Size>"
        b"<ChecksumCRC64NVME>AAAAAAAAAAE=</ChecksumCRC64NVME></Part>"
        b"<Part>\n<PartNumber>2</PartNumber><ETag>f</ETag><Size>6</Size></Part></R>"
    )
    parts, following = listed_parts(page)
    assert [(p.number, p.size, p.etag, p.crc64nvme) for p in parts] == [(1, 5, '"e"', 1), (2, 6, "f", None)]
    assert following == "2"
    assert listed_parts(page.replace(b"true", b"false"))[1] == ""
