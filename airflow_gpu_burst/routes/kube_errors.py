"""What an answer of the Kubernetes API means, in the errors of this package. Pure: status and body in, error out."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from airflow_gpu_burst.errors import (
    ClusterForbidden,
    ClusterUnauthorized,
    ClusterUnreachable,
    GpuBurstError,
    NotAdmitted,
    RouteError,
    SpecError,
)
from airflow_gpu_burst.workloads.kinds import Kind

_ACCOUNT = re.compile(r'User "([^"]+)" cannot ')
_SHOWN = 600
"""Characters of an answer that is not the API's own (an ingress's page) that a message shows."""


class Exists(RouteError):
    """A create found the name taken."""


class Expired(RouteError):
    """The resource version is too old to go on from (410): list again."""


class NotServed(ClusterUnreachable):
    """A 404 for a whole kind: it is not installed, or this is not the API's answer."""


class Conflict(ClusterUnreachable):
    """A 409 of two writers, or of a precondition that does not hold (its message says so)."""


class NotThere(RouteError):
    """The API's own 404 for one object."""


class NoLog(RouteError):
    """There is no log to read: the pod is gone (a 404), or the container has not started (a 400)."""


class Throttled(ClusterUnreachable):
    """
    The server asked for patience (429, or 503 with Retry-After).

    :param retry_after: seconds; 1 if it named none.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, in the words of RBAC."""

    verb: str
    kind: Kind
    namespace: str
    name: str = ""
    subresource: str = ""

    @property
    def resource(self) -> str:
        """As a Role writes it: `pods/log`."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural

    @property
    def rule(self) -> str:
        """The line that a Role lacks when this is forbidden."""
        return f'- {{apiGroups: ["{self.kind.group}"], resources: [{self.resource}], verbs: [{self.verb}]}}'

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"{self.verb} {self.resource}{name} in namespace {self.namespace}"


def error_of(status: int, body: bytes, asked: Asked, where: str, retry_after: str = "") -> GpuBurstError:
    """
    The error that an answer stands for. A lost or unclear answer is always `ClusterUnreachable`: nothing is known.

    :param status: of HTTP, or the `code` of a Status in a watch; anything but 2xx.
    :param where: the cluster and how it was reached, for people.
    :param retry_after: that header, in seconds.
    """
    said = _status(body)
    message = str(said.get("message") or "") or _shown(body)
    if status == 429 or (status == 503 and retry_after):
        return Throttled(f"{where} asks to wait (HTTP {status}): {message}", retry_after=_seconds(retry_after))
    if status == 401:
        return ClusterUnauthorized(
            f"{where} does not accept the credentials (401), new ones were looked for: the token or certificate has "
            "expired or was revoked. Put a fresh one into the connection "
            "(kubectl create token airflow-gpu-burst --namespace ... --duration 720h), or check its exec plugin"
        )
    if status == 403:
        return _forbidden(said, message, asked, where)
    if status == 404:
        return _missing(said, message, asked, where)
    if status == 409:
        return _conflict(said, message, asked, where)
    if status == 410:
        return Expired(f"{where}: {asked}: {message}. List again")
    if status in (400, 413, 422):
        return _invalid(said, message, asked, where)
    return ClusterUnreachable(
        f"{where} answered HTTP {status} to {asked}: {message}. Look at the cluster if it goes on"
    )


def _forbidden(said: dict[str, Any], message: str, asked: Asked, where: str) -> GpuBurstError:
    """RBAC, a quota, a namespace on its way out, or a policy: each needs something else."""
    if "exceeded quota" in message:
        return NotAdmitted(f"{where}: {message}. Ask for less, or have the quota of {asked.namespace} raised")
    if "because it is being terminated" in message:
        return RouteError(f"{where}: namespace {asked.namespace} is being deleted. {_other_namespace(asked)}")
    if said and "cannot " not in message:
        return ClusterForbidden(
            f"{where}: a policy of the cluster refuses to {asked}: {message}. "
            "Change the request, or ask the cluster's administrators"
        )
    found = _ACCOUNT.search(message)
    account = f"account {found[1]}" if found else "the connection's account"
    return ClusterForbidden(
        f"{where}: {account} may not {asked}. Add to its Role in namespace {asked.namespace}: {asked.rule}"
    )


def _missing(said: dict[str, Any], message: str, asked: Asked, where: str) -> GpuBurstError:
    """Only the API's own words mean "not there": an ingress without backends answers 404 as well."""
    details = said.get("details") or {}
    if details.get("kind") == "namespaces":
        return RouteError(f"{where}: namespace {asked.namespace} does not exist. {_other_namespace(asked)}")
    if asked.subresource == "log" and said:
        return NoLog(f"{where}: no log of pod {asked.name}: {message}. The pod is gone; look in the store's spool")
    if said.get("reason") == "NotFound" and details.get("name"):
        return NotThere(f"{where}: {asked.kind.name} {asked.name} does not exist: {message}")
    unclear = (
        f"{where} does not serve {asked.kind.plural} of {asked.kind.api_version}: {message or '404'}. "
        f"Install {asked.kind.name} there, or check the connection's address"
    )
    if asked.verb == "create" and "." in asked.kind.group:
        return RouteError(unclear)
    return NotServed(unclear)


def _conflict(said: dict[str, Any], message: str, asked: Asked, where: str) -> GpuBurstError:
    """Taken, or two writers at once (a quota's bookkeeping does that to creates): the latter passes."""
    if said.get("reason") == "AlreadyExists":
        return Exists(f"{where}: {asked.kind.name} {asked.name} exists already. Adopt it, or use another name")
    return Conflict(f"{where}: {asked} met another change: {message}. Try again")


def _invalid(said: dict[str, Any], message: str, asked: Asked, where: str) -> GpuBurstError:
    """The request is wrong, field by field; a log that cannot be read yet is no one's mistake."""
    if asked.subresource == "log":
        return NoLog(f"{where}: no log of pod {asked.name} yet: {message}. Try again when its container has started")
    causes = (said.get("details") or {}).get("causes") or []
    fields = "; ".join(f"{c.get('field') or '?'}: {c.get('message', '')}" for c in causes)
    return SpecError(f"{where} refuses to {asked}: {fields or message}. Correct the request")


def _other_namespace(asked: Asked) -> str:
    return f"kubectl create namespace {asked.namespace}, or set another namespace in the connection"


def _status(body: bytes) -> dict[str, Any]:
    """The API's Status object; empty if the body is something else."""
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and said.get("kind") == "Status" else {}


def _shown(body: bytes) -> str:
    return " ".join(body[:_SHOWN].decode("utf-8", "replace").split())


def _seconds(retry_after: str) -> float:
    try:
        return max(0.0, float(retry_after))
    except ValueError:  # an HTTP date, which the Kubernetes API never sends
        return 1.0
