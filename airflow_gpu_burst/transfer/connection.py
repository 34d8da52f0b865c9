"""
One keep-alive HTTP/1.1 connection, for one thread at a time.

Made for bodies of many megabytes at little CPU: a file goes out by `sendfile`, an answer comes in through one buffer.
The socket never blocks: a server that answers before the body was sent is heard, and `idle_timeout_s` is about bytes
that do not move, never about how long the whole takes.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from airflow_gpu_burst.transfer.blocks import SIZE, block
from airflow_gpu_burst.transfer.crc import FileEnded
from airflow_gpu_burst.transfer.flow import Flow, Halted, never
from airflow_gpu_burst.transfer.interface import MIB, Buffer

_TLS_BLOCK = 256 << 10  # encrypted at once: stays in the L2 cache together with its source
_HEAD_MOST = 64 << 10
_BODY_MOST = 64 * MIB  # of an answer that is kept in memory: listings and errors are far smaller
_INTERIM = b"HTTP/1.1 1"
_TICK_MS = 250  # how soon an order to stop is heard while nothing moves


@dataclass(frozen=True, slots=True)
class FileRange:
    """A body that lies in a file."""

    fd: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """
    :param target: path and query, quoted.
    :param headers: without Content-Length, which is the body's.
    """

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Buffer | FileRange | None = None


@dataclass(slots=True)
class Answer:
    """
    :param headers: names in lower case.
    :param body: empty when a sink took it.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""


Sink = Callable[[memoryview], None]
"""Takes a body piece by piece; each view is good only during the call."""
Into = Callable[[Answer], "Sink | None"]
"""Looks at status and headers and says where the body goes; None: into `Answer.body`."""


