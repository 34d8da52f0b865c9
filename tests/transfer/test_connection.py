"""One HTTP connection, against a peer that says exactly what a test tells it to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.transfer import MIB, Tally
from airflow_gpu_burst.transfer.connection import Answer, Broken, Connection, FileRange, Request
from airflow_gpu_burst.transfer.crc import FileEnded
from airflow_gpu_burst.transfer.flow import Flow, Stopped
from tests.transfer.wire import Free

GET = Request(method="GET", target="/b/k")
OK = b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nETag: "x"\r\n\r\nok'


@contextmanager
def peer(
    act: Callable[[socket.socket], None], *, idle_s: float = 5.0, pace: Free | None = None
) -> Iterator[Connection]:
    """A connection whose other end does `act`, then closes."""
    own, other = socket.socketpair()

    def run() -> None:
        with other, suppress(OSError):
            act(other)

    thread = threading.Thread(target=run)
    thread.start()
    connection = Connection(own, Flow(pace or Free(), Tally()), host="h", idle_timeout_s=idle_s)
    try:
        yield connection
    finally:
        connection.close()
        thread.join()


def says(*pieces: bytes) -> Callable[[socket.socket], None]:
    def act(sock: socket.socket) -> None:
        head(sock)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.01)

    return act


def head(sock: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(1)
    return got


@pytest.mark.parametrize(
    ("pieces", "body", "stays"),
    [
        ([OK], b"ok", True),
        ([bytes([byte]) for byte in OK], b"ok", True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK], b"ok", True),
        ([OK.replace(b"ETag", b"Connection: close\r\nETag")], b"ok", False),
        ([OK.replace(b"HTTP/1.1", b"HTTP/1.0")], b"ok", False),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n"], b"ok", True),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r", b"\nok\r\n0\r\nA: b\r\n", b"\r\n"], b"ok", True),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b"o", b"k"], b"ok", False),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b"", True),
        ([b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n"], b"", True),
    ],
)
def test_whole_answers(pieces: list[bytes], body: bytes, stays: bool) -> None:
    with peer(says(*pieces)) as connection:
        assert connection.exchange(GET).body == body
        assert connection.open is stays


def test_a_heads_length_has_no_body() -> None:
    with peer(says(OK[:-2])) as connection:
        answer = connection.exchange(Request(method="HEAD", target="/"))
        assert (answer.status, answer.body, answer.headers["content-length"], answer.headers["etag"]) == (
            200, b"", "2", '"x"',
        )  # fmt: skip
        assert connection.open


@pytest.mark.parametrize(
    ("pieces", "answered"),
    [
        ([], False),
        ([b"HTTP/1.1 20"], True),
        ([OK[:-1]], True),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"], True),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\no"], True),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\nok\r\n"], True),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok"], True),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], True),
        ([b"x" * 70_000], True),
    ],
)
def test_half_answers(pieces: list[bytes], answered: bool) -> None:
    with peer(says(*pieces)) as connection, pytest.raises(Broken) as broken:
        connection.exchange(GET)
    assert broken.value.answered is answered
    assert not connection.open


def test_a_sink_takes_the_body() -> None:
    data = bytes(range(256)) * 20_000
    got = bytearray()
    answer_head = b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % len(data)

    def into(answer: Answer) -> Callable[[memoryview], None]:
        assert answer.status == 206
        return got.extend

    with peer(says(answer_head + data[:100], data[100:])) as connection:
        assert connection.exchange(GET, into=into).body == b""
        assert got == data


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 7))
def test_chunks_in_any_pieces(chunks: list[bytes], step: int) -> None:
    wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
    wire += b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    def act(sock: socket.socket) -> None:
        head(sock)
        for at in range(0, len(wire), step):
            sock.sendall(wire[at : at + step])

    with peer(act) as connection:
        assert connection.exchange(GET).body == b"".join(chunks)
        assert connection.open


@pytest.mark.parametrize("size", [0, 1, 3 * MIB + 5])
def test_bodies_of_memory_and_of_a_file(tmp_path: Path, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    (tmp_path / "file").write_bytes(b"before" + data + b"after")
    got: list[bytes] = []

    def act(sock: socket.socket) -> None:
        for _ in range(2):
            top = head(sock)
            assert b"content-length: %d\r\n" % size in top and b"host: h\r\n" in top and b"a: b\r\n" in top
            body = b""
            while len(body) < size:
                body += sock.recv(MIB)
            got.append(body)
            sock.sendall(OK)

    with peer(act) as connection, (tmp_path / "file").open("rb") as file:
        for body in (data, FileRange(file.fileno(), 6, size)):
            answer = connection.exchange(Request(method="PUT", target="/", headers={"a": "b"}, body=body))
            assert answer.status == 200 and connection.open and connection.used
    assert got == [data, data]


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))

    def act(sock: socket.socket) -> None:
        while sock.recv(MIB):
            pass

    with peer(act) as connection, (tmp_path / "file").open("rb") as file:
        with pytest.raises(FileEnded):
            connection.exchange(Request(method="PUT", target="/", body=FileRange(file.fileno(), 50, 51)))
        assert not connection.open


@pytest.mark.parametrize("closes", [False, True])
def test_an_answer_before_the_body_was_sent_is_heard(tmp_path: Path, closes: bool) -> None:
    """A server that refuses early says why; a client that only writes would see a broken pipe or nothing."""
    (tmp_path / "file").write_bytes(bytes(64 * MIB))
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\nConnection: close\r\n\r\ndenied"

    def act(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        sock.recv(1000)
        time.sleep(0.2)
        sock.sendall(refusal)
        if not closes:
            time.sleep(1.0)

    with peer(act) as connection, (tmp_path / "file").open("rb") as file:
        began = time.monotonic()
        answer = connection.exchange(Request(method="PUT", target="/", body=FileRange(file.fileno(), 0, 64 * MIB)))
        assert (answer.status, answer.body) == (403, b"denied")
        assert time.monotonic() - began < 0.9
        assert not connection.open


class Slow(Free):
    """Gives the peer time between the head and the body."""

    def take(self, n: int) -> None:
        if n > 1000:
            time.sleep(0.3)


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_answer_is_heard_when_sending_fails(tmp_path: Path, in_memory: bool) -> None:
    """The server has answered and closed before the body's first byte: EPIPE, with its reason already here."""
    (tmp_path / "file").write_bytes(bytes(MIB))
    with peer(says(b"HTTP/1.1 507 Full\r\nContent-Length: 4\r\n\r\nfull"), pace=Slow()) as connection:
        with (tmp_path / "file").open("rb") as file:
            body = bytes(MIB) if in_memory else FileRange(file.fileno(), 0, MIB)
            answer = connection.exchange(Request(method="PUT", target="/", body=body))
        assert (answer.status, answer.body) == (507, b"full")
        assert not connection.open


