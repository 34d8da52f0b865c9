"""What uploads, copies and deletions do to servers that are no tests' own: moto, and the lab's S3 server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import ChecksumMismatch, ObjectMissing, StoreError
from airflow_gpu_burst.store import StoreConfig, open_store
from airflow_gpu_burst.transfer import copying, crc
from airflow_gpu_burst.transfer.client import Ask
from airflow_gpu_burst.transfer.connection import FileRange
from airflow_gpu_burst.transfer.deleting import delete
from airflow_gpu_burst.transfer.multipart import Multipart, abandon
from airflow_gpu_burst.transfer.uploading import Sender
from tests.faulty_s3 import FaultyS3
from tests.transfer.wire import PART, client, file_of, sender

SIZE = 3 * PART + 77


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    made = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **keys)
    made.create_bucket(Bucket="burst")
    made.close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["faulty", "moto", pytest.param("lab", marks=pytest.mark.lab)])
def config(request: pytest.FixtureRequest) -> Iterator[StoreConfig]:
    if request.param == "faulty":
        with FaultyS3() as server:
            yield server.config("some/prefix")
    elif request.param == "lab":
        yield request.getfixturevalue("stack").store()
    else:
        yield StoreConfig(
            uri=f"s3://burst/{time.time_ns()}",
            endpoint_url=request.getfixturevalue("moto"),
            access_key_id="key",
            secret_access_key="secret",
        )


@pytest.fixture
def sending(config: StoreConfig) -> Iterator[Sender]:
    with sender(config) as made:
        yield made


@pytest.mark.parametrize("size", [0, 1, PART, SIZE])
def test_an_upload_is_what_boto3_reads(config: StoreConfig, sending: Sender, tmp_path: Path, size: int) -> None:
    data = file_of(tmp_path / "file", size)
    name = "a b/ü+&=%/$'()*,;:@!~"
    stored = sending.file(name, tmp_path / "file", tmp_path / "state")
    assert open_store(config).get(name) == data
    assert stored.crc64nvme == crc.of_bytes(data)
    assert [entry.key for entry in open_store(config).list("")] == [name]


def test_memory(config: StoreConfig, sending: Sender) -> None:
    sending.bytes("key", b"")
    assert open_store(config).get("key") == b""
    sending.bytes("key", b"other")
    assert open_store(config).get("key") == b"other"


def test_going_on(config: StoreConfig, tmp_path: Path) -> None:
    """Interrupted after two parts."""
    data = file_of(tmp_path / "file", SIZE)
    state = tmp_path / "state"
    original = Multipart._part

    def failing(self: Multipart, part: object, progress: object) -> tuple[str, int]:
        if part.number > 2:  # type: ignore[attr-defined]
            raise StoreError("enough")
        return original(self, part, progress)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, sender(config, width=1) as sending:
        patch.setattr(Multipart, "_part", failing)
        with pytest.raises(StoreError, match="enough"):
            sending.file("key", tmp_path / "file", state)
    assert state.exists()
    with sender(config) as sending:
        sending.file("key", tmp_path / "file", state)
        assert sending.client.flow.tally.resumed_bytes == 2 * PART
        assert sending.client.flow.tally.bytes_sent < SIZE - 2 * PART + 10_000
    assert open_store(config).get("key") == data
    assert [entry.key for entry in open_store(config).list("")] == ["key"]


def test_abandon(request: pytest.FixtureRequest, config: StoreConfig, sending: Sender, tmp_path: Path) -> None:
    file_of(tmp_path / "file", SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Multipart, "_completed", lambda *_: (_ for _ in ()).throw(StoreError("killed")))
        with pytest.raises(StoreError, match="killed"):
            sending.file("key", tmp_path / "file", tmp_path / "state")
    assert [entry.key for entry in open_store(config).list("")] == ["key.upload"]
    abandon(sending.client, "key")
    abandon(sending.client, "key")
    assert list(open_store(config).list("")) == []
    if "moto" in request.node.name:
        return  # it answers 500 to ListParts of an upload that is gone
    # Nothing is left to go on with, and that is found out.
    sending.file("key", tmp_path / "file", tmp_path / "state")
    assert sending.client.flow.tally.resumed_bytes == 0


def test_a_wrong_sum_is_refused(request: pytest.FixtureRequest, config: StoreConfig, sending: Sender) -> None:
    if "moto" in request.node.name:
        pytest.skip("moto takes any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crc, "of_bytes", lambda data, previous=0: 7)
        with pytest.raises(ChecksumMismatch, match="other bytes than were sent"):
            sending.bytes("key", b"data")
    assert list(open_store(config).list("")) == []


@pytest.mark.parametrize("large", [False, True])
def test_copies(
    config: StoreConfig, sending: Sender, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(copying, "_AT_ONCE", PART)
    data = file_of(tmp_path / "file", SIZE)
    sending.file("a b/ü+%", tmp_path / "file", None)
    copying.copy(sending.client, "a b/ü+%", sending.client, "target/ä", SIZE, sending.pool)
    assert open_store(config).get("target/ä") == data
    with pytest.raises(ChecksumMismatch, match="should have"):
        copying.copy(sending.client, "a b/ü+%", sending.client, "target/b", SIZE - 1, sending.pool)
    with pytest.raises(ObjectMissing):
        copying.copy(sending.client, "none", sending.client, "target/c", SIZE, sending.pool)


def test_deletions(config: StoreConfig, sending: Sender) -> None:
    store = open_store(config)
    keys = ["a&b<c>", "ü/ä", "x+y z%", 'it\'s "so"']
    for key in [*keys, "stays"]:
        store.put(key, b"x")
    delete(sending.client, [*keys, "never/was"])
    assert [entry.key for entry in store.list("")] == ["stays"]
    delete(sending.client, [])


def test_more_than_a_thousand() -> None:
    with FaultyS3() as server:
        made = client(server.config())
        for number in range(2500):
            made.call(Ask(action="put", method="PUT", key=f"k{number}", body=b"")) if number % 100 == 0 else None
        delete(made, (f"k{number}" for number in range(2500)))
        assert server.count("DeleteObjects") == 3
        assert not server.bucket.objects
        made.close()


def test_deletions_where_many_at_once_are_not_known() -> None:
    with FaultyS3() as server:
        made = client(server.config())
        server.fault("DeleteObjects", times=None, status=501, code="NotImplemented")
        made.call(Ask(action="put", method="PUT", key="k", body=b""))
        delete(made, ["k", "l"])
        assert not server.bucket.objects and server.count("DeleteObject") == 2
        made.close()


def test_a_deletion_that_is_refused() -> None:
    with FaultyS3() as server:
        made = client(server.config())
        body = b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>"

        def refused(_call: object, reply: object) -> object:
            reply.body = body  # type: ignore[attr-defined]
            return reply

        server.fault("DeleteObjects", change=refused)
        with pytest.raises(StoreError, match="s3:DeleteObject"):
            delete(made, ["k"])
        made.close()


@pytest.mark.parametrize("large", [False, True])
def test_faults_of_copies(tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(copying, "_AT_ONCE", PART)
    kind = "UploadPartCopy" if large else "CopyObject"
    with FaultyS3() as server, sender(server.config()) as sending:
        data = file_of(tmp_path / "file", SIZE)
        sending.file("a", tmp_path / "file", None)
        for fault in ({"status": 200, "code": "InternalError"}, {"status": 503, "code": "SlowDown"}, {"lost": True}):
            server.fault(kind, **fault)
            copying.copy(sending.client, "a", sending.client, "b", SIZE, sending.pool)
            assert server.data("b") == data
        server.bucket.copies = False
        with pytest.raises(NotImplementedError):
            copying.copy(sending.client, "a", sending.client, "c", SIZE, sending.pool)
        assert not server.bucket.uploads


def test_100_uploads_at_once(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(100)]
    for number, path in enumerate(files):
        path.write_bytes(str(number).encode() * 1000)
    big = file_of(tmp_path / "big", SIZE)
    with FaultyS3() as server, sender(server.config()) as sending, ThreadPoolExecutor(16) as pool:
        late = pool.submit(sending.file, "big", tmp_path / "big", None)
        list(pool.map(lambda path: sending.file(path.name, path, None), files))
        late.result()
        assert all(server.data(path.name) == path.read_bytes() for path in files)
        assert server.data("big") == big
        assert sending.client.flow.tally.retries == 0


def test_a_range_in_a_request(tmp_path: Path) -> None:
    file_of(tmp_path / "file", 1000)
    with FaultyS3() as server, (tmp_path / "file").open("rb") as file:
        made = client(server.config())
        made.call(Ask(action="put", method="PUT", key="k", body=FileRange(file.fileno(), 10, 20)))
        assert server.data("k") == (tmp_path / "file").read_bytes()[10:30]
        with suppress(StoreError):
            made.close()
