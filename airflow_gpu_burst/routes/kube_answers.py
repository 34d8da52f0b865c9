"""
What comes back from the Kubernetes API: lists, endless answers that another thread can end, and the server's clock.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from airflow_gpu_burst.errors import ClusterUnreachable, GpuBurstError
from airflow_gpu_burst.workloads.snapshot import Object

T = TypeVar("T")
PIECE = 64 << 10
"""Bytes that one read of an endless answer asks for at most."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A whole list, and the version from which a watch goes on."""

    items: list[Object]
    resource_version: str


class Stream(Generic[T]):
    """
    An endless answer: a context manager and an iterator. Asked for when it is iterated over (or by `open`), since a
    log answers nothing at all, not even a header, before the first line; `close` from another thread ends that too.

    :param ask: sends the request; raises what stands for a refusal.
    :param decode: from pieces of bytes to what is wanted.
    """

    def __init__(
        self,
        ask: Callable[[], urllib3.BaseHTTPResponse],
        decode: Callable[[Iterator[bytes]], Iterator[T]],
        where: str,
    ) -> None:
        self._ask = ask
        self._decode = decode
        self._where = where
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self._response: urllib3.BaseHTTPResponse | None = None
        self.closed = False

    def open(self) -> None:
        """
        Ask, and come back with the answer's header; nothing happens when that was done before, or after `close`.

        :raises GpuBurstError: what stands for the server's refusal, or for its silence.
        """
        if self._response is not None or self.closed:
            return
        _asking.stream = self
        try:
            response = self._ask()
        except GpuBurstError:
            if not self.closed:
                raise
            return
        finally:
            _asking.stream = None
        with self._lock:
            self._response = response

    def close(self) -> None:
        """From any thread: whoever iterates comes to the end."""
        with self._lock:
            self.closed = True
            if self._response is not None:
                with contextlib.suppress(Exception):  # it may end at this very moment
                    self._response.shutdown()
            if self._connection is not None:
                cut(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._release()

    def __iter__(self) -> Iterator[T]:
        try:
            self.open()
            if self._response is not None:
                yield from self._decode(self._pieces(self._response))
        finally:
            self._release()

    def carried_by(self, connection: HTTPConnection) -> None:
        """Told by the connection that sends the request."""
        with self._lock:
            self._connection = connection
            if self.closed:
                cut(connection)

    def _pieces(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        try:
            while not self.closed and (piece := response.read1(PIECE)):
                yield piece
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            # ValueError and AttributeError: what the standard library makes of a socket that `close` took away
            if not self.closed:
                raise ClusterUnreachable(f"{self._where} broke off in mid-answer: {error}. Ask again") from error

    def _release(self) -> None:
        """Give the connection back if the answer was read to its end, else end it: it can carry nothing more."""
        with self._lock:
            self._connection = None  # `close` must not cut it any more: it may carry another request now
            response, self._response = self._response, None
            self.closed = True
        if response is not None:
            response.close()


def cut(connection: HTTPConnection) -> None:
    """End the connection under whoever reads from it."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class _Asking(threading.local):
    """The stream for which this thread sends a request."""

    stream: Stream[Any] | None = None


_asking = _Asking()


class _Told:
    """Tells the stream by which connection it is carried; urllib3 does not, before the answer has begun."""

    def request(self, *args: Any, **kwargs: Any) -> None:
        stream = _asking.stream
        super().request(*args, **kwargs)  # type: ignore[misc]
        if stream is not None:
            assert isinstance(self, HTTPConnection)
            stream.carried_by(self)


class HTTP(_Told, HTTPConnection):
    """Its name stands in error messages."""


class HTTPS(_Told, HTTPSConnection):
    """Its name stands in error messages."""


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = HTTP


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = HTTPS


POOLS = {"http": _PlainPool, "https": _SecurePool}
"""For `PoolManager.pool_classes_by_scheme`."""


def lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines, without the empty ones."""
    rest: list[bytes] = []
    for piece in pieces:
        first, *others = piece.split(b"\n")
        rest.append(first)
        for start in others:
            if line := b"".join(rest):
                yield line
            rest = [start]


class ServerClock:
    """
    How far the server's clock is ahead of this machine's, from the Date header of answers.

    Date has whole seconds only, but each answer bounds the offset from both sides, and the bounds of several answers
    together are narrower than a second. When they contradict each other, a clock was set: older ones are dropped.
    """

    def __init__(self, remembered: int = 32) -> None:
        self._bounds: deque[tuple[float, float]] = deque(maxlen=remembered)
        self._lock = threading.Lock()

    def heard(self, date: str, sent: float, received: float) -> None:
        """One answer: its Date header, and the local wall clock when the request left and when the answer began."""
        try:
            stamp = parsedate_to_datetime(date).timestamp()
        except (ValueError, TypeError):
            return
        with self._lock:
            self._bounds.append((stamp - received, stamp + 1.0 - sent))
            while max(low for low, _ in self._bounds) > min(high for _, high in self._bounds):
                self._bounds.popleft()

    @property
    def offset(self) -> float:
        """Server time minus local time, in seconds; 0.0 before the first answer."""
        with self._lock:
            if not self._bounds:
                return 0.0
            return (max(low for low, _ in self._bounds) + min(high for _, high in self._bounds)) / 2
