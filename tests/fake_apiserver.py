"""
A small Kubernetes API server on loopback that goes wrong on demand: what a real one does not do when asked.

It holds objects of any kind, answers get, list (pages), create, delete, watch, logs and access reviews, and knows
nothing about what the objects mean. `fault` breaks chosen requests, see `Fault`.

    with FakeApi() as api:
        pod = api.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "train"}})
        api.fault("status", verb="list", resource="pods", status=503, times=2)
        KubeConfig(kubeconfig=api.kubeconfig())
"""

from __future__ import annotations

import copy
import json
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
VERBS = {"GET": "get", "POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}
ALWAYS = 1_000_000


@dataclass
class Fault:
    """
    What happens to the next `times` requests of that verb and resource (empty: any), after `skip` that pass.

    :param kind: `status` (refused with `status`), `forbidden` (403 in the words of RBAC), `lost` (done, but the
        connection is closed without an answer), `done-but` (done, but refused with `status`), `drop` (closed without
        an answer, nothing done), `slow` (answered after `delay_s`), `html` (an ingress's page); of watches also
        `close` (200, and the end at once), `freeze` (200, and silence), `cut` (the connection breaks in mid-event),
        `expired` (200, and an ERROR event of 410).
    """

    kind: str
    verb: str = ""
    resource: str = ""
    times: int = 1
    skip: int = 0
    status: int = 500
    reason: str = "InternalError"
    message: str = "a fault of the test"
    details: Object = field(default_factory=dict)
    retry_after: str = ""
    delay_s: float = 0.0

    def end(self) -> None:
        """No more of it."""
        self.times = 0


@dataclass(frozen=True)
class Request:
    """One request as it came in."""

    verb: str
    resource: str
    namespace: str
    name: str
    query: dict[str, str]
    token: str
    body: Object | None
    at: float


@dataclass
class Log:
    """What a container has written. `follow` goes on until `ended`."""

    text: bytes = b""
    ended: bool = False


class FakeApi:
    """
    See the module. Attributes that tests set and read:

    :param tls: certificate and key, PEM files; plain HTTP without.
    :param objects: (resource, namespace, name) -> object.
    :param requests: every request so far.
    :param tokens: bearer tokens that are accepted; empty: any, none included.
    :param skew_s: how far this server's clock is ahead.
    :param logs: (pod, container) -> Log; `write` appends.
    :param missing_namespaces: creates in them are refused.
    :param stale_below: a watch from an older version is answered 200, and ends at once (kubernetes#104171).
    """

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.requests: list[Request] = []
        self.tokens: set[str] = set()
        self.skew_s = 0.0
        self.logs: dict[tuple[str, str], Log] = {}
        self.missing_namespaces: set[str] = set()
        self.changed = threading.Condition()
        self.history: list[tuple[int, str, str, Object]] = []  # version, type, resource, object
        self.oldest = 0
        self.stale_below = 0
        self.version = 100
        self._faults: list[Fault] = []
        self._tls = tls
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()
        self.start()

    # ---- for tests

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def kubeconfig(self, token: str = "token", namespace: str = "train", context: str = "fake") -> str:
        """Text of a kubeconfig with one context."""
        cluster: Object = {"server": self.url}
        if self._tls:
            cluster["certificate-authority"] = str(self._tls[0])
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": context,
                "contexts": [{"name": context, "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": {"token": token}}],
            }
        )

    def fault(self, kind: str, **settings: Any) -> Fault:
        """From now on, see `Fault`."""
        fault = Fault(kind, **settings)
        with self.changed:
            self._faults.append(fault)
        return fault

    def forbid(self, verb: str, resource: str) -> Fault:
        """403 from now on, until `end` of what is returned."""
        return self.fault("forbidden", verb=verb, resource=resource, times=ALWAYS)

    def put(self, item: Object) -> Object:
        """Create or replace, as a controller would; UID, version and creation time are filled in."""
        item = copy.deepcopy(item)
        resource, about = _resource(item), item.setdefault("metadata", {})
        about.setdefault("namespace", "train")
        with self.changed:
            key = (resource, about["namespace"], about["name"])
            old = self.objects.get(key)
            about.setdefault("uid", old["metadata"]["uid"] if old else str(uuid.uuid4()))
            now = datetime.fromtimestamp(time.time() + self.skew_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            about.setdefault("creationTimestamp", now)
            self._commit("MODIFIED" if old else "ADDED", resource, item)
            self.objects[key] = item
        return copy.deepcopy(item)

    def delete(self, resource: str, name: str, namespace: str = "train") -> None:
        """Gone, as if someone had deleted it."""
        with self.changed:
            item = self.objects.pop((resource, namespace, name))
            self._commit("DELETED", resource, copy.deepcopy(item))

    def write(self, pod: str, text: bytes, container: str = "trainer") -> None:
        """Append to a container's log."""
        with self.changed:
            self.logs.setdefault((pod, container), Log()).text += text
            self.changed.notify_all()

    def end_log(self, pod: str, container: str = "trainer") -> None:
        """The container has ended."""
        with self.changed:
            self.logs.setdefault((pod, container), Log()).ended = True
            self.changed.notify_all()

    def compact(self) -> None:
        """Forget all changes so far: a watch from before gets a 410."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.history.clear()

    def count(self, verb: str = "", resource: str = "") -> int:
        """How many such requests there were."""
        return sum(r.verb == (verb or r.verb) and r.resource == (resource or r.resource) for r in list(self.requests))

    def cut_connections(self) -> None:
        """Break every connection that is open."""
        with self.changed:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        server = _Server(("127.0.0.1", self._port), _handler_of(self))
        if self._tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._tls)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        self._server, self._port = server, server.server_address[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and break those that are open."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self.cut_connections()
            with self.changed:
                self.changed.notify_all()

    @property
    def stopped(self) -> bool:
        return self._server is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- for the handler

    def take_fault(self, verb: str, resource: str) -> Fault | None:
        with self.changed:
            for fault in self._faults:
                if fault.times <= 0 or fault.verb not in ("", verb) or fault.resource not in ("", resource):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def forbids(self, verb: str, resource: str) -> bool:
        with self.changed:
            return any(
                f.kind == "forbidden" and f.times > 0 and f.verb in ("", verb) and f.resource in ("", resource)
                for f in self._faults
            )

    def _commit(self, what: str, resource: str, item: Object) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, what, resource, copy.deepcopy(item)))
        self.changed.notify_all()

    def joined(self, connection: socket.socket) -> None:
        with self.changed:
            self._connections.add(connection)

    def left(self, connection: socket.socket) -> None:
        with self.changed:
            self._connections.discard(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what this server is for."""


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str, details: Object | None = None, wait: str = "") -> None:
        super().__init__(message)
        self.status, self.wait = status, wait
        self.body = {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "code": status,
            "reason": reason,
            "message": message,
            "details": details or {},
        }


