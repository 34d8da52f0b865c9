"""RDMA against a server that gives each answer. No RDMA hardware: the server reaches the memory by its address."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from airflow_gpu_burst.errors import ChecksumMismatch, StoreError, StoreForbidden
from airflow_gpu_burst.transfer import MIB, Span, Tally, crc
from airflow_gpu_burst.transfer.answers import Fault, Kind
from airflow_gpu_burst.transfer.client import Ask, Client, Reply
from airflow_gpu_burst.transfer.connection import Answer, FileRange
from airflow_gpu_burst.transfer.fetching import fetch
from airflow_gpu_burst.transfer.flow import Flow
from airflow_gpu_burst.transfer.pace import Slots, TokenBucket
from airflow_gpu_burst.transfer.rdma import COOL_DOWN_S, LIBRARY, Library, Outcome, Rdma, native, outcome
from tests import s3_bucket
from tests.faulty_s3 import FaultyS3
from tests.s3_bucket import Body, Call, Object

DATA = random.Random(3).randbytes(3 * MIB + 17)
SUM = crc.to_header(crc.of_bytes(DATA))


class Local:
    """A `Native` whose tokens only this process understands."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.refuse = False

    def register(self, memory: mmap.mmap) -> None:
        self.registered.append(ctypes.addressof(ctypes.c_char.from_buffer(memory)))

    def token(self, memory: mmap.mmap, length: int, *, writable: bool) -> str:
        if self.refuse:
            raise OSError(5, "no device")
        return f"{'rw' if writable else 'r'}"

    def release(self, memory: mmap.mmap) -> None:
        self.registered.remove(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def memory_of(call: Call) -> tuple[str, Any]:
    """Descriptor and memory of a request's token."""
    descriptor, address, length = call.headers["x-amz-rdma-token"].split(":")
    return descriptor, (ctypes.c_char * int(length, 16)).from_address(int(address, 16))


class Server(FaultyS3):
    """Has RDMA, unless `fault` is told otherwise."""

    def __enter__(self) -> Server:
        super().__enter__()
        self.bucket.objects["key"] = Object(Body(len(DATA), crc.of_bytes(DATA), DATA), '"etag"')
        return self

    def rdma(self, **headers: str) -> None:
        """From now on, requests with a token are served by RDMA."""
        self.told = {"x-amz-rdma-reply": "200", **headers}
        self.fault("PutObject", when=_with_token, change=self._put, times=None)
        self.fault("UploadPart", when=_with_token, change=self._put, times=None)
        self.fault("GetObject", when=_with_token, change=self._get, times=None)

    def _put(self, call: Call, _: s3_bucket.Reply) -> s3_bucket.Reply:
        descriptor, memory = memory_of(call)
        assert descriptor == "r" and call.body.size == 0
        data = bytes(memory)
        reply = self.bucket.answer(replace(call, body=Body(len(data), crc.of_bytes(data), data)))
        reply.headers.update(self.told)
        return reply

    def _get(self, call: Call, reply: s3_bucket.Reply) -> s3_bucket.Reply:
        descriptor, memory = memory_of(call)
        assert descriptor == "rw"
        ctypes.memmove(memory, bytes(reply.body), len(reply.body))
        return s3_bucket.Reply(206, {**reply.headers, **self.told, "x-amz-rdma-reply": "206"}, b"")


def _with_token(call: Call) -> bool:
    return "x-amz-rdma-token" in call.headers


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "data").write_bytes(DATA)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    yield fd
    os.close(fd)


class Made:
    """A client with RDMA."""

    def __init__(self, server: FaultyS3, mode: Literal["prefer", "require"], native: Local | None) -> None:
        self.tally, self.now, self.native = Tally(), 0.0, native
        self.client = Client(server.config(), Flow(TokenBucket(None), self.tally), Slots(4), idle_timeout_s=5)
        self.rdma = Rdma(self.client, mode, native, clock=lambda: self.now)
        self.pool = ThreadPoolExecutor(2)

    def put(self, file: int, **extra: Any) -> Reply:
        body = FileRange(file, 0, len(DATA))
        headers = {"x-amz-checksum-crc64nvme": SUM}
        return self.rdma.call(Ask(action="put", method="PUT", key="new", body=body, headers=headers, **extra))

    def get(self, folder: Path, start: int = 5, length: int = 2 * MIB) -> bytes:
        sum_ = crc.of_bytes(DATA[start : start + length])
        with (folder / "got").open("w+b") as out:
            span = Span(start, length, out.fileno(), 0, sum_)
            fetch(self.client, self.pool, "key", [span], call=self.rdma.call)
            out.seek(0)
            return out.read()


@contextmanager
def made(
    server: FaultyS3, mode: Literal["prefer", "require"] = "prefer", native: Local | None = None
) -> Iterator[Made]:
    found = Made(server, mode, native)
    yield found
    found.rdma.close()
    found.client.close()
    found.pool.shutdown()
    assert native is None or native.registered == []


