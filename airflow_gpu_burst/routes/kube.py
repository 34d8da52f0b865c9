"""
A thin client of one cluster's API: plain JSON in and out, one per connection and process, usable from many threads.

The only module that imports the `kubernetes` package. Of it are used the loading of kubeconfigs (tokens, exec plugins,
certificates, proxies) and its HTTP client, never its process-wide configuration and none of its models. The import
takes 0.3 s and 57 MB whatever is used of it (`kubernetes/__init__` imports all of its models), hence inside functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import urllib3

from airflow_gpu_burst.errors import ClusterUnauthorized, ClusterUnreachable, NotInstalledError, SpecError
from airflow_gpu_burst.routes import KubeConfig
from airflow_gpu_burst.routes.kube_answers import POOLS, Listing, Stream, lines
from airflow_gpu_burst.routes.kube_errors import Asked, Conflict, Exists, Expired, NoLog, NotThere, Throttled, error_of
from airflow_gpu_burst.routes.kube_login import Login
from airflow_gpu_burst.routes.kube_requests import READ_S, Requests
from airflow_gpu_burst.workloads.kinds import POD, Kind
from airflow_gpu_burst.workloads.snapshot import Object

__all__ = ["Exists", "Expired", "Kube", "Listing", "NoLog", "Stream", "Throttled", "kube_of"]

SILENT_LOG_S = 600.0
"""A followed log that says nothing for so long is asked for again: something between may have dropped it."""
WATCH_SILENCE_S = 15.0
"""A watch from which nothing came so long after the time at which the server should have ended it is dead."""
LIST_TRIES = 3

_REVIEW = Kind(api_version="authorization.k8s.io/v1", plural="selfsubjectaccessreviews", name="SelfSubjectAccessReview")
_VERSION = Kind(api_version="v1", plural="version", name="Version")


def _same(item: Object) -> Object | None:
    return item


class Kube:
    """
    See the module. Every method may raise, beside what it names:

    :raises ClusterUnreachable: no answer, or none that can be understood; nothing is known about what was asked.
    :raises ClusterUnauthorized: 401, also with credentials that were read again.
    :raises ClusterForbidden: names verb, resource, account and the line that the Role lacks.
    :raises RouteError: the namespace does not exist or is being deleted.
    """

    def __init__(
        self,
        config: KubeConfig,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._requests = Requests(config, _client, clock=clock, monotonic=monotonic, sleep=sleep)

    @property
    def namespace(self) -> str:
        """The connection's, else the context's (in a pod: the account's), else `default`."""
        return self._requests.login.namespace

    @property
    def where(self) -> str:
        """The cluster and how it is reached, for messages; no secret."""
        return self._requests.login.where

    @property
    def clock_offset(self) -> float:
        """The server's wall clock minus this machine's, in seconds; 0.0 before the first answer."""
        return self._requests.clock.offset

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None if the API itself says that there is none."""
        asked = Asked(verb="get", kind=kind, namespace=namespace, name=name)
        try:
            return self._requests.json(asked, "GET", kind.path(namespace, name))
        except NotThere:
            return None

    def list(
        self,
        kind: Kind,
        namespace: str,
        *,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        keep: Callable[[Object], Object | None] = _same,
    ) -> Listing:
        """
        All objects, page by page; begun anew when the list expires in the middle.

        :param limit: objects per page.
        :param keep: makes of each object what is kept of it (None: nothing), before the next page is asked for.
        """
        asked = Asked(verb="list", kind=kind, namespace=namespace)
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(limit)}
        for _ in range(LIST_TRIES):
            with contextlib.suppress(Expired):
                return self._pages(asked, kind, query, keep)
        raise ClusterUnreachable(f"{self.where}: {asked} expired {LIST_TRIES} times in the middle. Try again")

    def _pages(
        self, asked: Asked, kind: Kind, query: dict[str, str], keep: Callable[[Object], Object | None]
    ) -> Listing:
        items: list[Object] = []
        more = ""
        while True:
            page = self._requests.json(asked, "GET", kind.path(asked.namespace), query={**query, "continue": more})
            for item in page.get("items") or []:
                kept = keep({"apiVersion": kind.api_version, "kind": kind.name, **item})  # lists leave these out
                if kept is not None:
                    items.append(kept)
            about = page.get("metadata") or {}
            more = str(about.get("continue") or "")
            if not more:
                return Listing(items=items, resource_version=str(about.get("resourceVersion") or ""))

    def create(self, kind: Kind, namespace: str, manifest: Object) -> Object:
        """
        Create, in one attempt: after a lost answer only the caller knows how to look.

        :raises Exists: the name is taken.
        :raises SpecError: the API refuses the manifest; says which field.
        :raises NotAdmitted: a quota is exceeded.
        """
        name = str((manifest.get("metadata") or {}).get("name") or "")
        asked = Asked(verb="create", kind=kind, namespace=namespace, name=name)
        return self._requests.json(asked, "POST", kind.path(namespace), body=manifest)

    def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, propagation: str = "Background") -> bool:
        """Delete the object if it is that very one; False when it is gone, or another one has its name."""
        asked = Asked(verb="delete", kind=kind, namespace=namespace, name=name)
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": propagation,  # batch/v1 would leave the pods behind by default
        }
        try:
            self._requests.json(asked, "DELETE", kind.path(namespace, name), body=options)
        except NotThere:
            return False
        except Conflict as conflict:
            if "precondition" not in str(conflict).lower():
                raise
            return False
        return True

    def watch(
        self,
        kind: Kind,
        namespace: str,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout_s: float = 240,
    ) -> Stream[tuple[str, Object]]:
        """
        Changes after that version: (ADDED | MODIFIED | DELETED | BOOKMARK, object), until the server's time is over.

        :param timeout_s: after which the server ends it; a connection that is silent for 15 s longer is dead.
        :raises Expired: in `open` or while iterating: list again.
        :raises Throttled: the server asks to wait.
        """
        asked = Asked(verb="watch", kind=kind, namespace=namespace)
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, int(timeout_s))),
            "labelSelector": labels,
            "fieldSelector": fields,
        }

        def decode(pieces: Iterator[bytes]) -> Iterator[tuple[str, Object]]:
            for line in lines(pieces):
                yield self._change(asked, line)

        return self._stream(asked, kind.path(namespace), query, timeout_s + WATCH_SILENCE_S, decode)

    def log(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        timestamps: bool = True,
        since_time: str = "",
        previous: bool = False,
        tail_lines: int | None = None,
        limit_bytes: int | None = None,
    ) -> Stream[bytes]:
        """
        A container's log, in pieces as they arrive; lines may be cut anywhere.

        :param since_time: RFC 3339; the server honours whole seconds.
        :param previous: the log of the container before its last restart.
        :raises NoLog: in `open` or while iterating: the pod is gone, or its container has not started.
        """
        asked = Asked(verb="get", kind=POD, namespace=namespace, name=pod, subresource="log")
        query = {
            "container": container,
            "follow": "true" if follow else "",
            "timestamps": "true" if timestamps else "",
            "sinceTime": since_time,
            "previous": "true" if previous else "",
            "tailLines": "" if tail_lines is None else str(tail_lines),
            "limitBytes": "" if limit_bytes is None else str(limit_bytes),
        }
        read_s = SILENT_LOG_S if follow else READ_S
        return self._stream(asked, POD.path(namespace, pod) + "/log", query, read_s, lambda pieces: pieces)

    def allowed(self, verb: str, kind: Kind, namespace: str, subresource: str = "") -> bool:
        """Whether the connection's account may do that, by a SelfSubjectAccessReview."""
        asked = Asked(verb="create", kind=_REVIEW, namespace=namespace)
        attributes = {
            "namespace": namespace,
            "verb": verb,
            "group": kind.group,
            "resource": kind.plural,
            "subresource": subresource,
        }
        review = {
            "apiVersion": _REVIEW.api_version,
            "kind": _REVIEW.name,
            "spec": {"resourceAttributes": attributes},
        }
        answer = self._requests.json(asked, "POST", f"/apis/{_REVIEW.api_version}/{_REVIEW.plural}", body=review)
        return bool((answer.get("status") or {}).get("allowed"))

    def version(self) -> str:
        """The server's version, as `v1.34.4`."""
        asked = Asked(verb="get", kind=_VERSION, namespace="")
        return str(self._requests.json(asked, "GET", "/version").get("gitVersion") or "")

    def _stream(
        self,
        asked: Asked,
        path: str,
        query: dict[str, str],
        read_s: float,
        decode: Callable[[Iterator[bytes]], Iterator[Any]],
    ) -> Stream[Any]:
        def ask() -> urllib3.BaseHTTPResponse:
            return self._requests.send(asked, "GET", path, query=query, read_s=read_s, patient=False)

        return Stream(ask, decode, self.where)

    def _change(self, asked: Asked, line: bytes) -> tuple[str, Object]:
        try:
            change = json.loads(line)
            what, item = str(change["type"]), change["object"]
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterUnreachable(
                f"{self.where} sent what is no watch event: {line[:200]!r}. Watch again"
            ) from error
        if what == "ERROR":
            raise error_of(int(item.get("code") or 500), json.dumps(item).encode(), asked, self.where)
        return what, item


def _client(login: Login) -> Any:
    """
    An ApiClient of its own configuration.

    :raises SpecError: the kubeconfig cannot be used.
    :raises ClusterUnauthorized: its exec plugin fails.
    """
    try:
        from kubernetes import client
        from kubernetes.config.kube_config import KubeConfigLoader
    except ImportError as error:
        raise NotInstalledError("the Kubernetes client is missing: pip install 'airflow-gpu-burst[airflow]'") from error

    settings = client.Configuration()
    settings.retries = False  # retries are decided here: urllib3's would repeat what must not be
    settings.connection_pool_maxsize = 64  # idle ones that are kept: the followed logs of many runs end at once
    settings.socket_options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # a host that went away is noticed within a minute
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ]
    try:
        KubeConfigLoader(
            config_dict=login.document, active_context=login.context, config_base_path=login.folder
        ).load_and_set(settings)
        if login.command and not settings.api_key and not settings.cert_file:
            raise ClusterUnauthorized(_plugin_failure(login))
        api = client.ApiClient(settings)
        _own_tls(api.rest_client.pool_manager, settings)
    except (client.ApiException, ssl.SSLError, ValueError, KeyError, TypeError, OSError, _config_error()) as error:
        raise SpecError(
            f"{login.where}: the kubeconfig cannot be used: {error}. Correct it in the connection"
        ) from error
    return api


