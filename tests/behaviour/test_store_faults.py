"""S3 when it goes wrong: a proxy in front of a real server loses, refuses, delays and cuts on demand."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import (
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreUnavailable,
)
from airflow_gpu_burst.runlog import Member, RunLog, begin, settle_generation
from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.store.s3 import S3Store

ATTEMPTS = 3
STALL_S = 0.8  # read timeout of a client that shall meet one


@dataclass
class Fault:
    """
    What happens to one request, after `skip` that match are let through.

    :param kind: `answer` (not forwarded, `status` and S3 `code` are sent), `plain` (an answer that is no S3
        error), `lose` (forwarded; no answer), `cut` (forwarded; half of the answer), `stall` (no answer in time),
        `whole` (forwarded without the range that was asked for).
    """

    kind: str
    method: str = ""
    match: str = ""
    skip: int = 0
    status: int = 500
    code: str = "InternalError"


@dataclass(frozen=True)
class Upstream:
    """A real server behind the proxy."""

    address: str
    access_key_id: str = "test"
    secret_access_key: str = "test"


@dataclass
class Proxy:
    upstream: Upstream
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    endpoint: str = ""

    def next_fault(self, method: str, path: str, headers: dict[str, str]) -> Fault | None:
        with self.lock:
            self.seen.append((method, path, headers))
            for fault in self.faults:
                if fault.method in ("", method) and fault.match in path:
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    self.faults.remove(fault)
                    return fault
        return None

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes, drop: str
    ) -> tuple[int, dict[str, str], bytes]:
        keep = {k: v for k, v in headers.items() if k not in ("connection", "expect", "host", drop)}
        upstream = http.client.HTTPConnection(self.upstream.address, timeout=30)
        upstream.request(method, path, body, {**keep, "host": headers["host"]})
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        return answer.status, dict(answer.getheaders()), data

    def requests(self, method: str) -> list[str]:
        return [path for m, path, _ in self.seen if m == method]


def handler_of(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle_all(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            fault = proxy.next_fault(self.command, self.path, headers)
            self.close_connection = fault is not None and fault.kind in ("lose", "cut", "stall")
            if fault and fault.kind in ("answer", "plain"):
                text = f"<Error><Code>{fault.code}</Code><Message>as asked</Message></Error>"
                self.reply(fault.status, {}, (text if fault.kind == "answer" else "<html>no</html>").encode())
                return
            if fault and fault.kind == "stall":
                threading.Event().wait(STALL_S + 0.4)
                return
            drop = "range" if fault and fault.kind == "whole" else ""
            status, answer_headers, data = proxy.forward(self.command, self.path, headers, body, drop)
            if fault and fault.kind == "lose":
                return
            self.reply(status, answer_headers, data, cut=fault is not None and fault.kind == "cut")

        def reply(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_all

    return Handler


@pytest.fixture(scope="module", params=["moto", pytest.param("lab", marks=pytest.mark.lab)])
def upstream(request: pytest.FixtureRequest) -> Iterator[Upstream]:
    if request.param == "lab":
        config = request.getfixturevalue("stack").store()
        yield Upstream(config.endpoint_url.partition("://")[2], config.access_key_id, config.secret_access_key)
        return
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield Upstream(f"{host}:{port}")
    server.stop()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(proxy))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    yield proxy
    server.shutdown()
    server.server_close()
    thread.join()


def connect(proxy: Proxy, read_timeout_s: float = 10) -> S3Store:
    config = StoreConfig(
        uri="s3://bucket/p",
        endpoint_url=proxy.endpoint,
        region="us-east-1",
        access_key_id=proxy.upstream.access_key_id,
        secret_access_key=proxy.upstream.secret_access_key,
    )
    return S3Store(
        config,
        attempts=ATTEMPTS,
        read_timeout_s=read_timeout_s,
        connect_timeout_s=5,
        sleep=lambda s: None,
    )


@pytest.fixture
def store(proxy: Proxy) -> Iterator[S3Store]:
    store = connect(proxy)
    store._client.create_bucket(Bucket="bucket")
    proxy.seen.clear()
    yield store
    proxy.faults.clear()
    for entry in list(store.list("")):
        store.delete(entry.key)
    store._client.delete_bucket(Bucket="bucket")
    store._client.close()


ANSWERS = [
    (404, "NoSuchKey", ObjectMissing, "HTTP 404"),
    (404, "NoSuchBucket", StoreError, "Create bucket 'bucket'"),
    (404, "Whatever", StoreUnavailable, "no answer of an S3 server"),
    (403, "AccessDenied", StoreForbidden, "s3:GetObject, and s3:ListBucket"),
    (403, "SignatureDoesNotMatch", StoreForbidden, "credentials"),
    (401, "Unauthorized", StoreForbidden, "credentials"),
    (403, "RequestTimeTooSkewed", StoreUnavailable, "clock"),
    (400, "ExpiredToken", StoreForbidden, "credentials"),
    (400, "RequestTimeout", StoreUnavailable, "try again"),
    (409, "OperationAborted", StoreUnavailable, "try again"),
    (429, "TooManyRequests", StoreUnavailable, "try again"),
    (500, "InternalError", StoreUnavailable, "try again"),
    (502, "", StoreUnavailable, "try again"),
    (503, "SlowDown", StoreUnavailable, "try again"),
    (507, "XMinioStorageFull", StoreFull, "Free space"),
    (403, "QuotaExceeded", StoreFull, "quota"),
    (400, "AuthorizationHeaderMalformed", StoreError, "region"),
]


@pytest.mark.parametrize(("status", "code", "error", "advice"), ANSWERS, ids=[f"{s}-{c}" for s, c, *_ in ANSWERS])
def test_what_an_answer_means(
    proxy: Proxy, store: S3Store, status: int, code: str, error: type[StoreError], advice: str
) -> None:
    store.put("key", b"there all the time")
    proxy.faults = [Fault("answer", "GET", status=status, code=code) for _ in range(ATTEMPTS)]
    with pytest.raises(StoreError, match=advice) as caught:
        store.get("key")
    assert type(caught.value) is error
    assert "'key'" in str(caught.value) or error is StoreError
    assert caught.value.__cause__ is not None
    assert len(proxy.requests("GET")) == (ATTEMPTS if error is StoreUnavailable else 1)


def test_a_proxy_that_knows_nothing_is_not_taken_for_an_empty_store(proxy: Proxy, store: S3Store) -> None:
    """An ingress without backends says 404. "No record" would make the run begin anew."""
    store.put("key", b"x")
    proxy.faults = [Fault("plain", "GET", status=404) for _ in range(ATTEMPTS)]
    with pytest.raises(StoreUnavailable, match="no answer of an S3 server"):
        store.get("key")


@pytest.mark.parametrize("kind", ["stall", "lose", "cut", "answer"])
def test_a_passing_fault_is_ridden_out(proxy: Proxy, store: S3Store, kind: str) -> None:
    impatient = connect(proxy, STALL_S) if kind == "stall" else store
    impatient.put("key", b"0123456789" * 100)
    proxy.faults = [Fault(kind, "GET", status=503, code="SlowDown")]
    assert impatient.get("key") == b"0123456789" * 100
    proxy.faults = [Fault(kind, "GET", match="list-type", status=503)]
    assert [entry.key for entry in impatient.list("")] == ["key"]
    if kind != "cut":
        proxy.faults = [Fault(kind, "PUT", status=503)]
        impatient.put("key", b"new")
        proxy.faults = [Fault(kind, "DELETE", status=503)]
        impatient.delete("key")


@pytest.mark.parametrize("kind", ["stall", "lose", "cut", "answer"])
def test_a_lasting_fault_is_cannot_tell(proxy: Proxy, store: S3Store, kind: str) -> None:
    impatient = connect(proxy, STALL_S) if kind == "stall" else store
    impatient.put("key", b"0123456789" * 100)
    proxy.faults = [Fault(kind, "GET", status=503) for _ in range(ATTEMPTS)]
    with pytest.raises(StoreUnavailable) as caught:
        impatient.get("key")
    assert caught.value.retryable


def test_nobody_listens() -> None:
    with pytest.raises(StoreUnavailable, match="check the way to it"):
        connect(Proxy(Upstream(""), endpoint="http://127.0.0.1:1")).get("key")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"endpoint_url": "https://bad host"}, "Invalid endpoint"),
        ({"region": "no region"}, "region_name"),
        ({"ca_bundle": "/nowhere/ca.pem"}, "AWS_CA_BUNDLE"),
        ({"uri": "s3://Bad_Bucket!"}, "Invalid bucket name"),
    ],
)
def test_configurations_that_cannot_work(change: dict[str, str], said: str, tmp_path: Path) -> None:
    sound = {"uri": "s3://bucket", "endpoint_url": "http://127.0.0.1:1", "region": "us-east-1"}
    secrets = {"access_key_id": "AKID", "secret_access_key": "hidden"}
    store = S3Store(StoreConfig(**{**sound, **secrets, **change}))
    for verb in (
        lambda: store.get("k"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError, match=said) as caught:
            verb()
        assert not caught.value.retryable
        assert "hidden" not in str(caught.value)


def test_no_credentials(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = S3Store(StoreConfig(uri="s3://bucket", endpoint_url=proxy.endpoint, region="us-east-1"))
    with pytest.raises(StoreForbidden, match="AWS_ACCESS_KEY_ID"):
        store.get("key")


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (412, "PreconditionFailed", ObjectExists),
        (409, "ConditionalRequestConflict", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (403, "AccessDenied", StoreForbidden),
        (501, "NotImplemented", StoreError),
        (400, "InvalidArgument", StoreError),
    ],
)
def test_create_makes_one_attempt(
    proxy: Proxy, store: S3Store, status: int, code: str, error: type[StoreError]
) -> None:
    proxy.faults = [Fault("answer", "PUT", status=status, code=code)]
    with pytest.raises(StoreError) as caught:
        store.create("key", b"x")
    assert type(caught.value) is error
    assert len(proxy.requests("PUT")) == 1
    assert next(h for m, _, h in proxy.seen if m == "PUT")["if-none-match"] == "*"


@pytest.mark.parametrize("kind", ["lose", "stall"])
def test_a_lost_answer_of_create_is_never_a_verdict(proxy: Proxy, store: S3Store, kind: str) -> None:
    impatient = connect(proxy, STALL_S) if kind == "stall" else store
    proxy.faults = [Fault(kind, "PUT")]
    with pytest.raises(StoreUnavailable):
        impatient.create("key", b"mine")
    if kind == "lose":
        with pytest.raises(ObjectExists):
            impatient.create("key", b"mine")
    else:
        impatient.create("key", b"mine")
    assert impatient.get("key") == b"mine"


def test_the_run_log_rides_out_lost_answers(proxy: Proxy, store: S3Store) -> None:
    """412 about one's own record, a conflict, a full stop: the log holds each record once."""
    log = RunLog(connect(proxy, STALL_S), "run", sleep=lambda s: None)
    proxy.faults = [
        Fault("lose", "PUT", match="/log/000000000001"),
        Fault("answer", "PUT", match="/log/000000000002", status=409, code="ConditionalRequestConflict"),
        Fault("lose", "PUT", match="/log/000000000002"),
        Fault("answer", "GET", match="/log/000000000002", skip=1, status=503),
        Fault("stall", "PUT", match="/log/000000000003"),
        Fault("lose", "PUT", match="/log/000000000004"),
    ]
    settle_generation(log, spec_digest="s", max_tries=0, try_number=1)
    member = Member(owner="A", rank=0, pod_uid="P")
    epoch = begin(log, generation=1, member=member, world_size=1, deadline_s=60, sleep=lambda s: None)
    key = f"{epoch.data_prefix}/x"
    epoch.commit(1, {key: "0"})
    epoch.finish({"rows": 1})
    assert proxy.faults == []
    assert [record.kind for record in RunLog(store, "run").read().records] == ["open", "start", "commit", "finish"]


def test_403_is_never_none_for_the_run_log(proxy: Proxy, store: S3Store) -> None:
    log = RunLog(store, "run")
    settle_generation(log, spec_digest="s", max_tries=0, try_number=1)
    proxy.faults = [Fault("answer", "GET", match="/log/", status=403, code="AccessDenied")]
    with pytest.raises(StoreForbidden):
        RunLog(store, "run").read()
