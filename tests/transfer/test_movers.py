"""What every mover promises, over a directory, an S3 server of our own, moto, and the lab's."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, ObjectMissing, StoreError, StoreUnavailable
from airflow_gpu_burst.store import StoreConfig, open_store
from airflow_gpu_burst.transfer import MIB, Mover, Settings, Span, crc, open_mover
from tests.faulty_s3 import FaultyS3

PART = 5 * MIB


@pytest.fixture(params=["directory", "faulty", "moto", pytest.param("lab", marks=pytest.mark.lab)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    if request.param == "directory":
        yield StoreConfig(uri=f"file://{tmp_path}/store")
    elif request.param == "faulty":
        with FaultyS3() as server:
            yield server.config("some/prefix")
    elif request.param == "moto":
        endpoint = request.getfixturevalue("moto")
        yield StoreConfig(
            uri=f"s3://bucket/{time.time_ns()}",
            endpoint_url=endpoint,
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret",
        )
    else:
        yield request.getfixturevalue("stack").store()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **keys)  # type: ignore[call-overload]
    client.create_bucket(Bucket="bucket")
    client.close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def mover(config: StoreConfig) -> Iterator[Mover]:
    mover = open_mover(config, Settings(part_size=PART, connections=4))
    yield mover
    mover.close()


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def file_of(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def fetched(mover: Mover, key: str, size: int, folder: Path, sum_: int | None = None, etag: str = "") -> bytes:
    """A whole object, by way of a file."""
    with (folder / "fetched").open("w+b") as file:
        mover.fetch(key, [Span(0, size, file.fileno(), 0, sum_)], etag=etag)
        file.seek(0)
        return file.read()


@pytest.mark.parametrize("size", [0, 1, MIB, PART, PART + 1, 2 * PART, 3 * PART - 7])
def test_a_file_comes_back_as_it_was(mover: Mover, tmp_path: Path, size: int) -> None:
    data = data_of(size)
    stored = mover.upload("a/b c/ü%20+", file_of(tmp_path / "file", data), state=tmp_path / "state")
    assert (stored.key, stored.size, stored.crc64nvme) == ("a/b c/ü%20+", size, crc.of_bytes(data))
    assert not (tmp_path / "state").exists()
    assert fetched(mover, stored.key, size, tmp_path, stored.crc64nvme, stored.etag) == data
    assert mover.tally.bytes_sent >= size
    assert mover.tally.bytes_received >= size


def test_it_is_what_the_store_has(config: StoreConfig, mover: Mover, tmp_path: Path) -> None:
    mover.upload("a/file", file_of(tmp_path / "file", b"abc"))
    mover.put("a/memory", b"def")
    store = open_store(config)
    assert store.get("a/file") == b"abc"
    assert store.get("a/memory") == b"def"
    assert [(entry.key, entry.size) for entry in store.list("")] == [("a/file", 3), ("a/memory", 3)]
    assert mover.uri == store.uri


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(3 * MIB), memoryview(b"abcdef")[2:]])
def test_memory_comes_back_as_it_was(mover: Mover, tmp_path: Path, data: bytes) -> None:
    stored = mover.put("memory", data)
    assert (stored.size, stored.crc64nvme) == (len(data), crc.of_bytes(data))
    assert fetched(mover, "memory", len(data), tmp_path, stored.crc64nvme) == bytes(data)


def test_over_what_was_there(mover: Mover, tmp_path: Path) -> None:
    mover.put("key", b"before")
    mover.upload("key", file_of(tmp_path / "file", b"after!"))
    assert fetched(mover, "key", 6, tmp_path) == b"after!"


def test_a_file_that_is_gone(mover: Mover, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="leave"):
        mover.upload("key", tmp_path / "nothing")


@pytest.mark.parametrize("size", [100_000, 3 * PART])
@pytest.mark.parametrize("change", ["write", "touch", "truncate", "replace", "delete"])
def test_a_file_that_changes_is_not_stored(config: StoreConfig, tmp_path: Path, size: int, change: str) -> None:
    """It is changed as soon as half of it has gone."""
    mover = open_mover(config, Settings(part_size=PART, connections=2, cap=size / 0.4))
    path = file_of(tmp_path / "file", data_of(size))

    def disturb() -> None:
        while mover.tally.bytes_sent < size / 3:
            time.sleep(0.005)
        if change == "write":
            with path.open("r+b") as file:
                file.write(b"!")
        elif change == "touch":
            os.utime(path, ns=(1, 1))
        elif change == "truncate":
            os.truncate(path, size // 3)
        elif change == "replace":
            (tmp_path / "other").write_bytes(data_of(size, 2))
            os.replace(tmp_path / "other", path)
        else:
            path.unlink()

    thread = threading.Thread(target=disturb)
    thread.start()
    with pytest.raises(CheckpointError, match="while it was uploaded"):
        mover.upload("key", path)
    thread.join()
    mover.close()
    assert list(open_store(config).list("")) == []


class TestRanges:
    SIZE = 2 * PART + 12345

    @pytest.fixture
    def data(self, mover: Mover, tmp_path: Path) -> bytes:
        data = data_of(self.SIZE)
        mover.upload("key", file_of(tmp_path / "file", data))
        return data

    def test_any_to_any_place(self, mover: Mover, data: bytes, tmp_path: Path) -> None:
        chance = random.Random(7)
        with (tmp_path / "a").open("w+b") as a, (tmp_path / "b").open("w+b") as b:
            spans, at = [], {a: 0, b: 0}
            for _ in range(300):
                start = chance.randrange(self.SIZE)
                length = min(chance.choice([0, 1, 100, 5000, 300_000]), self.SIZE - start)
                file = chance.choice([a, b])
                known = crc.of_bytes(data[start : start + length]) if chance.random() < 0.8 else None
                spans.append(Span(start, length, file.fileno(), at[file], known))
                at[file] += length
            mover.fetch("key", spans)
            for span in spans:
                assert os.pread(span.fd, span.length, span.at) == data[span.start : span.start + span.length]

    def test_wrong_sum(self, mover: Mover, data: bytes, tmp_path: Path) -> None:
        with (tmp_path / "a").open("w+b") as a:
            good = Span(0, 100, a.fileno(), 0, crc.of_bytes(data[:100]))
            bad = Span(1000, 5000, a.fileno(), 100, 12345)
            with pytest.raises(ChecksumMismatch, match=r"'key' in .*bytes 1000 to 6000 are not those"):
                mover.fetch("key", [good, bad])
        assert mover.tally.retries == 1
        assert mover.tally.bytes_received >= 2 * 5000

    def test_beyond_the_end(self, mover: Mover, data: bytes, tmp_path: Path) -> None:
        for start, length in [(self.SIZE - 10, 11), (self.SIZE, 1), (self.SIZE + 100, 1), (0, self.SIZE + 1)]:
            with (tmp_path / "a").open("w+b") as a, pytest.raises(ChecksumMismatch, match="to have at least"):
                mover.fetch("key", [Span(start, length, a.fileno())])

    def test_another_object(self, mover: Mover, data: bytes, tmp_path: Path) -> None:
        etag = mover.put("key", b"abc").etag
        time.sleep(0.01)
        mover.put("key", b"def")
        with pytest.raises(ChecksumMismatch, match=r"not the object|another object"):
            fetched(mover, "key", 3, tmp_path, etag=etag)

    def test_no_object(self, mover: Mover, tmp_path: Path) -> None:
        with pytest.raises(ObjectMissing, match="nothing"):
            fetched(mover, "nothing", 3, tmp_path)

    def test_a_file_that_cannot_be_written(self, mover: Mover, data: bytes) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        try:
            with pytest.raises(StoreError, match="on this node"):
                mover.fetch("key", [Span(0, self.SIZE, full)])
        finally:
            os.close(full)


class TestCopy:
    @pytest.mark.parametrize("size", [0, 3, PART + 1])
    def test_within(self, mover: Mover, tmp_path: Path, size: int) -> None:
        data = data_of(size)
        mover.upload("from/a b", file_of(tmp_path / "file", data))
        mover.copy("from/a b", "to/ü", size)
        assert fetched(mover, "to/ü", size, tmp_path, crc.of_bytes(data)) == data
        assert fetched(mover, "from/a b", size, tmp_path) == data

    def test_to_another_place_of_the_server(self, config: StoreConfig, mover: Mover, tmp_path: Path) -> None:
        from dataclasses import replace

        mover.put("key", b"abc")
        elsewhere = f"file://{tmp_path}/other" if config.directory else f"{config.uri}/other"
        other = open_mover(replace(config, uri=elsewhere))
        mover.copy("key", "models/key", 3, to=other)
        assert fetched(other, "models/key", 3, tmp_path) == b"abc"
        other.close()

    def test_to_another_server(self, config: StoreConfig, mover: Mover, tmp_path: Path) -> None:
        mover.put("key", b"abc")
        with FaultyS3() as server:
            foreign = server.config() if config.directory else StoreConfig(uri=f"file://{tmp_path}/other")
            other = open_mover(foreign)
            with pytest.raises(NotImplementedError):
                mover.copy("key", "key", 3, to=other)
            other.close()

    def test_wrong_size(self, mover: Mover) -> None:
        mover.put("key", b"abc")
        with pytest.raises(ChecksumMismatch):
            mover.copy("key", "other", 4)

    def test_nothing_there(self, mover: Mover) -> None:
        with pytest.raises(ObjectMissing):
            mover.copy("nothing", "other", 4)


def test_delete(config: StoreConfig, mover: Mover) -> None:
    for number in range(5):
        mover.put(f"a/{number}", b"x")
    mover.delete([*(f"a/{number}" for number in range(4)), "nothing", "no/thing"])
    mover.delete([])
    assert [entry.key for entry in open_store(config).list("")] == ["a/4"]


def test_abandon_what_was_never_begun(mover: Mover) -> None:
    mover.abandon("a/key")


@pytest.mark.parametrize("key", ["", "/a", "a/../b", "a//b", "a\\b", "a\0b", "a/.gpu-burst-x", "é" * 500])
def test_keys_that_no_store_takes(mover: Mover, tmp_path: Path, key: str) -> None:
    path = file_of(tmp_path / "file", b"abc")
    with (tmp_path / "fetched").open("w+b") as file:
        for call in (
            lambda: mover.put(key, b"abc"),
            lambda: mover.upload(key, path),
            lambda: mover.fetch(key, [Span(0, 3, file.fileno())]),
            lambda: mover.copy(key, "a", 3),
            lambda: mover.copy("a", key, 3),
            lambda: mover.delete([key]),
        ):
            with pytest.raises(StoreError):
                call()


def test_the_cap_is_for_all_transfers_together(config: StoreConfig, tmp_path: Path) -> None:
    mover = open_mover(config, Settings(cap=10e6, part_size=PART))
    data = data_of(2_000_000)
    paths = [file_of(tmp_path / f"file{number}", data) for number in range(3)]
    began = time.monotonic()
    threads = [threading.Thread(target=mover.upload, args=(path.name, path)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.57 < time.monotonic() - began < 1.5
    began = time.monotonic()
    fetched(mover, "file0", 2_000_000, tmp_path)
    assert 0.17 < time.monotonic() - began < 0.7
    mover.close()


def test_stagger_is_before_the_first_byte_only(config: StoreConfig) -> None:
    mover = open_mover(config, Settings(stagger_s=0.4))
    began = time.monotonic()
    mover.put("a", b"x")
    assert time.monotonic() - began >= 0.4
    began = time.monotonic()
    mover.put("b", b"x")
    assert time.monotonic() - began < 0.4
    mover.close()


def test_a_closed_mover_moves_nothing(config: StoreConfig, tmp_path: Path) -> None:
    mover = open_mover(config, Settings(cap=1e6, part_size=PART))
    path = file_of(tmp_path / "file", data_of(3_000_000))
    errors: list[BaseException] = []

    def upload() -> None:
        try:
            mover.upload("key", path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=upload)
    thread.start()
    while mover.tally.bytes_sent < 100_000:
        time.sleep(0.01)
    mover.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], StoreUnavailable)
    with pytest.raises(StoreUnavailable, match="closed"):
        mover.put("key", b"x")
    assert list(open_store(config).list("")) == []