def tokens(server: FaultyS3) -> list[bool]:
    """Whether each request so far had a token."""
    return [_with_token(call) for call in server.calls]


class TestOffered:
    def test_upload(self, server: Server, file: int) -> None:
        server.rdma()
        with made(server, "require", Local()) as it:
            assert it.put(file).fault is None
            assert server.data("new") == DATA
            assert (it.tally.bytes_sent > len(DATA), it.tally.declined) == (True, 0)
            assert tokens(server) == [True]
            it.put(file)
            assert len(it.native.registered) == 1  # type: ignore[union-attr]  # registering is dear: used again

    def test_upload_of_a_part(self, server: Server, file: int) -> None:
        server.rdma()
        server.bucket.uploads["7"] = s3_bucket.Upload("new")
        with made(server, "require", Local()) as it:
            it.put(file, query={"uploadId": "7", "partNumber": "1"})
        assert server.bucket.uploads["7"].parts[1].body.data == DATA

    def test_download(self, server: Server, tmp_path: Path) -> None:
        server.rdma()
        with made(server, "require", Local()) as it:
            assert it.get(tmp_path) == DATA[5 : 5 + 2 * MIB]
            assert tokens(server) == [True]

    def test_download_in_two_steps(self, server: Server, tmp_path: Path) -> None:
        """The server moved less than was asked for."""
        server.rdma(**{"x-amz-rdma-bytes-transferred": str(MIB)})
        with made(server, "require", Local()) as it:
            assert it.get(tmp_path) == DATA[5 : 5 + 2 * MIB]
            assert tokens(server) == [True, True]

    def test_damage_is_found(self, server: Server, tmp_path: Path) -> None:
        server.rdma()
        server.bucket.objects["key"].body.data = bytes(len(DATA))
        with made(server, "require", Local()) as it, pytest.raises(ChecksumMismatch):
            it.get(tmp_path)

    def test_small_ones_go_by_tcp(self, server: Server, tmp_path: Path) -> None:
        server.rdma()
        with made(server, "require", Local()) as it:
            assert it.get(tmp_path, 0, 1000) == DATA[:1000]
            it.rdma.call(Ask(action="put", method="PUT", key="log/1.json", body=b"{}"))
            it.rdma.call(Ask(action="list", method="GET", key="", query={"prefix": ""}))
        assert tokens(server) == [False] * 3

    def test_an_ordinary_error_is_one(self, server: Server, tmp_path: Path) -> None:
        server.fault("GetObject", status=403, code="AccessDenied", headers={"x-amz-rdma-reply": "403"})
        with made(server, "prefer", Local()) as it:
            with pytest.raises(StoreForbidden):
                it.get(tmp_path)
            assert it.tally.declined == 0


DECLINES: list[dict[str, Any]] = [
    {"status": 501, "code": "NotImplemented", "headers": {"x-amz-rdma-reply": "501"}},
    {"status": 400, "code": "InvalidRequest", "headers": {"x-amz-rdma-reply": "501"}},
    {"status": 503, "code": "SlowDown", "headers": {"x-amz-rdma-reply": "501"}},
    {"status": 501, "code": "NotImplemented"},
    {"status": 501},
]


