"""
A small S3 server on loopback that does wrong when told to: what real servers do, moto does not.

    with FaultyS3() as server:
        server.fault("UploadPart", status=503, code="SlowDown", times=3)
        mover = open_mover(server.config())
        ...
        assert server.count("UploadPart") == 13

Kinds are the API's names (`PutObject`, `GetObject`, `HeadObject`, `DeleteObject`, `DeleteObjects`, `CopyObject`,
`ListObjectsV2`, `CreateMultipartUpload`, `UploadPart`, `UploadPartCopy`, `CompleteMultipartUpload`, `ListParts`,
`AbortMultipartUpload`, `ListMultipartUploads`), or `*`. What the bucket itself does differently (checksums, conditions,
pages) is set on `server.bucket`.
"""

from __future__ import annotations

import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from awscrt.checksums import crc64nvme

from airflow_gpu_burst.store import StoreConfig
from tests.s3_bucket import Body, Bucket, Call, Reply, error

_BLOCK = 1 << 20


@dataclass(kw_only=True)
class Fault:
    """
    What goes wrong with a request. Nothing set: nothing.

    :param times: requests that it happens to; None: all.
    :param skip: requests of the kind that go well before.
    :param when: only those requests; looks at everything but the body.
    :param status: answer with this instead of acting (after the body was read), with `code`, `message` and `headers`.
        A status of 200 with a `code` is an error in the body of a success.
    :param early: answer before the body is read, then close.
    :param interim: send `100 Continue` first.
    :param delay_s: seconds before anything is read.
    :param rate: bytes per second at which the body is read, and an answer's body is sent.
    :param reset_after: close the connection hard after so many bytes of the request's body.
    :param stall_after: stop reading after so many bytes, for good.
    :param lost: act, then close without an answer.
    :param truncate: close after so many bytes of the answer's body.
    :param corrupt: flip a bit of the answer's body; of the request's body, when that has one.
    :param chunked: send the answer's body in chunks.
    :param forget: forget all multipart uploads first.
    :param close: say `Connection: close`.
    :param ranges: False: ignore the Range header.
    :param change: change the answer as you like.
    """

    times: int | None = 1
    skip: int = 0
    when: Callable[[Call], bool] = lambda call: True
    status: int = 0
    code: str = ""
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    early: bool = False
    interim: bool = False
    delay_s: float = 0.0
    rate: float | None = None
    reset_after: int | None = None
    stall_after: int | None = None
    lost: bool = False
    truncate: int | None = None
    corrupt: bool = False
    chunked: bool = False
    forget: bool = False
    close: bool = False
    ranges: bool = True
    change: Callable[[Call, Reply], Reply] = lambda call, reply: reply


