"""
What stands between a pod and its S3 server: counts requests, calls back at the n-th of a kind, and spoils some.

The callback comes before a request goes on to the server, in the midst of its body (of a GET's answer), or when the
server has acted and the answer is still to be given. It may hold the request as long as it likes, as a network does.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["any", "save", "restore", "start", "commit", "retire", "finish"]
When = Literal["before", "during", "after"]
_LENGTH = re.compile(rb"(?im)^content-length:[ \t]*(\d+)")
_CHUNKED = re.compile(rb"(?im)^transfer-encoding:[ \t]*chunked")
_EXPECT = re.compile(rb"(?im)^expect:[^\r\n]*\r\n")
_CLOSE = re.compile(rb"(?im)^connection:[ \t]*close")


@dataclass(frozen=True)
class Asked:
    """
    One request.

    :param body: how it begins: a record of the run log whole.
    """

    method: str
    target: str
    head: bytes = field(repr=False)
    body: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.method} {self.target.partition('/data/')[2] or self.target}"

    def of(self, phase: Phase) -> bool:
        """Whether it belongs to such a phase of a pod's life."""
        data = "/data/" in self.target
        if phase == "any":
            return True
        if phase == "restore":
            return data and self.method == "GET" and not self.target.endswith(".upload")
        if phase == "save":
            return data and not self.of("restore")
        return self.method == "PUT" and "/log/" in self.target and f'"kind":"{phase}"'.encode() in self.body


@dataclass(frozen=True)
class Spoilt:
    """
    What is done to one exchange.

    :param cut: the connection is cut there.
    :param answer: is given instead of asking the server.
    :param change: what becomes of the server's answer.
    :param rate: bytes per second of the body and the answer; 0: as fast as can be.
    """

    cut: When | None = None
    answer: bytes = b""
    change: Callable[[bytes], bytes] | None = None
    rate: float = 0.0


Weather = Callable[[Asked], Spoilt | None]


@dataclass
class Trap:
    """
    Calls `act` once, at the `nth` request of a phase.

    :param act: called in the request's own thread; the request goes on when it returns.
    """

    phase: Phase
    nth: int
    when: When
    act: Callable[[Asked], None]
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.nth

    def counts(self, asked: Asked) -> bool:
        """Count a request; whether it is the one."""
        if not asked.of(self.phase):
            return False
        self._left -= 1
        return self._left == 0


class Gate:
    """
    One pod's way to the server.

    :param host: of the server.
    :param port: of the server.
    :param weather: asked about every request.
    """

    def __init__(self, host: str, port: int, weather: Weather = lambda asked: None) -> None:
        self._upstream, self._weather = (host, port), weather
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._trap: Trap | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="gate", daemon=True).start()

    def arm(self, trap: Trap | None) -> None:
        """Set the trap, or take it away."""
        with self._lock:
            self._trap = trap

    def close(self) -> None:
        """Cut all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._sockets)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="gate-connection", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), self._kept(client), self._kept(self._connect()) as server:
            while self._exchange(client, server):
                pass

    def _connect(self) -> socket.socket:
        server = socket.create_connection(self._upstream)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[socket.socket]:
        with self._lock:
            self._sockets.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._sockets.discard(connection)
            connection.close()

    def _exchange(self, client: socket.socket, server: socket.socket) -> bool:
        """One request and its answer; whether there may be another."""
        head, rest = _head(client)
        if not head:
            return False
        if _EXPECT.search(head):
            head = _EXPECT.sub(b"", head)
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        method, target = head.split(b" ", 2)[:2]
        data = b"".join(_body(head, rest, client))
        asked = Asked(method.decode(), target.decode(), head, data[:8192])
        trap, spoilt = self._count(asked), self._weather(asked) or Spoilt()
        half = len(data) // 2
        _at("before", trap, spoilt, asked)
        if spoilt.answer:
            client.sendall(spoilt.answer)
            return True
        _trickle(server, head + data[:half], spoilt.rate)
        if method != b"GET":
            _at("during", trap, spoilt, asked)
            if trap and trap.when == "during" and data and _gone(client):
                return False  # as when the sender dies half way: the server never has the rest
        _trickle(server, data[half:], spoilt.rate)
        answer = _answer(server, method)
        _at("after", trap, spoilt, asked)
        if spoilt.change:
            answer = spoilt.change(answer)
        half = len(answer) // 2
        _trickle(client, answer[:half], spoilt.rate)
        if method == b"GET":
            _at("during", trap, spoilt, asked)
        _trickle(client, answer[half:], spoilt.rate)
        return not (_CLOSE.search(head) or _CLOSE.search(answer.partition(b"\r\n\r\n")[0]))

    def _count(self, asked: Asked) -> Trap | None:
        with self._lock:
            trap = self._trap
            if trap is None or not trap.counts(asked):
                return None
            self._trap = None
            return trap


def _at(when: When, trap: Trap | None, spoilt: Spoilt, asked: Asked) -> None:
    if trap and trap.when == when:
        trap.act(asked)
    if spoilt.cut == when:
        raise ConnectionError("cut")


def _trickle(connection: socket.socket, data: bytes, rate: float) -> None:
    step = int(rate / 20) or len(data) or 1
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        connection.sendall(piece)
        if rate:
            time.sleep(len(piece) / rate)


def _head(connection: socket.socket) -> tuple[bytes, bytes]:
    """A message's head, blank line included, and what came with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1 << 16)
        if not more:
            return b"", b""
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _body(head: bytes, data: bytes, connection: socket.socket, *, to_the_end: bool = False) -> Iterator[bytes]:
    """
    The body as it is on the wire, in pieces.

    :raises OSError: it was cut short.
    """
    if _CHUNKED.search(head):
        while b"\r\n0\r\n" not in b"\r\n" + data or not data.endswith(b"\r\n\r\n"):
            data += _more(connection)
        yield data
        return
    found = _LENGTH.search(head)
    if found is None:
        yield data
        while to_the_end and (data := connection.recv(1 << 16)):
            yield data
        return
    left = int(found[1]) - len(data)
    yield data
    while left > 0:
        data = _more(connection)
        left -= len(data)
        yield data


def _answer(server: socket.socket, method: bytes) -> bytes:
    head, rest = _head(server)
    if not head:
        raise ConnectionError("no answer")
    status = int(head.split(b" ", 2)[1])
    if method == b"HEAD" or status in (204, 304):
        return head
    return head + b"".join(_body(head, rest, server, to_the_end=True))


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionError("cut short")
    return data


def _gone(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