class TestDeclined:
    @pytest.mark.parametrize("fault", DECLINES, ids=str)
    def test_tcp_for_ten_minutes(self, server: Server, file: int, tmp_path: Path, fault: dict[str, Any]) -> None:
        server.fault("*", when=_with_token, times=None, **fault)
        with made(server, "prefer", Local()) as it:
            it.put(file)
            assert server.data("new") == DATA
            assert (tokens(server), it.tally.declined) == ([True, False], 1)
            assert it.get(tmp_path) == DATA[5 : 5 + 2 * MIB]
            assert tokens(server) == [True, False, False]
            it.now += COOL_DOWN_S
            assert it.get(tmp_path) == DATA[5 : 5 + 2 * MIB]
            assert (tokens(server), it.tally.declined) == ([True, False, False, True, False], 2)

    @pytest.mark.parametrize("fault", [one for one in DECLINES if one["status"] != 503], ids=str)
    def test_required(self, server: Server, file: int, tmp_path: Path, fault: dict[str, Any]) -> None:
        server.fault("*", when=_with_token, times=None, **fault)
        with made(server, "require", Local()) as it:
            with pytest.raises(StoreError, match="Use rdma=prefer"):
                it.get(tmp_path)
            with pytest.raises(StoreError, match="Use rdma=prefer"):
                it.put(file)
            assert tokens(server) == [True, True]

    def test_by_a_server_that_does_not_know_it(self, server: Server, file: int, tmp_path: Path) -> None:
        with made(server, "prefer", Local()) as it:
            it.put(file)
            assert server.data("new") == DATA  # not the empty object of the request without a body
            it.now += COOL_DOWN_S
            assert it.get(tmp_path) == DATA[5 : 5 + 2 * MIB]
            assert (tokens(server), it.tally.declined) == ([True, False, True], 2)

    def test_by_one_that_does_not_look_at_checksums_either(self, server: Server, file: int) -> None:
        server.bucket.verify, server.bucket.checksums = False, "none"
        with made(server, "prefer", Local()) as it:
            it.put(file)
            assert server.data("new") == DATA

    def test_by_one_that_does_not_know_it_and_rdma_is_required(self, server: Server, file: int, tmp_path: Path) -> None:
        with made(server, "require", Local()) as it:
            for call in (lambda: it.get(tmp_path), lambda: it.put(file)):
                with pytest.raises(StoreError, match="Use rdma=prefer"):
                    call()

    def test_without_a_library(self, server: Server, file: int, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        with made(server, "prefer", None) as it:
            it.put(file)
            it.put(file)
            assert (tokens(server), it.tally.declined) == ([False, False], 1)
        assert [LIBRARY in record.getMessage() for record in caplog.records] == [True]
        with made(server, "require", None) as it, pytest.raises(StoreError, match=LIBRARY):
            it.put(file)

    def test_by_the_library(self, server: Server, file: int) -> None:
        local = Local()
        local.refuse = True
        with made(server, "prefer", local) as it:
            it.put(file)
            assert (tokens(server), it.tally.declined) == ([False], 1)

    def test_a_busy_server_is_asked_by_tcp(self, server: Server, file: int) -> None:
        server.fault("PutObject", when=_with_token, status=503, code="SlowDown")
        with made(server, "prefer", Local()) as it:
            it.put(file)
            assert (tokens(server), it.tally.declined) == ([True, False], 0)


def test_what_is_too_much_for_one_handle(server: Server) -> None:
    body = FileRange(0, 0, (1 << 30) + 1)
    with made(server, "require", Local()) as it, pytest.raises(StoreError, match="at most 1073741824"):
        it.rdma.call(Ask(action="upload", method="PUT", key="a", body=body))


@pytest.mark.parametrize(
    ("status", "headers", "kind", "sum_", "expected"),
    [
        (200, {"x-amz-rdma-reply": "200"}, None, SUM, Outcome.DONE),
        (206, {"x-amz-rdma-reply": "206"}, None, None, Outcome.DONE),
        (200, {"x-amz-rdma-reply": "206"}, None, "", Outcome.DONE),
        (200, {"x-amz-rdma-reply": "204"}, None, SUM, Outcome.DONE),
        (200, {"x-amz-checksum-crc64nvme": SUM}, None, SUM, Outcome.DONE),
        (200, {}, None, SUM, Outcome.DECLINED),
        (200, {}, None, "", Outcome.DECLINED),
        (200, {"x-amz-checksum-crc64nvme": "other"}, None, SUM, Outcome.DECLINED),
        (200, {"x-amz-rdma-reply": "501"}, None, SUM, Outcome.DECLINED),
        (206, {}, None, None, Outcome.BY_TCP),
        (501, {}, Kind.UNSUPPORTED, None, Outcome.DECLINED),
        (500, {"x-amz-rdma-reply": "501"}, Kind.AGAIN, None, Outcome.DECLINED),
        (400, {}, Kind.DAMAGED, SUM, Outcome.DECLINED),
        (400, {"x-amz-rdma-reply": "400"}, Kind.DAMAGED, SUM, Outcome.FAULT),
        (500, {"x-amz-rdma-reply": "500"}, Kind.AGAIN, None, Outcome.FAULT),
        (404, {}, Kind.MISSING, None, Outcome.FAULT),
    ],
)
def test_outcome(status: int, headers: dict[str, str], kind: Kind | None, sum_: str | None, expected: Outcome) -> None:
    assert outcome(Answer(status, headers), Fault(kind, status) if kind else None, sum_=sum_) is expected


SHIM = """
#include <stdio.h>
#include <stdlib.h>
static void *last;
int gpu_burst_rdma_register(void *memory, size_t length) { last = memory; return length == 13; }
char *gpu_burst_rdma_token(void *memory, size_t length, int writable) {
    if (length == 13) return NULL;
    char *token = malloc(64);
    snprintf(token, 64, "%d-%zu-%d", memory == last, length, writable);
    return token;
}
void gpu_burst_rdma_free(char *token) { free(token); }
void gpu_burst_rdma_release(void *memory) { if (memory == last) last = NULL; }
"""


def test_a_library(tmp_path: Path) -> None:
    source, library = tmp_path / "shim.c", tmp_path / "libshim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    found, memory = Library(str(library)), mmap.mmap(-1, 4096)
    found.register(memory)
    assert found.token(memory, 100, writable=True) == "1-100-1"
    with pytest.raises(OSError, match="no token"):
        found.token(memory, 13, writable=False)
    found.release(memory)
    assert found.token(memory, 100, writable=False) == "0-100-0"
    memory.close()


def test_no_library(tmp_path: Path) -> None:
    assert native() is None
    source, library = tmp_path / "shim.c", tmp_path / "libshim.so"
    source.write_text("int other;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(OSError, match="gpu_burst_rdma_register"):
        Library(str(library))
