"""
The request: what to run, on how many GPUs, over which pinned data. Frozen, validated when built.

A spec says nothing about *where*: the connection decides the route, so that moving a DAG from a laptop
to a cluster changes a connection and no line of the DAG.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from airflow_gpu_burst.errors import SpecError

MAX_ARGUMENT = 100_000
"""Longest argument of a command, in bytes: Linux takes 128 KiB a string."""

_MODEL_NAME = re.compile(r"(?=.{1,100}$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TablePin:
    """
    A table at one snapshot: what a retry, every rank and next year's auditor read.

    :param catalog: name of the catalog (the connection id of the lake).
    :param table: `namespace.name`.
    :param table_uuid: tells a table from another that was created later under the same name.
    :param snapshot_id: **text**: ids exceed 2^53, and JSON, XCom and browsers round numbers.
    :param ref: the tag that holds the snapshot.
    :param committed_at: when the snapshot was committed, ISO 8601 UTC.
    :param expires_at: until when the tag is meant to hold, ISO 8601 UTC; empty: no end.
    :param digest: SHA-256 over the data and delete files of the snapshot (path relative to the table's
        location, size, record count): proves "the same data" without reading it.
    """

    catalog: str
    table: str
    table_uuid: str
    snapshot_id: str
    ref: str
    schema_id: int
    committed_at: str
    expires_at: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.snapshot_id, str) or not self.snapshot_id.lstrip("-").isdigit():
            raise SpecError(f"TablePin.snapshot_id must be text of digits, not {self.snapshot_id!r}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe dict, as it travels through XCom."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Back from `to_dict`. Raises SpecError naming what is missing or unknown."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        missing = sorted(known - {"expires_at", "digest"} - set(data))
        if unknown or missing:
            raise SpecError(
                f"not a pin: missing {missing}, unknown {unknown}. "
                "Pass what PinSnapshotOperator returned: inputs={'wafers': pin_task.output}"
            )
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """
    How checkpoints are kept.

    :param keep: how many commits stay restorable; at least 2, so that a damaged newest one has a
        predecessor.
    """

    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise SpecError(f"checkpoint keep={self.keep}: keep at least 2, so that a damaged one has a predecessor")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """
    Limits in seconds; None: no limit. Separate clocks, since a queue may rightly take a day.

    :param queue_s: from submission until admitted.
    :param start_s: from admission until the trainer's first start.
    :param run_s: from the first start until the end, over all restarts.
    """

    queue_s: float | None = None
    start_s: float | None = 1800.0
    run_s: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and value <= 0:
                raise SpecError(f"timeout {f.name}={value}: must be positive seconds, or None for no limit")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """
    One GPU step.

    :param command: the trainer's argv; empty with a manifest.
    :param manifest: a Job or JobSet of one's own, instead of command and image: submitted as it is, but for its name
        and what marks it as this run's.
    :param image: container image; the local route does not use it.
    :param gpus: GPUs in all. Over one node's worth: a whole number of nodes.
    :param platform: name of a platform (see `airflow_gpu_burst.platforms`).
    :param queue: Kueue LocalQueue, or empty.
    :param priority: Kueue WorkloadPriorityClass, or empty.
    :param inputs: name → pin. The trainer finds them by these names.
    :param params: JSON-safe values for the trainer (`context().params`).
    :param env: plain environment for the trainer. Never a secret.
    :param working_dir: where the command runs; empty: the image's own, locally the run's scratch folder.
    :param checkpoint: None: the run keeps no checkpoints.
    :param publish: name of the model to publish, or empty.
    """

    command: tuple[str, ...] = ()
    manifest: Mapping[str, Any] | None = None
    image: str = ""
    gpus: int = 0
    platform: str = "local"
    queue: str = ""
    priority: str = ""
    inputs: Mapping[str, TablePin] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    checkpoint: Checkpointing | None = field(default_factory=Checkpointing)
    publish: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        _check_what(self)
        if self.gpus < 0:
            raise SpecError(f"gpus={self.gpus}: must be 0 or more")
        if self.publish and not _MODEL_NAME.fullmatch(self.publish):
            raise SpecError(
                f"publish={self.publish!r}: a model's name has letters, digits, '.', '_' and '-', at most 100, and '/' "
                "only between such parts; e.g. 'yield-rca'"
            )
        for name in self.inputs:
            if not name.isidentifier():
                raise SpecError(f"input name {name!r}: use letters, digits and underscores, e.g. 'wafers'")
        for name, value in self.env.items():
            if not isinstance(value, str):
                raise SpecError(f"env[{name!r}] is {type(value).__name__}: environment values are text")
            if name.startswith("GPU_BURST_"):
                raise SpecError(f"env[{name!r}]: names with GPU_BURST_ are the runtime's own; choose another")
        try:
            json.dumps(dict(self.params), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SpecError(f"params must be JSON-safe: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe dict of everything."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Back from `to_dict`."""
        values = dict(data)
        values["command"] = tuple(values["command"])
        values["inputs"] = {name: TablePin.from_dict(pin) for name, pin in values["inputs"].items()}
        values["checkpoint"] = Checkpointing(**values["checkpoint"]) if values["checkpoint"] else None
        values["timeouts"] = Timeouts(**values["timeouts"])
        values.setdefault("manifest", None)
        return cls(**values)

    @property
    def digest(self) -> str:
        """SHA-256 of what is computed and where; timeouts are left out, they change neither."""
        data = self.to_dict()
        del data["timeouts"]
        if data["manifest"] is None:
            del data["manifest"]  # digests of releases without manifests stay what they were
        text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Fields in which `other` (a `to_dict`) differs, as `field: theirs -> ours`, for people."""
        ours = json.loads(json.dumps(self.to_dict()))
        names = sorted((set(ours) | set(other)) - {"timeouts"})
        return [f"{n}: {other.get(n)!r} -> {ours.get(n)!r}" for n in names if ours.get(n) != other.get(n)]


def _check_what(spec: RunSpec) -> None:
    if spec.manifest is None:
        _check_command(spec.command)
    elif spec.command or spec.image:
        raise SpecError("a manifest has its own command and image; give either manifest, or command and image")


def _check_command(command: Any) -> None:
    if isinstance(command, str) or not command:
        raise SpecError(f"command={command!r}: give a list of arguments, e.g. ['python', 'train.py', '--depth', '6']")
    if not all(isinstance(part, str) for part in command):
        raise SpecError(f"command={command!r}: every argument must be text")
    for part in command:
        if "\0" in part or len(part.encode(errors="replace")) > MAX_ARGUMENT:
            raise SpecError(
                f"an argument of the command has a NUL or {len(part)} characters, and the kernel takes {MAX_ARGUMENT} "
                "bytes; hand long values over as trainer_params"
            )
