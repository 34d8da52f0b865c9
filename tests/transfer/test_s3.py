"""What the S3 mover puts around uploads and fetches: one end for all, a pause before a beginning."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import StoreError, StoreUnavailable
from airflow_gpu_burst.transfer import MIB, Settings, Span, open_mover
from tests.faulty_s3 import FaultyS3
from tests.transfer.wire import file_of


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        yield server


def test_closing_in_the_middle(server: FaultyS3, tmp_path: Path) -> None:
    file_of(tmp_path / "file", 60 * MIB)
    server.fault("UploadPart", rate=MIB, times=None)
    mover = open_mover(server.config(), Settings(part_size=5 * MIB))
    threading.Timer(0.5, mover.close).start()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="Open another"):
        mover.upload("key", tmp_path / "file")
    assert time.monotonic() - began < 3
    for use in (
        lambda: mover.put("key", b"x"),
        lambda: mover.upload("key", tmp_path / "file"),
        lambda: mover.fetch("key", [Span(0, 1, 0)]),
        lambda: mover.delete(["key"]),
        lambda: mover.abandon("key"),
    ):
        with pytest.raises(StoreUnavailable, match="Open another"):
            use()


def test_a_stagger_before_each_beginning(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_gpu_burst.transfer import s3

    monkeypatch.setattr(s3, "_QUIET_S", 0.3)
    mover = open_mover(server.config(), Settings(stagger_s=0.5))

    def seconds() -> float:
        began = time.monotonic()
        mover.put("key", b"x")
        return time.monotonic() - began

    assert seconds() >= 0.5
    assert seconds() < 0.4
    time.sleep(0.4)
    assert seconds() >= 0.5
    mover.close()


def test_slow_start(server: FaultyS3, tmp_path: Path) -> None:
    file_of(tmp_path / "file", 30 * MIB)
    server.fault("UploadPart", rate=20 * MIB, times=None)
    mover = open_mover(server.config(), Settings(part_size=5 * MIB, connections=8))
    mover.upload("key", tmp_path / "file")
    mover.close()
    assert 2 <= server.most_at_once <= 4


def test_the_cap(server: FaultyS3, tmp_path: Path) -> None:
    file_of(tmp_path / "file", 12 * MIB)
    mover = open_mover(server.config(), Settings(part_size=5 * MIB, cap=8e6))
    began = time.monotonic()
    mover.upload("key", tmp_path / "file")
    mover.close()
    assert 1.4 < time.monotonic() - began < 2.5


def test_keys_and_servers(server: FaultyS3, tmp_path: Path) -> None:
    mover = open_mover(server.config("p"))
    with pytest.raises(StoreError, match="segment"):
        mover.put("a/../b", b"x")
    with FaultyS3() as other, pytest.raises(NotImplementedError):
        mover.copy("a", "b", 1, to=open_mover(other.config()))
    mover.put("a", b"x")
    target = open_mover(server.config("elsewhere"))
    mover.copy("a", "b", 1, to=target)
    assert server.data("elsewhere/b") == b"x"
    assert mover.uri == f"s3://{server.name}/p"
    target.close()
    mover.close()