def _own_tls(pools: Any, settings: Any) -> None:
    """
    One TLS context, made now. The client writes certificates into temporary files and would read them again for each
    connection; any process forked from this one removes those files when it ends.
    """
    pools.pool_classes_by_scheme = POOLS
    kept = pools.connection_pool_kw
    ca, cert, key = (kept.pop(name, None) for name in ("ca_certs", "cert_file", "key_file"))
    if not settings.host.startswith("https"):
        return
    context = urllib3.util.ssl_.create_urllib3_context()
    # Python 3.13 insists on extensions that the CA of many a cluster lacks; Go, and so kubectl, does not
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca:
        context.load_verify_locations(ca)
    else:
        context.load_default_certs()
    if cert:
        context.load_cert_chain(cert, key)
    kept["ssl_context"] = context


def _config_error() -> type[Exception]:
    from kubernetes.config import ConfigException

    return ConfigException  # type: ignore[no-any-return]


def _plugin_failure(login: Login) -> str:
    """Why the exec plugin gave nothing: the client logs that and goes on as nobody, so it is run once more."""
    from kubernetes.config.exec_provider import ExecProvider
    from kubernetes.config.kube_config import KubeConfigLoader

    loader = KubeConfigLoader(config_dict=login.document, active_context=login.context, config_base_path=login.folder)
    try:
        ExecProvider(loader._user["exec"], login.folder, loader._cluster).run()
        why = "it printed neither a token nor a certificate"
    except Exception as error:
        why = str(error)
    return (
        f"{login.where}: no credentials from the exec plugin {login.command!r}: {why}. Run it by hand on this machine"
    )


class _Slot:
    """A lock for each connection: one whose exec plugin is slow keeps nobody else waiting."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kube: Kube | None = None


_slots: dict[KubeConfig, _Slot] = {}
_slots_lock = threading.Lock()


def kube_of(config: KubeConfig) -> Kube:
    """
    The client of that connection in this process: made on first use, shared afterwards.

    :raises SpecError: the connection cannot be used; says what to change.
    :raises ClusterUnauthorized: its exec plugin gives no credentials.
    """
    with _slots_lock:
        slot = _slots.setdefault(config, _Slot())
    with slot.lock:
        if slot.kube is None:
            slot.kube = Kube(config)
        return slot.kube


def _forget() -> None:
    """A forked child starts anew: its parent's sockets are not its own, and its locks may be held by nobody."""
    global _slots_lock
    _slots_lock = threading.Lock()
    _slots.clear()


os.register_at_fork(after_in_child=_forget)
