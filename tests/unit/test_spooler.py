"""The spool: pieces that meet end to end, whatever the store does."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import threading
import traceback
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import StoreUnavailable
from airflow_gpu_burst.runtime.output import Output, Spooler, chunk_key, send_rest
from airflow_gpu_burst.store import Store, StoreConfig, open_store


def spooled(store: Store, stream: str = "s") -> bytes:
    data, pieces = b"", {entry.key: entry.size for entry in store.list(f"{stream}/")}
    while (key := chunk_key(stream, len(data))) in pieces:
        data += store.get(key)
        del pieces[key]
    assert not pieces, f"pieces that nobody finds: {pieces}"
    return data


class Halting:
    """In front of a real store: `put` waits for `gate`, then the first `failures` of them fail."""

    def __init__(self, store: Store, failures: int = 0) -> None:
        self.store, self.failures = store, failures
        self.gate, self.reached = threading.Event(), threading.Event()

    def put(self, key: str, data: bytes) -> None:
        self.reached.set()
        self.gate.wait(20)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("503")
        self.store.put(key, data)


def test_a_piece_that_is_under_way_is_not_sent_twice(tmp_path: Path) -> None:
    store = open_store(StoreConfig(uri=f"file://{tmp_path}/store"))
    path = tmp_path / "output.log"
    path.write_bytes(b"first\n")
    slow = Halting(store)
    spooler = Spooler(slow, path, lambda offset: chunk_key("s", offset))  # type: ignore[arg-type]
    spooler.start()
    assert slow.reached.wait(20)
    with path.open("ab") as file:
        file.write(b"second\n" * 1000)
    assert spooler.finish(timeout_s=0.2) is False
    slow.gate.set()
    spooler.join(20)
    send_rest(store, path, "s")
    assert spooled(store) == path.read_bytes()


def test_a_store_that_is_down_for_a_while_only_delays(tmp_path: Path) -> None:
    store = open_store(StoreConfig(uri=f"file://{tmp_path}/store"))
    path = tmp_path / "output.log"
    path.write_bytes(b"line\n" * 500_000)
    failing = Halting(store, failures=2)
    failing.gate.set()
    spooler = Spooler(failing, path, lambda offset: chunk_key("s", offset))  # type: ignore[arg-type]
    spooler.start()
    assert spooler.finish(timeout_s=20)
    assert spooled(store) == path.read_bytes()


def test_our_own_lines_never_stand_in_the_middle_of_another(tmp_path: Path) -> None:
    output = Output(tmp_path / "output.log")
    output.write(b"half a li")
    output.say("hello")
    output.write(b"whole\n")
    output.say("again")
    output.close()
    assert output.path.read_text() == "half a li\ngpu-burst: hello\nwhole\ngpu-burst: again\n"


def test_file_and_stdout_begin_with_the_same_header(tmp_path: Path) -> None:
    mirror = io.BytesIO()
    output = Output(tmp_path / "output.log", mirror, b"gpu-burst: output s rank 0 of 1\n")
    output.write(b"line\n")
    output.close()
    assert output.path.read_bytes() == mirror.getvalue() == b"gpu-burst: output s rank 0 of 1\nline\n"
    assert output.tail() == ["line"]


def test_what_we_say_on_stderr_goes_the_same_way(tmp_path: Path) -> None:
    before = sys.stderr
    output = Output(tmp_path / "output.log", mirror := io.BytesIO())
    with output.capture_stderr():
        output.write(b"half a li")
        sys.stderr.write("care")
        sys.stderr.write("ful\n")
        output.write(b"next\n")
        try:
            raise ValueError("\udcff broken")
        except ValueError:
            traceback.print_exc()
        logger = logging.getLogger("test_spooler")
        logger.propagate = False  # a handler that another test has left may write to a stream that is closed
        logger.addHandler(handler := logging.StreamHandler())
        logger.error("logged")
        sys.stderr.write("unfinished")
    logger.removeHandler(handler)
    output.close()
    handler.stream.write("too late\n")
    assert sys.stderr is before
    text = output.path.read_text()
    assert text.encode() == mirror.getvalue()
    assert text.startswith("half a li\n") and "\ncareful\n" in text and "\nnext\nTraceback" in text
    assert "ValueError: \\udcff broken\n" in text and text.endswith("logged\nunfinished\n")


def test_a_full_disk_leaves_a_hole_and_every_later_byte_at_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = io.BytesIO()
    output = Output(tmp_path / "output.log", mirror)
    write, room = os.pwrite, 10**9

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[:room]
        room -= len(part)
        return write(fd, part, offset)

    monkeypatch.setattr("os.pwrite", pwrite)
    output.write(b"before\n")
    room = 5
    output.write(b"12345" + b"l" * 95 + b"\n")
    output.write(b"m" * 100 + b"\n")
    room = 10**9
    output.write(b"after\n")
    output.close()
    kept, live = output.path.read_bytes(), mirror.getvalue()
    assert len(kept) == len(live) == 7 + 101 + 101 + 6
    assert kept.startswith(b"before\n12345\ngpu-burst: 197 bytes of output lost, disk full\n\0\0")
    assert kept.endswith(b"\0after\n") and live.endswith(b"m\nafter\n")
