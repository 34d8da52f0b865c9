"""
RDMA where the store offers it, TCP where it declines.

The request is an ordinary S3 request without a body, with a token that names memory of this node; the server reads from
that memory, or writes to it, and says so in its answer. It declines by `x-amz-rdma-reply: 501`, or by HTTP 501; the
same request is then made again without the token, and RDMA is left alone for ten minutes. Only GetObject, PutObject and
UploadPart have this path. Small objects, and so all that is committed, never take it.

A server without RDMA does not know the token. A download then simply comes by TCP; an upload leaves an empty object
behind a success. So a success counts only with the server's RDMA reply, or with the checksum of what was meant.

The bytes stay in memory while they are moved: one part for each connection.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Literal, Protocol

from airflow_gpu_burst.errors import StoreError
from airflow_gpu_burst.transfer.answers import Fault, Kind
from airflow_gpu_burst.transfer.client import Ask, Client, Reply
from airflow_gpu_burst.transfer.connection import Answer, FileRange, Into, Sink
from airflow_gpu_burst.transfer.crc import FileEnded
from airflow_gpu_burst.transfer.flow import Halted
from airflow_gpu_burst.transfer.interface import MIB

LIBRARY = "libgpu-burst-rdma.so"
COOL_DOWN_S = 600.0
SMALLEST = MIB
"""Bytes below which TCP is as good."""
LARGEST = 1 << 30
"""Bytes that cuObject moves by one handle (descriptors end at 4 GiB). Only parts of files beyond 9 TiB are larger."""

_TOKEN, _REPLY, _BYTES = "x-amz-rdma-token", "x-amz-rdma-reply", "x-amz-rdma-bytes-transferred"
_CRC = "x-amz-checksum-crc64nvme"
_DONE = {"200", "204", "206"}

_log = logging.getLogger(__name__)


class Native(Protocol):
    """What a vendor's library does: let a server reach memory of this process."""

    def register(self, memory: mmap.mmap) -> None:
        """From now on servers may be given tokens for it. Raises OSError."""
        ...

    def token(self, memory: mmap.mmap, length: int, *, writable: bool) -> str:
        """What lets a server read the first `length` bytes, or write them. Raises OSError."""
        ...

    def release(self, memory: mmap.mmap) -> None:
        """No token for it is good any more."""
        ...


class Outcome(Enum):
    """What an answer to a request with a token says."""

    DONE = "the bytes were moved"
    DECLINED = "not by RDMA"
    BY_TCP = "the server took no notice of the token, and the bytes came in the answer"
    FAULT = "an ordinary error"


def outcome(answer: Answer, fault: Fault | None, *, sum_: str | None) -> Outcome:
    """
    Pure.

    :param sum_: of an upload, the checksum header that was sent (may be empty); None: a download.
    """
    told = answer.headers.get(_REPLY, "").strip()
    if told == "501":
        return Outcome.DECLINED
    if fault is None:
        if told in _DONE or (sum_ and answer.headers.get(_CRC) == sum_):
            return Outcome.DONE
        return Outcome.BY_TCP if sum_ is None else Outcome.DECLINED
    # An upload without a body does not have the checksum: so says a server that does not know the token.
    ignored = fault.kind is Kind.DAMAGED and sum_ is not None and not told
    return Outcome.DECLINED if ignored or fault.status == 501 else Outcome.FAULT


