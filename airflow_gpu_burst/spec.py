"""
The request: what to run, on how many GPUs, over which pinned data. Frozen, validated when built.

A spec says nothing about *where*: the connection decides the route, so that moving a DAG from a laptop
to a cluster changes a connection and no line of the DAG.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from airflow_gpu_burst.errors import SpecError

MAX_ARGUMENT = 100_000
"""Longest argument of a command, in bytes: Linux takes 128 KiB a string."""

_LEAST_RATE = 100_000.0  # bytes per second: below, a checkpoint of 1 GB takes three hours, and it was a slip
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G|T)?(i)?(B|bit)/s", re.ASCII)
_PREFIXES = {None: 0, "k": 1, "M": 2, "G": 3, "T": 4}
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
    How checkpoints are saved and which of them stay restorable. What one rule keeps, no other takes away; what is
    `pinned` (`ready(step, pin=True)`) stays in any case.

    :param keep: the last so many commits; at least 2, so that a damaged newest one has a predecessor.
    :param keep_every: also those of every step that is a multiple of this; None: none.
    :param best: also the best by this metric, as given to `ready(step, loss=...)`; empty: none. A checkpoint without
        the metric, or whose value is not finite, is never the best.
    :param best_mode: whether a small or a large value is good.
    :param keep_best: so many of the best.
    :param bandwidth: bytes per second for the uploads of one node, as a number or as text with a unit (`"2GB/s"`,
        `"500MiB/s"`, `"10Gbit/s"`); None: no limit. Kept as a number.
    :param rdma: whether the store's RDMA path is used: `off`, `prefer` (TCP where it is declined) or `require`.
    """

    keep: int = 2
    keep_every: int | None = None
    best: str = ""
    best_mode: Literal["min", "max"] = "min"
    keep_best: int = 1
    bandwidth: float | str | None = None
    rdma: Literal["off", "prefer", "require"] = "off"

    def __post_init__(self) -> None:
        _check_count("keep", self.keep, 2, "keep at least 2, so that a damaged one has a predecessor")
        if self.keep_every is not None:
            _check_count("keep_every", self.keep_every, 1, "every so many steps, or None")
        _check_count("keep_best", self.keep_best, 1, "so many of the best; without best=... none is kept for that")
        if not isinstance(self.best, str):
            raise SpecError(f"checkpoint best={self.best!r}: name a metric, e.g. 'loss', or give ''")
        _check_choice("best_mode", self.best_mode, ("min", "max"))
        _check_choice("rdma", self.rdma, ("off", "prefer", "require"))
        object.__setattr__(self, "bandwidth", _bytes_per_second(self.bandwidth))

    @classmethod
    def of(cls, given: int | Mapping[str, Any] | Self) -> Self | None:
        """
        What a DAG says: how many to keep (0: no checkpoints at all), the fields as a dict, or one of these.

        :raises SpecError: none of them.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            known = [field.name for field in fields(cls)]
            if unknown := sorted(set(given) - set(known)):
                raise SpecError(f"checkpoints has {', '.join(map(repr, unknown))}: use {', '.join(known)}")
            return cls(**given)
        if isinstance(given, int) and not isinstance(given, bool):
            return cls(keep=given) if given else None
        raise SpecError(f"checkpoints={given!r}: give a number to keep, 0 for none, or a dict such as {{'keep': 2}}")


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
        """
        SHA-256 of what is computed and where; what changes neither is left out: timeouts, and of checkpoints how fast
        they are saved and which further ones are kept.
        """
        data = self.to_dict()
        del data["timeouts"]
        if data["checkpoint"]:
            data["checkpoint"] = {"keep": data["checkpoint"]["keep"]}
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


def _check_count(name: str, value: Any, least: int, advice: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"checkpoint {name}={value!r}: {advice}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(f"checkpoint {name}={value!r}: use one of {', '.join(choices)}")


def _bytes_per_second(given: Any) -> float | None:
    """A rate as a number: units of 1000, with an `i` of 1024; bits count as eighths of bytes."""
    if given is None:
        return None
    rate = math.nan
    if isinstance(given, str) and (found := _RATE.fullmatch(given.strip())):
        number, prefix, binary, unit = found.groups()
        rate = float(number) * (1024 if binary else 1000) ** _PREFIXES[prefix] / (8 if unit == "bit" else 1)
    elif isinstance(given, int | float) and not isinstance(given, bool):
        rate = float(given)
    if not (math.isfinite(rate) and rate >= _LEAST_RATE):
        raise SpecError(
            f"checkpoint bandwidth={given!r}: give bytes per second, or text such as '2GB/s' or '10Gbit/s', "
            f"at least {_LEAST_RATE / 1e6:g} MB/s, or None for no limit"
        )
    return rate
