"""Fetching from an S3 server that does wrong: what lands in the file is what was stored, or it is said."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.errors import ChecksumMismatch, ObjectMissing, StoreForbidden, StoreUnavailable
from airflow_gpu_burst.transfer import MIB, Mover, Settings, Span, crc, open_mover
from airflow_gpu_burst.transfer.ranges import STEP
from tests.faulty_s3 import FaultyS3
from tests.s3_bucket import Body, Call, Object, Reply

SIZE = 2 * STEP + 12345
DATA = random.Random(1).randbytes(SIZE)


@pytest.fixture(params=[False, True], ids=["http", "tls"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultyS3]:
    with FaultyS3(tls=tmp_path / "tls" if request.param else None) as server:
        server.bucket.objects["base/key"] = Object(Body(SIZE, crc.of_bytes(DATA), DATA), '"etag"')
        yield server


@pytest.fixture
def plain() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        server.bucket.objects["base/key"] = Object(Body(SIZE, crc.of_bytes(DATA), DATA), '"etag"')
        yield server


def mover_of(server: FaultyS3) -> Mover:
    return open_mover(server.config("base"), Settings(idle_timeout_s=0.5))


def fetch(mover: Mover, folder: Path, start: int = 0, length: int = SIZE, etag: str = "") -> None:
    """A range, which is what it should be."""
    data = memoryview(DATA)[start : start + length]
    with (folder / "fetched").open("w+b") as file:
        mover.fetch("key", [Span(start, length, file.fileno(), 0, crc.of_bytes(data))], etag=etag)
        file.seek(0)
        assert file.read() == data


def test_a_large_object_in_parallel(server: FaultyS3, tmp_path: Path) -> None:
    mover = mover_of(server)
    fetch(mover, tmp_path, etag='"etag"')
    assert {call.headers["range"] for call in server.calls} == {
        f"bytes=0-{STEP - 1}",
        f"bytes={STEP}-{2 * STEP - 1}",
        f"bytes={2 * STEP}-{SIZE - 1}",
    }
    assert all(call.headers["if-match"] == '"etag"' for call in server.calls)
    assert server.most_at_once == 2  # slow start
    assert mover.tally.bytes_received >= SIZE
    assert mover.tally.retries == 0
    mover.close()


def test_small_ones_of_a_pack_in_one_request(plain: FaultyS3, tmp_path: Path) -> None:
    mover = mover_of(plain)
    with (tmp_path / "a").open("w+b") as file:
        spans = [
            Span(n * 5000, 4096, file.fileno(), n * 4096, crc.of_bytes(DATA[n * 5000 : n * 5000 + 4096]))
            for n in range(1000)
        ]
        mover.fetch("key", spans)
    assert plain.count() == 1
    mover.close()


PASSING: list[dict[str, Any]] = [
    {"status": 500, "code": "InternalError"},
    {"status": 502},
    {"status": 503, "code": "SlowDown"},
    {"status": 503, "code": "SlowDown", "headers": {"retry-after": "1"}},
    {"status": 429},
    {"status": 404},  # a proxy without backends
    {"truncate": 0},
    {"truncate": 1},
    {"truncate": 100_000},
    {"lost": True},
    {"close": True},
    {"chunked": True},
    {"corrupt": True},
    {"ranges": False},
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
@pytest.mark.parametrize("skip", [0, 1])
def test_what_passes(plain: FaultyS3, tmp_path: Path, fault: dict[str, Any], skip: int) -> None:
    plain.fault("GetObject", skip=skip, **fault)
    mover = mover_of(plain)
    fetch(mover, tmp_path, length=SIZE if "chunked" not in fault else MIB)
    mover.close()


def test_a_broken_stream_goes_on_where_it_broke(server: FaultyS3, tmp_path: Path) -> None:
    server.fault("GetObject", truncate=300_000, times=3)
    mover = mover_of(server)
    fetch(mover, tmp_path, 1000, MIB)
    starts = [int(call.headers["range"].removeprefix("bytes=").partition("-")[0]) for call in server.calls]
    assert starts == sorted(set(starts)) and starts[0] == 1000 and len(starts) == 4
    assert mover.tally.bytes_received < MIB + 4 * 10_000
    assert mover.tally.retries == 3
    mover.close()


def test_a_stream_that_breaks_more_often_than_a_request_is_repeated(plain: FaultyS3, tmp_path: Path) -> None:
    """As long as bytes come, it goes on."""
    plain.fault("GetObject", truncate=100_000, times=10)
    mover = mover_of(plain)
    fetch(mover, tmp_path, 0, MIB + 500_000)
    mover.close()


def test_a_stalled_stream_is_given_up_soon_and_a_slow_one_never(plain: FaultyS3, tmp_path: Path) -> None:
    mover = mover_of(plain)  # 0.5 s without a byte
    plain.fault("GetObject", rate=1e6)
    fetch(mover, tmp_path, 0, MIB)
    assert mover.tally.retries == 0
    plain.fault("GetObject", delay_s=30)
    began = time.monotonic()
    fetch(mover, tmp_path, 0, MIB)
    assert time.monotonic() - began < 3
    assert mover.tally.retries == 1
    mover.close()


def test_a_wrong_sum_is_fetched_once_more(server: FaultyS3, tmp_path: Path) -> None:
    server.fault("GetObject", corrupt=True)
    mover = mover_of(server)
    fetch(mover, tmp_path, 7, MIB)
    assert server.count() == 2 and mover.tally.retries == 1
    server.fault("GetObject", corrupt=True, times=None)
    with pytest.raises(ChecksumMismatch, match=r"'key' in s3://bucket/base: bytes 7 to 1048583 "):
        fetch(mover, tmp_path, 7, MIB)
    assert server.count() == 4
    mover.close()


def test_the_first_error_stops_the_others(plain: FaultyS3, tmp_path: Path) -> None:
    plain.fault("GetObject", skip=1, status=403, code="AccessDenied")
    plain.fault("GetObject", rate=1e6, times=None)
    mover = mover_of(plain)
    began = time.monotonic()
    with pytest.raises(StoreForbidden, match="s3:GetObject"):
        fetch(mover, tmp_path)
    assert time.monotonic() - began < 5
    assert mover.tally.bytes_received < SIZE / 2
    mover.close()


def test_a_server_that_ignores_ranges_sends_the_object_once(plain: FaultyS3, tmp_path: Path) -> None:
    plain.fault("GetObject", ranges=False, times=None)
    mover = mover_of(plain)
    fetch(mover, tmp_path)
    # As much as was under way when it was noticed comes in vain.
    assert mover.tally.bytes_received < SIZE + 4 * MIB
    before = mover.tally.bytes_received
    fetch(mover, tmp_path, STEP, 1000)
    assert mover.tally.bytes_received < before + STEP + 4 * MIB
    plain.fault("GetObject", ranges=False, times=1, truncate=STEP)
    mover.close()


def test_a_server_that_ignores_ranges_and_breaks(plain: FaultyS3, tmp_path: Path) -> None:
    plain.fault("GetObject", ranges=False, times=2, truncate=STEP + 100_000, skip=2)
    plain.fault("GetObject", ranges=False, times=None)
    mover = mover_of(plain)
    fetch(mover, tmp_path)
    mover.close()


def part_of(start: int, end: int, told: str) -> Any:
    """Answers with these bytes, and this Content-Range."""

    def change(call: Call, reply: Reply) -> Reply:
        return Reply(206, {"content-range": told}, memoryview(DATA)[start:end])

    return change


@pytest.mark.parametrize(
    ("start", "end", "told"),
    [
        (0, 100, "bytes 0-99/*"),
        (0, 5000, f"bytes 0-4999/{SIZE}"),  # less than was asked for
        (0, 5000, "bytes 500-5499/99999999"),  # not where it was asked for
        (0, 5000, "bytes -1-5"),
        (0, 5000, "nonsense"),
        (0, 5000, ""),
    ],
)
def test_odd_ranges(plain: FaultyS3, tmp_path: Path, start: int, end: int, told: str) -> None:
    plain.fault("GetObject", change=part_of(start, end, told), times=2)
    mover = mover_of(plain)
    fetch(mover, tmp_path, 0, 20_000)
    mover.close()


def test_more_than_was_asked_for(plain: FaultyS3, tmp_path: Path) -> None:
    """A proxy that fetches whole blocks."""
    plain.fault("GetObject", change=part_of(0, 2 * MIB, f"bytes 0-{2 * MIB - 1}/{SIZE}"))
    mover = mover_of(plain)
    fetch(mover, tmp_path, 1234, MIB)
    assert plain.count() == 1
    mover.close()


def test_successes_without_bytes_end(plain: FaultyS3, tmp_path: Path) -> None:
    plain.fault("GetObject", change=lambda call, reply: Reply(200, {}, b""), times=None)
    mover = mover_of(plain)
    with pytest.raises(ChecksumMismatch, match="ends at byte"):
        fetch(mover, tmp_path, 0, 100)
    mover.close()


def test_final_answers(plain: FaultyS3, tmp_path: Path) -> None:
    mover = mover_of(plain)
    for fault, error, said in (
        ({"status": 404, "code": "NoSuchKey"}, ObjectMissing, "key"),
        ({"status": 412, "code": "PreconditionFailed"}, ChecksumMismatch, "wrote over it"),
        ({"status": 416, "code": "InvalidRange"}, ChecksumMismatch, "ends at byte"),
        ({"status": 403, "code": "AccessDenied"}, StoreForbidden, "credentials"),
    ):
        plain.calls.clear()
        plain.fault("GetObject", **fault)
        with pytest.raises(error, match=said):  # type: ignore[call-overload]
            fetch(mover, tmp_path, 0, 100, etag='"other"' if fault["status"] == 412 else "")
        assert plain.count() == 1
    mover.close()


def test_a_server_that_is_gone(plain: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = mover_of(plain)
    plain.fault("GetObject", status=500, times=None)
    from airflow_gpu_burst.transfer import client

    monkeypatch.setattr(client, "_PAUSE_MOST_S", 0.01)
    with pytest.raises(StoreUnavailable, match="try again"):
        fetch(mover, tmp_path, 0, 100)
    assert plain.count() == client.ATTEMPTS
    mover.close()


def test_the_file_is_let_go_of_when_fetch_returns(plain: FaultyS3, tmp_path: Path) -> None:
    """No thread may write to a descriptor that its owner closes, and somebody else gets."""
    plain.fault("GetObject", skip=2, status=403, code="AccessDenied", times=None)
    plain.fault("GetObject", rate=20e6, times=None)
    mover = mover_of(plain)
    with (tmp_path / "a").open("w+b") as file, pytest.raises(StoreForbidden):
        mover.fetch("key", [Span(0, SIZE, file.fileno())])
    with (tmp_path / "b").open("w+b") as other:
        time.sleep(0.3)
        assert os.fstat(other.fileno()).st_size == 0
    mover.close()