class Rdma:
    """
    Makes requests like `Client.call`, by RDMA where that is possible. Safe for threads.

    :param mode: `prefer`, or `require`: an error instead of TCP.
    :param native: what there is on this node; None: nothing.
    """

    def __init__(
        self,
        client: Client,
        mode: Literal["prefer", "require"],
        native: Native | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._native, self._required, self._clock = client, native, mode == "require", clock
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._not_before = float("-inf")

    def call(
        self,
        ask: Ask | Callable[[], Ask],
        *,
        into: Into | None = None,
        expected: Collection[Kind] = (),
        halted: Halted = lambda: False,
    ) -> Reply:
        """
        See `Client.call`.

        :raises StoreError: also when RDMA is required, and the store or this node cannot do it.
        """
        wanted = ask() if callable(ask) else ask
        length = _length(wanted)
        if length >= SMALLEST and (self._required or (length <= LARGEST and self._clock() >= self._not_before)):
            reply = self._by_rdma(wanted, length, into, expected, halted)
            if reply is not None:
                return reply
        return self._client.call(ask, into=into, expected=expected, halted=halted)

    def close(self) -> None:
        """Let go of the memory."""
        with self._lock:
            free, self._free = self._free, []
        for memory in free:
            self._released(memory)

    def _by_rdma(
        self, ask: Ask, length: int, into: Into | None, expected: Collection[Kind], halted: Halted
    ) -> Reply | None:
        """None: by TCP, please."""
        if length > LARGEST:
            self._decline(f"{length} bytes are more than RDMA moves at once: use parts of at most {LARGEST}")
        elif self._native is None:
            self._decline(f"this node has no {LIBRARY}")
        else:
            try:
                with self._memory(self._native, length) as memory:
                    return self._exchange(self._native, memory, ask, length, into, expected, halted)
            except _NoToken as error:
                self._decline(f"the library of this node gives no token ({error})")
        return None

    def _exchange(
        self,
        native: Native,
        memory: mmap.mmap,
        ask: Ask,
        length: int,
        into: Into | None,
        expected: Collection[Kind],
        halted: Halted,
    ) -> Reply | None:
        sum_ = ask.headers.get(_CRC, "") if ask.method == "PUT" else None
        if sum_ is not None:
            _fill(memory, ask)
        self._take(length, halted)
        try:
            descriptor = native.token(memory, length, writable=sum_ is None)
        except OSError as error:
            raise _NoToken(error) from error
        token = f"{descriptor}:{_address(memory):016x}:{length:016x}"
        sent = Ask(
            action=ask.action, method=ask.method, key=ask.key, query=ask.query, headers={**ask.headers, _TOKEN: token}
        )

        def body(answer: Answer) -> Sink | None:
            return None if _REPLY in answer.headers or into is None else into(answer)

        passing = set() if self._required else {Kind.AGAIN, Kind.SLOW}
        mine = {Kind.UNSUPPORTED, Kind.DAMAGED, Kind.FINAL, *passing}
        reply = self._client.call(sent, into=body, expected={*expected, *mine}, halted=halted)
        found = outcome(reply.answer, reply.fault, sum_=sum_)
        if found is Outcome.DONE:
            self._done(memory, ask, length, reply, into)
        elif found is Outcome.FAULT:
            return self._judged(ask, reply, expected, passing)
        else:
            self._decline(f"the store at {self._client.endpoint.host} does not do it")
        return None if found is Outcome.DECLINED else reply

    def _judged(self, ask: Ask, reply: Reply, expected: Collection[Kind], passing: Collection[Kind]) -> Reply | None:
        fault = reply.fault
        assert fault is not None
        if fault.kind in expected:
            return reply
        if fault.kind in passing:
            return None  # the way by TCP has the patience
        raise fault.error(ask.action, ask.key, self._client.config)

    def _done(self, memory: mmap.mmap, ask: Ask, length: int, reply: Reply, into: Into | None) -> None:
        if ask.method == "PUT":
            self._client.flow.count(bytes_sent=length)
            return
        told = reply.answer.headers.get(_BYTES, "")
        came = min(length, int(told)) if told.isdecimal() else length
        self._client.flow.count(bytes_received=came)
        if not came:
            return
        start = int(ask.headers["range"].removeprefix("bytes=").partition("-")[0])
        headers = {**reply.answer.headers, "content-range": f"bytes {start}-{start + came - 1}/*"}
        sink = into(Answer(206, headers)) if into else None
        if sink:
            with memoryview(memory) as view, view[:came] as part:
                sink(part)

    def _decline(self, why: str) -> None:
        """
        Use TCP for a while.

        :raises StoreError: RDMA is required.
        """
        self._client.flow.count(declined=1)
        if self._required:
            raise StoreError(f"rdma=require, and {why}. Use rdma=prefer or off, or a store and a node that have RDMA")
        now = self._clock()
        with self._lock:
            first, self._not_before = self._not_before < now, now + COOL_DOWN_S
        if first:  # and not when others, under way at once, are told the same
            _log.warning("no RDMA: %s; TCP is used for %.0f minutes", why, COOL_DOWN_S / 60)

    def _take(self, length: int, halted: Halted) -> None:
        flow, left = self._client.flow, length
        while left > 0:
            flow.check(halted)
            flow.take(min(left, flow.slice))
            left -= flow.slice

    @contextmanager
    def _memory(self, native: Native, length: int) -> Iterator[mmap.mmap]:
        """Registered memory of at least that size; registering costs more than moving."""
        with self._lock:
            fitting = [one for one in self._free if len(one) >= length]
            found = fitting[0] if fitting else None
            if found is not None:
                self._free.remove(found)
        if found is None:
            found = mmap.mmap(-1, length)
            try:
                native.register(found)
            except OSError as error:
                found.close()
                raise _NoToken(error) from error
        try:
            yield found
        except BaseException:
            self._released(found)  # an answer that did not come: the server may still be writing to it
            raise
        with self._lock:
            self._free.append(found)

    def _released(self, memory: mmap.mmap) -> None:
        assert self._native is not None
        self._native.release(memory)
        memory.close()


class _NoToken(Exception):
    """The library refused."""


class Library:
    """
    `Native` by a small C library around the vendor's own (NVIDIA's cuObject client has only a C++ interface):

        int   gpu_burst_rdma_register(void *memory, size_t length);                      0: done
        char *gpu_burst_rdma_token(void *memory, size_t length, int writable);           NULL: not now; freed by:
        void  gpu_burst_rdma_free(char *token);
        void  gpu_burst_rdma_release(void *memory);

    :raises OSError: there is no such library here.
    """

    def __init__(self, name: str = LIBRARY) -> None:
        library = ctypes.CDLL(name, use_errno=True)
        try:
            self._register, self._token = library.gpu_burst_rdma_register, library.gpu_burst_rdma_token
            self._free, self._release = library.gpu_burst_rdma_free, library.gpu_burst_rdma_release
        except AttributeError as error:
            raise OSError(f"{name}: {error}") from error
        self._register.argtypes, self._register.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
        self._token.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._token.restype = ctypes.c_void_p
        self._free.argtypes, self._free.restype = [ctypes.c_void_p], None
        self._release.argtypes, self._release.restype = [ctypes.c_void_p], None

    def register(self, memory: mmap.mmap) -> None:
        """See `Native`."""
        if self._register(_address(memory), len(memory)):
            raise OSError(ctypes.get_errno(), "memory was not registered")

    def token(self, memory: mmap.mmap, length: int, *, writable: bool) -> str:
        """See `Native`."""
        found = self._token(_address(memory), length, int(writable))
        if not found:
            raise OSError(ctypes.get_errno(), "no token")
        try:
            return ctypes.string_at(found).decode("ascii")
        finally:
            self._free(found)

    def release(self, memory: mmap.mmap) -> None:
        """See `Native`."""
        self._release(_address(memory))


def native() -> Native | None:
    """What this node has."""
    try:
        return Library()
    except OSError:
        return None


def _length(ask: Ask) -> int:
    """Bytes that a request moves, if it is one that can go by RDMA; else 0."""
    if ask.method == "PUT" and "x-amz-copy-source" not in ask.headers:
        return ask.size
    first, _, last = ask.headers.get("range", "").removeprefix("bytes=").partition("-")
    return int(last) - int(first) + 1 if ask.method == "GET" and first and last else 0


def _fill(memory: mmap.mmap, ask: Ask) -> None:
    body = ask.body
    if not isinstance(body, FileRange):
        memory[: ask.size] = bytes(body or b"")
        return
    with memoryview(memory) as view:
        at = 0
        while at < body.length:
            with view[at : body.length] as part:
                count = os.preadv(body.fd, [part], body.start + at)
            if not count:
                raise FileEnded
            at += count


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
