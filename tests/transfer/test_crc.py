from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.transfer import crc


def bitwise(data: bytes) -> int:
    """CRC64NVME as it is defined."""
    sum_ = (1 << 64) - 1
    for byte in data:
        sum_ ^= byte
        for _ in range(8):
            sum_ = (sum_ >> 1) ^ (0x9A6C9329AC4BC9B5 if sum_ & 1 else 0)
    return sum_ ^ ((1 << 64) - 1)


def test_the_check_value_of_the_catalogue() -> None:
    assert crc.of_bytes(b"123456789") == 0xAE8B14860A799888
    assert crc.to_header(crc.of_bytes(b"123456789")) == "rosUhgp5mIg="


@given(st.binary(max_size=300), st.integers(0, 300))
def test_parts_join_to_the_whole(data: bytes, at: int) -> None:
    first, second = data[:at], data[at:]
    whole = bitwise(data)
    assert crc.of_bytes(bytearray(data)) == crc.of_bytes(memoryview(data)) == whole
    assert crc.of_bytes(second, crc.of_bytes(first)) == whole
    assert crc.joined([(crc.of_bytes(first), len(first)), (crc.of_bytes(second), len(second))]) == whole


@given(st.integers(0, (1 << 64) - 1))
def test_a_header_is_read_back(sum_: int) -> None:
    assert crc.from_header(crc.to_header(sum_)) == sum_


@pytest.mark.parametrize("text", ["", "rosUhgp5mIg=-5", "AAAA", "ä", "!!!!"])
def test_another_header_is_none(text: str) -> None:
    assert crc.from_header(text) is None


@pytest.mark.parametrize(("start", "length"), [(0, 0), (0, 3 << 20), (5, 1 << 20), ((1 << 20) - 1, 2), (3 << 20, 7)])
def test_of_a_range_of_a_file(tmp_path: Path, start: int, length: int) -> None:
    data = os.urandom((3 << 20) + 7)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert crc.of_range(fd, start, length) == crc.of_bytes(data[start : start + length])
        with pytest.raises(crc.FileEnded):
            crc.of_range(fd, start, len(data) - start + 1)
    finally:
        os.close(fd)


def test_a_check_stops_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5 << 20))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            crc.of_range(fd, 0, 5 << 20, check=check)
    finally:
        os.close(fd)


def test_others_run_meanwhile() -> None:
    """The interpreter's lock is let go, and a large buffer is not copied."""
    data, moments = bytearray(256 << 20), []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            moments.append(time.monotonic())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    crc.of_bytes(data)
    ended = time.monotonic()
    done.set()
    watcher.join()
    assert len([at for at in moments if began < at < ended]) >= 3
