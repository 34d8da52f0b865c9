"""Uploads against a server that does wrong: whatever it does, what is stored is what was sent, or it is said."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.errors import (
    CheckpointError,
    ChecksumMismatch,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreUnavailable,
)
from airflow_gpu_burst.transfer import MIB, crc
from airflow_gpu_burst.transfer.client import ATTEMPTS, Ask
from airflow_gpu_burst.transfer.connection import FileRange
from airflow_gpu_burst.transfer.uploading import Sender
from tests.faulty_s3 import FaultyS3
from tests.transfer.wire import PART, file_of, sender

PARTS = 4
SIZE = 3 * PART + 12345


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file_of(tmp_path / "file", SIZE)
    return tmp_path / "file"


@pytest.fixture
def sending(server: FaultyS3) -> Iterator[Sender]:
    with sender(server.config("base"), idle_timeout_s=1.0) as made:
        yield made


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 2 * PART, SIZE])
def test_any_size(tmp_path: Path, size: int, tls: bool) -> None:
    data = file_of(tmp_path / "file", size)
    with FaultyS3(tls=tmp_path / "tls" if tls else None) as server, sender(server.config("base")) as sending:
        stored = sending.file("a b/ü", tmp_path / "file", None)
        assert server.data("base/a b/ü") == data
        assert (stored.key, stored.size, stored.crc64nvme) == ("a b/ü", size, crc.of_bytes(data))
        assert stored.etag == server.bucket.objects["base/a b/ü"].etag
        assert server.count("UploadPart") == (0 if size <= PART else -(-size // PART))
        assert not server.bucket.uploads and set(server.bucket.objects) == {"base/a b/ü"}
        assert sending.client.flow.tally.unverified == 0


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(PART + 1), memoryview(b"xyz")[1:]])
def test_memory(server: FaultyS3, sending: Sender, data: Any) -> None:
    stored = sending.bytes("key", data)
    assert server.data("base/key") == bytes(data)
    assert stored.crc64nvme == crc.of_bytes(bytes(data))
    assert [call.kind for call in server.calls] == ["PutObject"]


PASSING: list[dict[str, Any]] = [
    {"status": 500, "code": "InternalError"},
    {"status": 502},
    {"status": 503, "code": "SlowDown"},
    {"status": 504},
    {"status": 429, "headers": {"retry-after": "1"}},
    {"status": 409, "code": "OperationAborted"},
    {"status": 400, "code": "RequestTimeout"},
    {"status": 404},
    {"reset_after": 0},
    {"lost": True},
    {"close": True},
    {"chunked": True},
    {"interim": True},
    {"status": 500, "code": "InternalError", "times": ATTEMPTS - 1},
    {"status": 503, "code": "SlowDown", "early": True},
    {"delay_s": 3},  # of which 1 s is the idle timeout
]
OF_BODIES: list[dict[str, Any]] = [
    {"reset_after": 100_000},
    {"stall_after": 100_000},
    {"corrupt": True},
    {"rate": 20 * MIB},
    {"status": 400, "code": "BadDigest"},
    {"status": 400, "code": "IncompleteBody"},
]


def named(fault: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in fault.items())


@pytest.mark.parametrize("fault", [*PASSING, *OF_BODIES], ids=named)
@pytest.mark.parametrize("kind", ["UploadPart", "PutObject"])
def test_what_passes_in_a_body(
    server: FaultyS3, sending: Sender, tmp_path: Path, kind: str, fault: dict[str, Any]
) -> None:
    data = file_of(tmp_path / "file", SIZE if kind == "UploadPart" else PART)
    server.fault(kind, **fault)
    stored = sending.file("key", tmp_path / "file", None)
    assert server.data("base/key") == data
    assert stored.crc64nvme == crc.of_bytes(data)
    assert not server.bucket.uploads


@pytest.mark.parametrize(
    "fault",
    [
        *PASSING,
        {"status": 200, "code": "InternalError", "times": 3},
        {"status": 200, "code": "SlowDown"},
        {"status": 200},
        {"truncate": 20},
    ],
    ids=named,
)
@pytest.mark.parametrize("kind", ["CreateMultipartUpload", "CompleteMultipartUpload", "HeadObject"])
def test_what_passes_around_the_parts(
    server: FaultyS3, sending: Sender, file: Path, kind: str, fault: dict[str, Any]
) -> None:
    if kind != "CompleteMultipartUpload" and fault.get("status") == 200:
        pytest.skip("only the outcome of this one comes late")
    if kind == "HeadObject" and (fault.get("status") == 400 or "truncate" in fault or "chunked" in fault):
        pytest.skip("its answer has no body")
    server.fault(kind, **fault)
    sending.file("key", file, None)
    assert server.data("base/key") == file.read_bytes()
    assert server.count("UploadPart") == PARTS


@pytest.mark.parametrize(
    ("kind", "fault", "raised", "text"),
    [
        ("UploadPart", {"status": 403, "code": "AccessDenied"}, StoreForbidden, "s3:PutObject"),
        ("UploadPart", {"status": 507, "code": "XMinioStorageFull"}, StoreFull, "Free space"),
        ("UploadPart", {"status": 501, "code": "NotImplemented"}, StoreError, "cannot do this"),
        ("UploadPart", {"status": 400, "code": "EntityTooSmall"}, StoreError, "EntityTooSmall"),
        ("UploadPart", {"status": 503, "code": "SlowDown"}, StoreUnavailable, "SlowDown"),
        ("UploadPart", {"reset_after": 10}, StoreUnavailable, "check the way"),
        ("UploadPart", {"corrupt": True}, ChecksumMismatch, "other bytes than were sent"),
        ("UploadPart", {"status": 403, "code": "AccessDenied", "early": True}, StoreForbidden, "AccessDenied"),
        ("CreateMultipartUpload", {"status": 404, "code": "NoSuchBucket"}, StoreError, "Create bucket"),
        ("CompleteMultipartUpload", {"status": 200, "code": "AccessDenied"}, StoreForbidden, "AccessDenied"),
        ("CompleteMultipartUpload", {"status": 200, "code": "InternalError"}, StoreUnavailable, "InternalError"),
        ("CompleteMultipartUpload", {"status": 400, "code": "BadDigest"}, StoreUnavailable, "BadDigest"),
        ("HeadObject", {"status": 404}, StoreUnavailable, "is not there"),
        ("HeadObject", {"status": 403}, StoreForbidden, "GetObject"),
    ],
)
def test_what_does_not_pass(
    server: FaultyS3, sending: Sender, file: Path, kind: str, fault: dict[str, Any], raised: type, text: str
) -> None:
    server.fault(kind, times=None, **fault)
    with pytest.raises(raised, match=text) as error:
        sending.file("key", file, None)
    assert type(error.value) is raised
    assert not server.bucket.uploads
    assert "base/key.upload" not in server.bucket.objects


def test_501_and_403_are_not_tried_again(server: FaultyS3, sending: Sender, tmp_path: Path) -> None:
    file_of(tmp_path / "file", 10)
    sending.checksums = False  # with them, one more try finds out whether the server means them
    for status, code in ((501, "NotImplemented"), (403, "AccessDenied")):
        server.fault("PutObject", status=status, code=code)
        before = server.count()
        with pytest.raises(StoreError):
            sending.file("key", tmp_path / "file", None)
        assert server.count() == before + 1


def test_a_failed_part_stops_the_others(server: FaultyS3, sending: Sender, file: Path) -> None:
    server.fault("UploadPart", status=403, code="AccessDenied", when=lambda call: call.query["partNumber"] == "2")
    server.fault("UploadPart", rate=MIB, times=None)  # 5 s each
    began = time.monotonic()
    with pytest.raises(StoreForbidden):
        sending.file("key", file, None)
    assert time.monotonic() - began < 2.5
    assert not server.bucket.uploads


def test_closing_stops_everything(server: FaultyS3, file: Path) -> None:
    server.fault("UploadPart", rate=MIB, times=None)
    from airflow_gpu_burst.transfer.flow import Stopped

    with sender(server.config()) as sending:
        threading.Timer(0.5, sending.client.close).start()
        began = time.monotonic()
        with pytest.raises(Stopped):
            sending.file("key", file, None)
        assert time.monotonic() - began < 2.0


# --- checksums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "unverified"), [("full", 0), ("none", 1), ("composite", 1), ("refuse", 1), ("wrong", None)]
)
def test_what_a_store_tells_of_checksums(
    server: FaultyS3, sending: Sender, file: Path, told: str, unverified: int | None
) -> None:
    server.bucket.checksums = told
    if unverified is None:
        with pytest.raises(ChecksumMismatch, match="was sent"):
            sending.file("key", file, None)
        return
    sending.file("key", file, None)
    assert server.data("base/key") == file.read_bytes()
    assert sending.client.flow.tally.unverified == unverified
    # A store that refused the headers is not asked again.
    refused = server.count()
    sending.file("other", file, None)
    assert server.count() - refused == refused - (1 if told == "refuse" else 0)


@pytest.mark.parametrize("told", ["none", "refuse", "composite"])
def test_a_single_request_to_such_a_store(server: FaultyS3, sending: Sender, told: str) -> None:
    server.bucket.checksums = told
    sending.bytes("key", b"data")
    assert server.data("base/key") == b"data"
    assert server.count("HeadObject") == (0 if told == "composite" else 1)


def test_fewer_bytes_than_were_sent(server: FaultyS3, sending: Sender, file: Path) -> None:
    def shorter(_call: object, reply: Any) -> Any:
        reply.length -= 1
        return reply

    server.fault("HeadObject", change=shorter)
    with pytest.raises(ChecksumMismatch, match=f"{SIZE - 1} bytes, and {SIZE} were sent"):
        sending.file("key", file, None)


# --- a file that is not left alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("how", ["write", "touch", "truncate", "delete", "replace"])
@pytest.mark.parametrize("size", [PART, SIZE])
def test_a_file_that_changes(
    server: FaultyS3, sending: Sender, tmp_path: Path, how: str, size: int, state: bool
) -> None:
    path = tmp_path / "file"
    data = file_of(path, size)
    actions = {
        "write": lambda: path.write_bytes(data[:-1] + b"!"),
        "touch": lambda: os.utime(path),
        "truncate": lambda: os.truncate(path, 1000),
        "delete": path.unlink,
        "replace": lambda: ((tmp_path / "new").write_bytes(data), (tmp_path / "new").rename(path)),
    }

    def change(_call: object, reply: Any) -> Any:
        actions[how]()
        return reply

    server.fault("PutObject" if size == PART else "UploadPart", change=change)
    with pytest.raises(CheckpointError, match="while it was uploaded"):
        sending.file("key", path, tmp_path / "state" if state else None)
    assert not server.bucket.uploads
    assert not server.bucket.objects
    assert not (tmp_path / "state").exists()


def test_a_file_that_changes_between_sum_and_sending(server: FaultyS3, sending: Sender, tmp_path: Path) -> None:
    """Without its size or time telling: as with a mapping that is written to."""
    path = tmp_path / "file"
    data = bytearray(file_of(path, 2 * PART))
    original = Sender._with_sum

    def changed(self: Sender, *args: Any) -> Any:
        if not changed_already:
            changed_already.append(1)
            times = path.stat()
            data[100] ^= 1
            with path.open("r+b") as file:
                file.write(data[:1000])
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return original(self, *args)

    changed_already: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sender, "_with_sum", changed)
        with pytest.raises(CheckpointError, match="changed"):
            sending.file("key", path, None)
    assert not server.bucket.uploads and not server.bucket.objects


def test_no_file(sending: Sender, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone"):
        sending.file("key", tmp_path / "none", None)
    with pytest.raises(CheckpointError, match="plain file"):
        sending.file("key", tmp_path, None)


# --- credentials, clocks, the way ----------------------------------------------------------------------------------


def test_a_clock_that_is_off(server: FaultyS3, sending: Sender, file: Path) -> None:
    skewed = {"status": 403, "code": "RequestTimeTooSkewed", "headers": {"date": "Tue, 01 Jan 2030 00:00:00 GMT"}}
    server.fault("*", when=lambda call: not call.headers["x-amz-date"].startswith("20300101"), times=None, **skewed)
    sending.file("key", file, None)
    assert server.data("base/key") == file.read_bytes()
    # What was in flight when the first answer came is refused once more.
    assert sum(not call.headers["x-amz-date"].startswith("2030") for call in server.calls) == 1


def test_a_clock_that_cannot_be_helped(server: FaultyS3, sending: Sender) -> None:
    server.fault("PutObject", status=403, code="RequestTimeTooSkewed", times=None)
    with pytest.raises(StoreUnavailable, match="RequestTimeTooSkewed"):
        sending.bytes("key", b"data")
    assert server.count() == 2


def test_keys_that_expire(server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    from dataclasses import replace

    config = replace(server.config(), access_key_id="", secret_access_key="")
    server.fault(
        "*",
        when=lambda call: "Credential=old" in call.headers["authorization"],
        times=None,
        status=400,
        code="ExpiredToken",
    )
    with sender(config) as sending:
        with pytest.raises(StoreForbidden, match="ExpiredToken"):
            sending.bytes("key", b"data")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        sending.bytes("key", b"data")
    assert server.data("key") == b"data"


def test_an_authority_that_is_not_trusted(tmp_path: Path) -> None:
    from dataclasses import replace

    with FaultyS3(tls=tmp_path) as server:
        with (
            sender(replace(server.config(), ca_bundle="")) as sending,
            pytest.raises(StoreError, match="AWS_CA_BUNDLE"),
        ):
            sending.bytes("key", b"data")
        with pytest.raises(StoreError, match="correct AWS_CA_BUNDLE"):
            sender(replace(server.config(), ca_bundle=str(tmp_path / "none"))).__enter__()
        assert server.count() == 0


@pytest.mark.timeout(20)
def test_a_file_that_ends_early_over_tls(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    with FaultyS3(tls=tmp_path / "tls") as server, sender(server.config()) as sending:
        with (tmp_path / "file").open("rb") as file, pytest.raises(crc.FileEnded):
            body = FileRange(file.fileno(), 1, MIB)
            sending.client.call(Ask(action="put", method="PUT", key="key", body=body))
        assert not server.bucket.objects


def test_nobody_there(file: Path) -> None:
    with FaultyS3() as server:
        config = server.config()
    with sender(config) as sending, pytest.raises(StoreUnavailable, match="No answer"):
        sending.bytes("key", b"data")


def test_connections_are_kept_and_mended(server: FaultyS3, sending: Sender) -> None:
    for number in range(5):
        sending.bytes(f"key{number}", b"data")
    assert len({call.peer for call in server.calls}) == 1
    # Closed while idle: noticed before a request is lost on it.
    server.fault("PutObject", close=True)
    sending.bytes("key", b"data")
    server.drop_connections()
    time.sleep(0.1)
    sending.bytes("key", b"data")
    assert sending.client.flow.tally.retries == 0


def test_half_an_answer_is_no_closed_connection(server: FaultyS3, sending: Sender) -> None:
    """It counts as an attempt, on a connection that was used before too."""
    sending.bytes("key", b"data")
    server.fault("GetObject", truncate=2, times=None)
    with pytest.raises(StoreUnavailable, match="or half of one"):
        sending.client.call(Ask(action="get", method="GET", key="key"), attempts=3)
    assert server.count("GetObject") == 3


def test_throttling_is_counted_and_told(server: FaultyS3, sending: Sender) -> None:
    server.fault("PutObject", status=503, code="SlowDown", headers={"retry-after": "7"}, times=2)
    sending.bytes("key", b"data")
    tally = sending.client.flow.tally
    assert (tally.throttled, tally.retries, tally.requests) == (2, 2, 3)
    assert sending.client._line.slowed == [7.0, 7.0]  # type: ignore[attr-defined]