class _Dropped(Exception):
    """No answer."""


def _handler_of(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"api": api})


class _Handler(BaseHTTPRequestHandler):
    api: FakeApi
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.api.joined(self.connection)

    def finish(self) -> None:
        self.api.left(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(int(time.time() + self.api.skew_s), usegmt=True)

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = self._request(json.loads(body) if body else None)
        self.api.requests.append(request)
        try:
            if self.api.stopped:
                raise _Dropped
            self._authenticate(request)
            fault = self.api.take_fault(request.verb, request.resource)
            if fault is not None:
                self._before(fault, request)
            self._answer(request, fault)
        except _Refused as refused:
            self._send(refused.status, refused.body, {"Retry-After": refused.wait} if refused.wait else {})
        except (_Dropped, ConnectionError, ssl.SSLError):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def _request(self, body: Object | None) -> Request:
        split = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        verb = VERBS[self.command]
        parts = split.path.strip("/").split("/")
        resource, namespace, name = parts[-1], "", ""
        if "namespaces" in parts:
            at = parts.index("namespaces")
            namespace, resource = parts[at + 1], parts[at + 2]
            name = parts[at + 3] if len(parts) > at + 3 else ""
            if len(parts) > at + 4:
                resource += f"/{parts[at + 4]}"
        if verb == "get" and namespace and not name:
            verb = "watch" if query.get("watch") else "list"
        token = self.headers.get("Authorization", "").partition(" ")[2]
        return Request(verb, resource, namespace, name, query, token, body, time.monotonic())

    def _authenticate(self, request: Request) -> None:
        if self.api.tokens and request.token not in self.api.tokens:
            raise _Refused(401, "Unauthorized", "Unauthorized")

    def _before(self, fault: Fault, request: Request) -> None:
        if fault.kind == "status":
            raise _Refused(fault.status, fault.reason, fault.message, fault.details, fault.retry_after)
        if fault.kind == "forbidden":
            group = "batch" if request.resource == "jobs" else ""
            raise _Refused(
                403,
                "Forbidden",
                f'{request.resource} is forbidden: User "system:serviceaccount:train:tester" cannot {request.verb} '
                f'resource "{request.resource}" in API group "{group}" in the namespace "{request.namespace}"',
            )
        if fault.kind == "drop":
            raise _Dropped
        if fault.kind == "slow":
            time.sleep(fault.delay_s)
        if fault.kind == "html":
            raise _Page(fault.status)

    def _answer(self, request: Request, fault: Fault | None) -> None:
        if request.resource == "version":
            self._send(200, {"gitVersion": "v1.34.4"})
        elif request.resource == "selfsubjectaccessreviews":
            self._review(request)
        elif request.resource == "pods/log":
            self._log(request)
        elif request.verb == "watch":
            self._watch(request, fault.kind if fault else "")
        else:
            done = self._do(request)
            if fault and fault.kind == "lost":
                raise _Dropped
            if fault and fault.kind == "done-but":
                raise _Refused(fault.status, fault.reason, fault.message, fault.details)
            self._send(201 if request.verb == "create" else 200, done)

    def _do(self, request: Request) -> Object:
        api, key = self.api, (request.resource, request.namespace, request.name)
        if request.verb == "list":
            return self._list(request)
        if request.verb == "create":
            return self._create(request)
        with api.changed:
            if key not in api.objects:
                details = {"name": request.name, "kind": request.resource}
                raise _Refused(404, "NotFound", f'{request.resource} "{request.name}" not found', details)
            item = copy.deepcopy(api.objects[key])
        if request.verb == "delete":
            wanted = ((request.body or {}).get("preconditions") or {}).get("uid", item["metadata"]["uid"])
            found = item["metadata"]["uid"]
            if wanted != found:
                text = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}"
                raise _Refused(409, "Conflict", text)
            api.delete(request.resource, request.name, request.namespace)
        return item

    def _create(self, request: Request) -> Object:
        if request.namespace in self.api.missing_namespaces:
            details = {"name": request.namespace, "kind": "namespaces"}
            raise _Refused(404, "NotFound", f'namespaces "{request.namespace}" not found', details)
        assert request.body is not None
        item = copy.deepcopy(request.body)
        name = item["metadata"]["name"]
        item["metadata"]["namespace"] = request.namespace
        with self.api.changed:
            if (request.resource, request.namespace, name) in self.api.objects:
                raise _Refused(409, "AlreadyExists", f'{request.resource} "{name}" already exists', {"name": name})
            return self.api.put(item)

    def _list(self, request: Request) -> Object:
        with self.api.changed:
            found = [
                copy.deepcopy(item)
                for (resource, namespace, _), item in sorted(self.api.objects.items())
                if (resource, namespace) == (request.resource, request.namespace) and _selected(item, request.query)
            ]
            version = self.api.version
        begin, size = int(request.query.get("continue", "0")), int(request.query.get("limit", "500"))
        page = found[begin : begin + size]
        for item in page:
            del item["apiVersion"], item["kind"]  # as the real one
        more = str(begin + size) if begin + size < len(found) else ""
        return {"kind": "List", "metadata": {"resourceVersion": str(version), "continue": more}, "items": page}

    def _review(self, request: Request) -> None:
        assert request.body is not None
        asked = request.body["spec"]["resourceAttributes"]
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked["subresource"] else "")
        self._send(201, {**request.body, "status": {"allowed": not self.api.forbids(asked["verb"], resource)}})

    def _log(self, request: Request) -> None:
        key = (request.name, request.query.get("container", "trainer"))
        if key not in self.api.logs:
            if ("pods", request.namespace, request.name) in self.api.objects:
                raise _Refused(400, "BadRequest", f'container "{key[1]}" is waiting to start: ContainerCreating')
            details = {"name": request.name, "kind": "pods"}
            raise _Refused(404, "NotFound", f'pods "{request.name}" not found', details)
        sent, begun = 0, False
        while True:
            with self.api.changed:
                log = self.api.logs[key]
                while not log.text[sent:] and request.query.get("follow") and not log.ended and not self.api.stopped:
                    self.api.changed.wait(1)
                piece, last = log.text[sent:], log.ended or not request.query.get("follow")
            if not begun:  # as the kubelet: no header before the first line
                self._begin()
                begun = True
            sent += len(piece)
            if piece:
                self._chunk(piece)
            if last or self.api.stopped:
                return self._end()

    def _watch(self, request: Request, fault: str) -> None:
        since = int(request.query.get("resourceVersion") or self.api.version)
        if since < self.api.oldest:
            raise _Refused(410, "Expired", f"too old resource version: {since} ({self.api.oldest})")
        self._begin()
        if fault == "close" or since < self.api.stale_below:
            return self._end()
        if fault == "freeze":
            self._freeze()
        if fault == "expired":
            gone = _Refused(410, "Expired", "too old resource version").body
            self._chunk(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return self._end()
        deadline = time.monotonic() + float(request.query.get("timeoutSeconds", "300"))
        for what, item in self._changes(request, since, deadline):
            text = json.dumps({"type": what, "object": item}).encode() + b"\n"
            if fault == "cut":
                self._chunk(text[: len(text) // 2])
                raise _Dropped
            self._chunk(text)
        self._end()

    def _changes(self, request: Request, since: int, deadline: float) -> Iterator[tuple[str, Object]]:
        while True:
            with self.api.changed:
                news = [entry for entry in self.api.history[-2000:] if entry[0] > since]
                if not news:
                    left = deadline - time.monotonic()
                    if left <= 0 or self.api.stopped:
                        bookmark = {"metadata": {"resourceVersion": str(self.api.version)}}
                        yield "BOOKMARK", bookmark
                        return
                    self.api.changed.wait(min(left, 1))
                    continue
            for version, what, resource, item in news:
                since = version
                ours = (resource, item["metadata"]["namespace"]) == (request.resource, request.namespace)
                if ours and _selected(item, request.query):
                    yield what, item

    def _freeze(self) -> None:
        while not self.api.stopped:
            time.sleep(0.05)
        raise _Dropped

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: Object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class _Page(_Refused):
    """An answer that is not the API's."""

    def __init__(self, status: int) -> None:
        super().__init__(status, "", "")
        self.body = {"page": "<html>default backend - 404</html>"}


def _resource(item: Object) -> str:
    return str(item["kind"]).lower() + "s"


def _selected(item: Object, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for clause in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = clause.partition("=")
        if labels.get(key) != value:
            return False
    for clause in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = clause.partition("=")
        found: Any = item
        for part in path.split("."):
            found = (found or {}).get(part)
        if found != value:
            return False
    return True