class Broken(Exception):
    """
    The connection is gone, or what came is no HTTP.

    :param answered: some bytes of an answer had come.
    """

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class Connection:
    """
    Takes over an open socket, which it closes.

    :param flow: cap and counts.
    :param host: for the Host header.
    :param idle_timeout_s: without a byte moving in either direction.
    """

    def __init__(self, sock: socket.socket, flow: Flow, *, host: str, idle_timeout_s: float) -> None:
        sock.setblocking(False)
        self._sock, self._flow, self._host, self._idle_s = sock, flow, host, idle_timeout_s
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._poll = select.poll()
        self._ahead = bytearray()  # received, not yet used
        self._halted: Halted = never
        self._answered = False
        self.used = False
        self.open = True

    def close(self) -> None:
        """For ever."""
        self.open = False
        self._sock.close()

    def stale(self) -> bool:
        """Whether the server has closed it, or sent what nobody asked for, while nothing was going on."""
        try:
            self._ahead += self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            pass
        return True

    def exchange(self, request: Request, *, into: Into | None = None, halted: Halted | None = None) -> Answer:
        """
        Send a request, return the answer to it. After an exception the connection is closed.

        :param halted: asked between slices and while nothing moves.
        :raises Broken: no whole answer.
        :raises FileEnded: the body's file is shorter than its range.
        :raises Stopped: `halted` said so.
        """
        self._halted = halted or never
        done = False
        try:
            whole = self._send(request)
            answer, last = self._receive(request.method, into)
            done = whole and not last
            self.used = True
            return answer
        except Broken as broken:
            broken.answered = self._answered
            raise
        except OSError as error:
            raise Broken(_said(error), answered=self._answered) from error
        finally:
            self._halted, self._answered = never, False
            if not done:
                self.close()

    # --- out ------------------------------------------------------------------------------------------------------

    def _send(self, request: Request) -> bool:
        """Whether all of it was sent; not so when an answer came before."""
        head = [f"{request.method} {request.target} HTTP/1.1", f"host: {self._host}"]
        head += [f"{name}: {value}" for name, value in request.headers.items()]
        body = request.body
        if body is not None or request.method in ("PUT", "POST"):
            length = body.length if isinstance(body, FileRange) else len(body or b"")
            head.append(f"content-length: {length}")
        data = ("\r\n".join(head) + "\r\n\r\n").encode("latin-1")
        try:
            if isinstance(body, FileRange):
                return self._send_bytes(data, more=True) and self._send_file(body)
            if body and len(body) < _TLS_BLOCK:
                return self._send_bytes(data + bytes(body))
            return self._send_bytes(data) and (not body or self._send_bytes(body))
        except (ConnectionError, ssl.SSLError):
            # A server that refuses closes, and sends its reason first: that is worth more than "broken pipe".
            if self._heard():
                return False
            raise

    def _send_bytes(self, data: Buffer, *, more: bool = False) -> bool:
        view = memoryview(data)
        flags = socket.MSG_MORE if more and not self._tls else 0
        while view:
            count = min(len(view), self._flow.slice, SIZE)
            self._flow.take(count)
            if not self._push(view[:count], flags):
                return False
            view = view[count:]
        return True

    def _push(self, view: memoryview, flags: int = 0) -> bool:
        """All of `view`; False: an answer came instead."""
        while view:
            try:
                count = self._sock.send(view, flags) if flags else self._sock.send(view)
            except (BlockingIOError, ssl.SSLWantWriteError):
                if self._blocked(select.POLLOUT):
                    return False
            except ssl.SSLWantReadError:
                if self._blocked(select.POLLIN):
                    return False
            else:
                self._flow.count(bytes_sent=count)
                view = view[count:]
        self._flow.check(self._halted)
        return True

    def _send_file(self, body: FileRange) -> bool:
        if self._tls:
            return self._encrypt_file(body)
        at, end, out = body.start, body.start + body.length, self._sock.fileno()
        while at < end:
            until = at + min(end - at, self._flow.slice)
            self._flow.take(until - at)
            self._flow.check(self._halted)
            while at < until:
                try:
                    count = os.sendfile(out, body.fd, at, until - at)
                except BlockingIOError:
                    if self._blocked(select.POLLOUT):
                        return False
                    continue
                if not count:
                    raise FileEnded
                self._flow.count(bytes_sent=count)
                at += count
        return True

    def _encrypt_file(self, body: FileRange) -> bool:
        room = block()[:_TLS_BLOCK]
        at, end = body.start, body.start + body.length
        while at < end:
            count = os.preadv(body.fd, [room[: min(end - at, self._flow.slice)]], at)
            if not count:
                raise FileEnded
            self._flow.take(count)
            if not self._push(room[:count]):
                return False
            at += count
        return True

    def _blocked(self, event: int) -> bool:
        """Wait until `event`, or until there is an answer: True."""
        found = self._wait(event | select.POLLIN)
        return bool(found & select.POLLIN) and self._heard()

    def _heard(self) -> bool:
        """Whether an answer has come while the body was being sent. Interim ones (100) are none."""
        try:
            data = self._sock.recv(_HEAD_MOST)
            if not data:
                raise ConnectionResetError("the server closed the connection before it had the whole body")
            self._ahead += data
            self._answered = True
        except (BlockingIOError, ssl.SSLWantReadError):  # in TLS: a message of the protocol itself
            pass
        self._skip_interim()
        return bool(self._ahead) and not _INTERIM.startswith(bytes(self._ahead[: len(_INTERIM)]))

    # --- in -------------------------------------------------------------------------------------------------------

    def _receive(self, method: str, into: Into | None) -> tuple[Answer, bool]:
        """The answer, and whether the connection ends with it."""
        while True:
            self._skip_interim()
            if (end := self._ahead.find(b"\r\n\r\n")) >= 0:
                break
            if len(self._ahead) > _HEAD_MOST:
                raise Broken("an answer's head without an end")
            self._more("the server closed the connection without an answer")
        lines = bytes(self._ahead[:end]).decode("latin-1").split("\r\n")
        del self._ahead[: end + 4]
        answer = Answer(_status(lines[0]), _headers(lines[1:]))
        last = "close" in answer.headers.get("connection", "").lower() or lines[0].startswith("HTTP/1.0")
        if method == "HEAD" or answer.status in (204, 304):
            return answer, last
        sink = into(answer) if into else None
        kept = bytearray()
        for view in self._body(answer.headers):
            if sink is not None:
                sink(view)
            elif len(kept) + len(view) > _BODY_MOST:
                raise Broken("an answer of more than 64 MiB where a short one is due")
            else:
                kept += view
        answer.body = bytes(kept)
        return answer, last or not ("content-length" in answer.headers or _chunked(answer.headers))

    def _skip_interim(self) -> None:
        while self._ahead.startswith(_INTERIM) and (end := self._ahead.find(b"\r\n\r\n")) >= 0:
            del self._ahead[: end + 4]

    def _body(self, headers: Mapping[str, str]) -> Iterator[memoryview]:
        if _chunked(headers):
            yield from self._chunks()
        elif "content-length" in headers:
            yield from self._exactly(_number(headers["content-length"], 10))
        else:
            yield from self._rest()

    def _exactly(self, length: int) -> Iterator[memoryview]:
        if length and self._ahead:
            first = bytes(self._ahead[:length])
            del self._ahead[: len(first)]
            self._flow.take(len(first))
            length -= len(first)
            yield memoryview(first)
        if not length:
            return
        room = block()
        while length:
            count = self._read(room[: min(length, self._flow.slice)])
            if not count:
                raise Broken(f"the answer ended {length} bytes early")
            self._flow.take(count)
            self._flow.check(self._halted)
            length -= count
            yield room[:count]

    def _chunks(self) -> Iterator[memoryview]:
        while length := _number(self._line().partition(";")[0], 16):
            yield from self._exactly(length)
            self._line()
        while self._line():  # trailers
            pass

    def _rest(self) -> Iterator[memoryview]:
        """Until the connection closes."""
        while True:
            if not self._ahead:
                room = block()[:_HEAD_MOST]
                count = self._read(room)
                if not count:
                    return
                self._ahead += room[:count]
            yield from self._exactly(len(self._ahead))

    def _line(self) -> str:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > _HEAD_MOST:
                raise Broken("a line of an answer without an end")
            self._more("the answer ended early")
        line = bytes(self._ahead[:end]).decode("latin-1")
        del self._ahead[: end + 2]
        return line

    def _more(self, else_: str) -> None:
        room = block()[:_HEAD_MOST]
        count = self._read(room)
        if not count:
            raise Broken(else_)
        self._ahead += room[:count]

    def _read(self, view: memoryview) -> int:
        """What has come, at least one byte; 0: the end."""
        while True:
            try:
                count = self._sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            else:
                self._answered = self._answered or bool(count)
                self._flow.count(bytes_received=count)
                return count

    def _wait(self, events: int) -> int:
        """Which of `events` happened."""
        deadline = time.monotonic() + self._idle_s
        self._poll.register(self._sock, events)
        while not (found := self._poll.poll(_TICK_MS)):
            self._flow.check(self._halted)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no byte moved for {self._idle_s:.0f} s")
        return found[0][1]


def _said(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _chunked(headers: Mapping[str, str]) -> bool:
    return "chunked" in headers.get("transfer-encoding", "").lower()


def _status(line: str) -> int:
    protocol, _, rest = line.partition(" ")
    if not protocol.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise Broken(f"no HTTP answer but {line[:80]!r}")
    return int(rest[:3])


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _number(text: str, base: int) -> int:
    try:
        number = int(text.strip(), base)
    except ValueError:
        number = -1
    if number < 0:
        raise Broken(f"a length of {text[:20]!r} in the answer")
    return number