def test_silence_is_an_idle_timeout(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64 * MIB))

    def act(sock: socket.socket) -> None:
        with suppress(TimeoutError):
            sock.settimeout(3)
            head(sock)
            time.sleep(1)

    for body in (None, FileRange(0, 0, 64 * MIB)):
        with peer(act, idle_s=0.3) as connection, (tmp_path / "file").open("rb") as file:
            sent = FileRange(file.fileno(), 0, body.length) if body else None
            began = time.monotonic()
            with pytest.raises(Broken, match="no byte moved"):
                connection.exchange(Request(method="PUT", target="/", body=sent))
            assert time.monotonic() - began < 1.0


def test_a_slow_peer_is_no_silence() -> None:
    def act(sock: socket.socket) -> None:
        head(sock)
        for at in range(len(OK)):
            sock.sendall(OK[at : at + 1])
            time.sleep(0.02)

    with peer(act, idle_s=0.5) as connection:
        began = time.monotonic()
        assert connection.exchange(GET).body == b"ok"
        assert time.monotonic() - began > 0.6


def test_what_is_not_wanted_any_more_stops() -> None:
    stop = threading.Event()

    def act(sock: socket.socket) -> None:
        head(sock)
        stop.set()
        with suppress(OSError):
            sock.recv(1)

    with peer(act) as connection:
        began = time.monotonic()
        with pytest.raises(Stopped):
            connection.exchange(GET, halted=stop.is_set)
        assert time.monotonic() - began < 1.0


def test_stale() -> None:
    first = threading.Event()

    def act(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(OK)
        first.wait(5)

    with peer(act) as connection:
        connection.exchange(GET)
        assert not connection.stale()
        first.set()
        time.sleep(0.2)
        assert connection.stale()