class FaultyS3:
    """
    :param keep: False: bodies are only counted and summed, so that tests may send more than fits into memory.
    :param tls: a folder: serve TLS, with a certificate authority of its own whose file is put there.
    """

    def __init__(self, *, keep: bool = True, tls: Path | None = None, bucket: str = "bucket") -> None:
        self.bucket, self.name, self.keep = Bucket(), bucket, keep
        self.calls: list[Call] = []
        self.under_way, self.most_at_once = 0, 0
        self._faults: list[tuple[str, Fault]] = []
        self.sockets: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self._ca = ""
        context = None
        if tls is not None:
            context, self._ca = _context(tls)
        self._server = _Server(self, context)
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the server and all its connections."""
        self.stopped.set()
        self._server.shutdown()
        self.drop_connections()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http{'s' if self._ca else ''}://127.0.0.1:{self.port}"

    def config(self, prefix: str = "") -> StoreConfig:
        """A store in its bucket."""
        return StoreConfig(
            uri=f"s3://{self.name}/{prefix}".rstrip("/"),
            endpoint_url=self.url,
            region="us-east-1",
            ca_bundle=self._ca,
            access_key_id="access",
            secret_access_key="secret",
        )

    def fault(self, kind: str, **fields: Any) -> Fault:
        """From now on, requests of a kind meet this; see `Fault`."""
        fault = Fault(**fields)
        with self.lock:
            self._faults.append((kind, fault))
        return fault

    def clear(self) -> None:
        """No faults any more."""
        with self.lock:
            self._faults.clear()

    def drop_connections(self) -> None:
        """Close what connections there are, as a server does with idle ones."""
        with self.lock:
            for one in self.sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def count(self, *kinds: str) -> int:
        """Requests of these kinds so far; of all, without any."""
        return sum(not kinds or call.kind in kinds for call in self.calls)

    def data(self, name: str) -> bytes:
        """An object's bytes."""
        return self.bucket.objects[name].body.data or b""

    def met(self, call: Call) -> Fault:
        """The fault for a request, if any; counted."""
        with self.lock:
            for kind, fault in self._faults:
                if kind not in (call.kind, "*") or fault.times == 0 or not fault.when(call):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return Fault()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, owner: FaultyS3, context: ssl.SSLContext | None) -> None:
        self.owner, self._context = owner, context
        super().__init__(("127.0.0.1", 0), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the thread of the connection: a handshake that hangs holds up nobody else."""
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # clients go away, which is what they are tested for
            secured = self._context.wrap_socket(request, server_side=True) if self._context else request
            with self.owner.lock:
                self.owner.sockets.add(secured)
            try:
                super().finish_request(secured, client_address)
            finally:
                with self.owner.lock:
                    self.owner.sockets.discard(secured)
                secured.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Said by the handler, where it matters."""


class _Cut(Exception):
    """Close the connection hard."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def _serve(self) -> None:
        owner = self.server.owner
        call = self._call(Body())
        fault = owner.met(call)
        with owner.lock:
            owner.under_way += 1
            owner.most_at_once = max(owner.most_at_once, owner.under_way)
        try:
            self._answer(owner, call, fault)
        except _Cut:
            self.close_connection = True
            with suppress(OSError):  # a reset, not an orderly end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                self.connection.close()
        except OSError:
            self.close_connection = True
        finally:
            with owner.lock:
                owner.under_way -= 1

    def _answer(self, owner: FaultyS3, call: Call, fault: Fault) -> None:
        owner.stopped.wait(fault.delay_s) if fault.delay_s else None
        if fault.interim:
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.early:
            with owner.lock:
                owner.calls.append(call)
            self.close_connection = True
            self._send(call, self._wrong(fault), fault)
            self._drain()
            return
        call = self._call(self._body(owner, fault), ranges=fault.ranges)
        with owner.lock:
            owner.calls.append(call)
        if fault.forget:
            owner.bucket.uploads.clear()
        reply = self._wrong(fault) if fault.status else owner.bucket.answer(call)
        if fault.lost:
            raise _Cut
        self._send(call, fault.change(call, reply), fault)

    def _call(self, body: Body, *, ranges: bool = True) -> Call:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        name = unquote(parts.path).lstrip("/").partition("/")[2]
        headers = {key.lower(): value for key, value in self.headers.items() if ranges or key.lower() != "range"}
        return Call(_kind(self.command, name, query, headers), name, query, headers, body, str(self.client_address[1]))

    def _body(self, owner: FaultyS3, fault: Fault) -> Body:
        length = int(self.headers.get("content-length", 0))
        keep = owner.keep or length < _BLOCK or self.command == "POST"
        whole = bytearray(length if keep else min(length, _BLOCK))
        sum_, at = 0, 0
        while at < length:
            want = min(length - at, _BLOCK if fault.rate is None else max(1, int(fault.rate / 20)))
            for limit in (fault.reset_after, fault.stall_after):
                if limit is not None:
                    want = min(want, limit - at)
            if want <= 0:
                if fault.stall_after is not None:
                    owner.stopped.wait()
                raise _Cut
            view = memoryview(whole)[at if keep else 0 :][:want]
            count = self.rfile.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise _Cut
            if fault.corrupt and not at:
                view[0] ^= 1
            sum_ = crc64nvme(view[:count], sum_)  # type: ignore[arg-type]
            at += count
            if fault.rate is not None:
                owner.stopped.wait(count / fault.rate)
        return Body(length, sum_, bytes(whole) if keep else None)

    def _wrong(self, fault: Fault) -> Reply:
        body = error(fault.code, fault.message) if fault.code else b""
        return Reply(fault.status, dict(fault.headers), body)

    def _send(self, call: Call, reply: Reply, fault: Fault) -> None:
        body = bytes(reply.body)
        if fault.corrupt and call.kind == "GetObject" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response_only(reply.status)
        if "date" not in reply.headers:
            self.send_header("date", self.date_time_string())
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if fault.chunked:
            self.send_header("transfer-encoding", "chunked")
        elif reply.status != 204:
            self.send_header("content-length", str(len(body) if reply.length is None else reply.length))
        if fault.close or self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        self._send_body(body, fault)
        if fault.truncate is not None:
            raise _Cut

    def _send_body(self, body: bytes, fault: Fault) -> None:
        if fault.truncate is not None:
            body = body[: fault.truncate]
        step = len(body) if fault.rate is None else max(1, int(fault.rate / 20))
        if fault.chunked:
            step = 1000
        for at in range(0, len(body), max(1, step)):
            piece = body[at : at + step]
            self.wfile.write(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) if fault.chunked else piece)
            if fault.rate is not None:
                self.server.owner.stopped.wait(len(piece) / fault.rate)
        if fault.chunked:
            self.wfile.write(b"0\r\ntrailer: yes\r\n\r\n")
        self.wfile.flush()
        if fault.truncate is not None:
            time.sleep(0.05)  # what was sent arrives before the reset

    def _drain(self) -> None:
        """Leave the client's bytes unread for a moment, so that a reset does not overtake the answer."""
        time.sleep(0.2)


def _kind(method: str, name: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
    if not name:
        if method == "GET":
            return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
        return "DeleteObjects" if "delete" in query else f"{method.title()}Bucket"
    if "uploads" in query:
        return "CreateMultipartUpload"
    copy = "x-amz-copy-source" in headers
    if "uploadId" in query:
        part = "UploadPartCopy" if copy else "UploadPart"
        return {"PUT": part, "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}.get(
            method, "ListParts"
        )
    return "CopyObject" if copy else f"{method.title()}Object"


def _context(folder: Path) -> tuple[ssl.SSLContext, str]:
    """A server's side of TLS for 127.0.0.1, and the file of the authority that vouches for it."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "faulty S3")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    ca, private = folder / "ca.pem", folder / "key.pem"
    ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(ca, private)
    return context, str(ca)
