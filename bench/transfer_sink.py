"""
The S3 server of the transfer benchmark: answers at once, lets bodies fall, sends objects by `sendfile`.

`python bench/transfer_sink.py FOLDER [CERTIFICATE KEY]` prints `{"http": port, "https": port}`. A bucket `kept` keeps
its objects as files of FOLDER; every other one keeps names, sizes and checksums only. Over plain HTTP a body costs
nothing here (`MSG_TRUNC`: the kernel drops it); over TLS it is decrypted, then forgotten. `GET /-/meter` tells what
came and when, and the largest object that is kept; `GET /-/reset` begins anew.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import resource
import socket
import ssl
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote

TICK_S = 0.005
SLOW_S = 0.005
"""What the bucket `slow` takes to answer a PUT: as a store does that puts it on several disks."""
BLOCK = 4 << 20
XML = '<?xml version="1.0" encoding="UTF-8"?>'
CHECKSUM = "x-amz-checksum-crc64nvme"


class Lane:
    """What one connection has brought."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.first = self.last = 0.0
        self.received = self.sent = self.requests = 0
        self.ticks: dict[int, int] = defaultdict(int)

    def note(self, count: int) -> None:
        """`count` bytes have come now."""
        now = time.monotonic()
        self.first = self.first or now
        self.last = now
        self.received += count
        self.ticks[int(now / TICK_S)] += count


