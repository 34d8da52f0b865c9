"""
The words for where a run is: run key, handle, phase, observation. Plain data, no I/O.

A *run key* is stable over retries and names checkpoints, pins and results. A *generation* rises only
after a terminal verdict or a clear; run key and generation name the submitted object, so that a retried
or a zombie try finds the same one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

_UNSAFE = re.compile(r"[^a-z0-9]+")


def _slug(text: str, limit: int) -> str:
    """Lower-case ASCII letters, digits and single dashes; for people, never for identity."""
    return _UNSAFE.sub("-", text.lower()).strip("-")[:limit].strip("-")


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """
    What a GPU step is, over all its tries: dag_id, task_id, run_id, map_index (-1 if not mapped).

    Any text is allowed, Unicode and spaces included; identity is a hash over the four parts joined by
    NUL, since every printable separator occurs in real run ids.
    """

    dag_id: str
    task_id: str
    run_id: str
    map_index: int = -1

    @property
    def digest(self) -> str:
        """64 hex digits that are different for different run keys."""
        joined = "\0".join((self.dag_id, self.task_id, self.run_id, str(self.map_index)))
        return hashlib.sha256(joined.encode()).hexdigest()

    @property
    def prefix(self) -> str:
        """Where everything of this run key lies in the store; readable, unique by its last 16 digits."""
        run = _slug(self.run_id, 48) or "run"
        return f"runs/{_slug(self.dag_id, 64) or 'dag'}/{_slug(self.task_id, 64) or 'task'}/{run}-{self.digest[:16]}"

    def object_name(self, generation: int, limit: int = 46, salt: str = "") -> str:
        """
        Name of the submitted object: a DNS-1123 label of at most `limit` characters that begins with a letter.

        12 hex digits of a digest keep names apart, also across worker clusters; the rest is for people.

        :param limit: 46 leaves a JobSet's pods room within 63: NAME-node-0-INDEX-xxxxx for up to 1,000 nodes. It is
            also within what KubeRay (47) and Kueue (a label of workload kind, name and 5 digits) take.
        :param salt: what tells two Airflow deployments with equal ids apart: the store's URI.
        """
        digest = hashlib.sha256(f"{salt}\0{self.digest}".encode()).hexdigest() if salt else self.digest
        tail = f"-{digest[:12]}-g{generation}"
        head = _slug(f"{self.dag_id}-{self.task_id}", limit - len(tail) - 4)
        return f"gpu-{head}{tail}" if head else f"gpu{tail}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Back from `to_dict`."""
        return cls(**{name: data[name] for name in ("dag_id", "task_id", "run_id", "map_index")})

    def __str__(self) -> str:
        mapped = f" [{self.map_index}]" if self.map_index >= 0 else ""
        return f"{self.dag_id} / {self.task_id}{mapped} / {self.run_id}"


class Phase(StrEnum):
    """Where a run is. Few on purpose: a queue's own words are the observation's `reason`."""

    SUBMITTED = "SUBMITTED"
    QUEUED = "QUEUED"
    ADMITTED = "ADMITTED"
    DISPATCHED = "DISPATCHED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    RESTARTING = "RESTARTING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    LOST = "LOST"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True when the run will not change any more."""
        return self in _TERMINAL


_TERMINAL = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.LOST, Phase.CANCELLED})


@dataclass(frozen=True, kw_only=True)
class Observation:
    """
    One look at a run.

    :param reason: one word for programs, the cluster's own where it has one.
    :param message: a sentence for people.
    :param since: seconds since the epoch (wall clock of this machine) at which the phase began, if known.
    :param code: exit code of the runtime, once it has ended by itself.
    :param submitted: seconds since the epoch (wall clock of this machine) at which the object was created, if known.
    """

    phase: Phase
    reason: str = ""
    message: str = ""
    cluster: str = ""
    since: float | None = None
    code: int | None = None
    submitted: float | None = None

    @property
    def terminal(self) -> bool:
        """True when the run will not change any more."""
        return self.phase.terminal

    @property
    def success(self) -> bool:
        """True when it ended well."""
        return self.phase is Phase.SUCCEEDED


@dataclass(frozen=True, kw_only=True)
class Handle:
    """
    Enough to find a submitted object again, from any worker or triggerer. JSON, no secret.

    :param connection: Airflow connection id of the cluster.
    :param route: `local`, `direct` or `multikueue`.
    :param uid: the object's UID: the owner that the run log knows.
    :param store_connection: Airflow connection id of the object store that holds the run log.
    """

    connection: str
    route: str
    kind: str
    namespace: str
    name: str
    uid: str
    run_key: RunKey
    generation: int
    store_connection: str

    def to_json(self) -> str:
        """Canonical JSON text."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Back from `to_json`."""
        data = json.loads(text)
        data["run_key"] = RunKey.from_dict(data["run_key"])
        return cls(**data)