class Meter:
    """All lanes together."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()

    def lane(self) -> Lane:
        """For one more connection."""
        with self._lock:
            self._lanes.append(Lane())
            return self._lanes[-1]

    def reset(self) -> None:
        """Forget; connections stay."""
        with self._lock:
            for lane in self._lanes:
                lane.clear()

    def told(self) -> dict[str, object]:
        """As JSON: counts, seconds from the first byte to the last, bytes per tick, CPU seconds of this server."""
        with self._lock:
            lanes = [lane for lane in self._lanes if lane.first]
        ticks: dict[int, int] = defaultdict(int)
        for lane in lanes:
            for tick, count in list(lane.ticks.items()):
                ticks[tick] += count
        begin = min(ticks, default=0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "received": sum(lane.received for lane in lanes),
            "sent": sum(lane.sent for lane in lanes),
            "requests": sum(lane.requests for lane in lanes),
            "connections": len(lanes),
            "seconds": max((lane.last for lane in lanes), default=0.0)
            - min((lane.first for lane in lanes), default=0.0),
            "ticks": [ticks.get(tick, 0) for tick in range(begin, max(ticks, default=-1) + 1)],
            "cpu_s": used.ru_utime + used.ru_stime,
        }


@dataclass(frozen=True)
class Object:
    """What is known of an object; `path`: where a kept one lies."""

    size: int
    headers: dict[str, str]
    path: Path | None = None


class Shelf:
    """Objects and half-way uploads. Plain dicts: each operation is one step of the interpreter."""

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, dict[int, Object]] = {}
        self._folder, self._numbers = folder, itertools.count()

    def place(self, name: str) -> Path | None:
        """Where the body of an object goes; None: nowhere."""
        return self._folder / str(next(self._numbers)) if name.startswith("kept/") else None

    def join(self, name: str, parts: dict[int, Object]) -> Object:
        """One object of its parts."""
        whole = self.place(name)
        if whole is not None:
            with whole.open("wb") as out:
                for number in sorted(parts):
                    path = parts[number].path
                    assert path is not None
                    with path.open("rb") as part:
                        while os.sendfile(out.fileno(), part.fileno(), None, 1 << 30):
                            pass
                    path.unlink()
        return Object(sum(part.size for part in parts.values()), {"etag": f'"{len(parts):032x}-{len(parts)}"'}, whole)


class Closed(Exception):
    """The client has gone."""


class Client:
    """One connection, in a thread of its own."""

    def __init__(self, sock: socket.socket, shelf: Shelf, meter: Meter) -> None:
        self._sock, self._shelf, self._meter = sock, shelf, meter
        self._drop = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_TRUNC
        self._ahead = bytearray()
        self._block = memoryview(mmap.mmap(-1, BLOCK))  # untouched pages where bytes are dropped
        self._lane = meter.lane()

    def serve(self) -> None:
        """Until it closes."""
        try:
            while True:
                self._one()
        except (Closed, OSError):
            self._sock.close()

    def _one(self) -> None:
        method, target, headers = self._head()
        path, _, query = target.partition("?")
        name, asked = unquote(path).lstrip("/"), parse_qs(query, keep_blank_values=True)
        if name.startswith("-/"):
            self._control(name)
            return
        self._lane.note(0)
        self._lane.requests += 1
        if headers.get("expect", "").lower() == "100-continue":
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        getattr(self, f"_do_{method.lower()}")(name, asked, headers)

    def _control(self, name: str) -> None:
        if name == "-/reset":
            self._meter.reset()
            self._shelf.objects = {n: o for n, o in self._shelf.objects.items() if o.path is not None}
        kept = {key: found.size for key, found in self._shelf.objects.items() if found.path is not None}
        told = self._meter.told() | {"largest": max(kept, key=kept.__getitem__, default="")}
        self._answer(200, {}, json.dumps(told).encode())

    # --- requests -------------------------------------------------------------------------------------------------

    def _do_put(self, name: str, asked: dict[str, list[str]], headers: dict[str, str]) -> None:
        place = self._shelf.place(name)
        size = self._body(headers, place)
        size = int(headers.get("x-amz-decoded-content-length", size))
        told = {"etag": f'"{size:032x}"'} | {k: v for k, v in headers.items() if k == CHECKSUM}
        if "uploadId" in asked:
            parts = self._shelf.uploads.get(asked["uploadId"][0])
            if parts is None:
                self._refuse(404, "NoSuchUpload")
                return
            parts[int(asked["partNumber"][0])] = Object(size, told, place)
        else:
            self._shelf.objects[name] = Object(size, told, place)
        if name.startswith("slow/"):
            time.sleep(SLOW_S)
        self._answer(200, told)

    def _do_post(self, name: str, asked: dict[str, list[str]], headers: dict[str, str]) -> None:
        self._body(headers, None)
        bucket, _, key = name.partition("/")
        where = f"<Bucket>{bucket}</Bucket><Key>{key}</Key>"
        if "uploads" in asked:
            number = f"{time.monotonic_ns():x}"
            self._shelf.uploads[number] = {}
            self._xml("InitiateMultipartUploadResult", f"{where}<UploadId>{number}</UploadId>")
        elif "uploadId" in asked:
            parts = self._shelf.uploads.pop(asked["uploadId"][0], None)
            if parts is None:
                self._refuse(404, "NoSuchUpload")
                return
            whole = self._shelf.join(name, parts)
            if CHECKSUM in headers:
                whole.headers.update({CHECKSUM: headers[CHECKSUM], "x-amz-checksum-type": "FULL_OBJECT"})
            self._shelf.objects[name] = whole
            self._xml("CompleteMultipartUploadResult", f"{where}<ETag>{whole.headers['etag']}</ETag>")
        else:
            self._xml("DeleteResult", "")

    def _do_delete(self, name: str, asked: dict[str, list[str]], headers: dict[str, str]) -> None:
        if "uploadId" in asked:
            self._shelf.uploads.pop(asked["uploadId"][0], None)
        else:
            self._shelf.objects.pop(name, None)
        self._answer(204, {})

    def _do_head(self, name: str, asked: dict[str, list[str]], headers: dict[str, str]) -> None:
        found = self._shelf.objects.get(name)
        if found is None and "/" in name.rstrip("/"):
            self._answer(404, {"content-length": "0"})
        else:
            size, told = (found.size, found.headers) if found else (0, {})
            self._answer(200, {**told, "content-length": str(size)})

    def _do_get(self, name: str, asked: dict[str, list[str]], headers: dict[str, str]) -> None:
        if "list-type" in asked or "uploads" in asked or "location" in asked:
            self._xml("ListBucketResult", "<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>")
            return
        found = self._shelf.objects.get(name)
        if found is None or found.path is None:
            self._refuse(404, "NoSuchKey")
            return
        status, start, end = 200, 0, found.size
        told = {**found.headers, "accept-ranges": "bytes"}
        if "range" in headers:
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            status, start, end = 206, int(first), min(found.size, int(last) + 1 if last else found.size)
            told["content-range"] = f"bytes {start}-{end - 1}/{found.size}"
        self._answer(status, {**told, "content-length": str(end - start)})
        with found.path.open("rb") as file:
            self._send(file.fileno(), start, end)

    # --- the wire -------------------------------------------------------------------------------------------------

    def _head(self) -> tuple[str, str, dict[str, str]]:
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            self._more()
        lines = self._ahead[:end].decode("latin-1").split("\r\n")
        del self._ahead[: end + 4]
        method, target, _ = lines[0].split(" ")
        headers = (line.partition(":") for line in lines[1:])
        return method, target, {name.lower(): value.strip() for name, _, value in headers}

    def _body(self, headers: dict[str, str], place: Path | None) -> int:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            size = int(headers.get("content-length", 0))
            if place is None:
                self._let_fall(size)
            else:
                with place.open("wb") as out:
                    self._let_fall(size, out.fileno())
            return size
        total = 0
        while size := int(self._line(), 16):
            self._let_fall(size)
            self._line()
            total += size
        while self._line():
            pass
        return total

    def _let_fall(self, size: int, into: int | None = None) -> None:
        first = self._ahead[:size]
        del self._ahead[: len(first)]
        if into is not None:
            os.write(into, first)
        size -= len(first)
        flags = self._drop if into is None else 0
        while size:
            count = self._sock.recv_into(self._block, min(size, BLOCK), flags)
            if not count:
                raise Closed
            if into is not None:
                os.write(into, self._block[:count])
            self._lane.note(count)
            size -= count

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            self._more()
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _more(self) -> None:
        data = self._sock.recv(16 << 10)
        if not data:
            raise Closed
        if not self._ahead.startswith(b"GET /-/") and not data.startswith(b"GET /-/"):
            self._lane.note(len(data))
        self._ahead += data

    def _send(self, fd: int, at: int, end: int) -> None:
        if self._drop:
            while at < end:
                count = os.sendfile(self._sock.fileno(), fd, at, end - at)
                at += count
                self._lane.sent += count
            return
        while at < end:
            count = os.preadv(fd, [self._block[: min(end - at, 256 << 10)]], at)
            self._sock.sendall(self._block[:count])
            at += count
            self._lane.sent += count

    def _xml(self, tag: str, content: str) -> None:
        body = f'{XML}<{tag} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{tag}>'
        self._answer(200, {"content-type": "application/xml"}, body.encode())

    def _refuse(self, status: int, code: str) -> None:
        body = f"{XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self._answer(status, {"content-type": "application/xml"}, body.encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        named = {"content-length": str(len(body)), "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self._sock.sendall(f"HTTP/1.1 {status} -\r\nx-amz-bucket-region: us-east-1\r\n{head}\r\n".encode() + body)


def accept(listener: socket.socket, shelf: Shelf, meter: Meter, context: ssl.SSLContext | None) -> None:
    """A thread for each connection."""

    def talk(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            Client(context.wrap_socket(sock, server_side=True) if context else sock, shelf, meter).serve()
        except (OSError, ValueError):
            sock.close()

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=talk, args=(sock,), daemon=True).start()


def main() -> int:
    """Serve until killed."""
    folder, files = Path(sys.argv[1]), sys.argv[2:]
    context = None
    if files:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
    shelf, meter, ports = Shelf(folder), Meter(), {}
    for name, used in (("http", None), ("https", context)):
        if name == "http" or used:
            listener = socket.create_server(("127.0.0.1", 0), backlog=256)
            ports[name] = listener.getsockname()[1]
            threading.Thread(target=accept, args=(listener, shelf, meter, used), daemon=True).start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()  # until whoever started this closes it
    return 0


if __name__ == "__main__":
    sys.exit(main())
