"""The six records of a run log, as frozen values and as canonical JSON. No I/O."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

from airflow_gpu_burst.errors import RunLogError

VERSION = 1
"""Of the form of a record. Raised by hand when a field changes its meaning; others are refused."""

Seat: TypeAlias = tuple[str, str]
"""(pod UID, boot nonce): a restarted container keeps its pod's UID, never its nonce."""

VERDICTS = ("succeeded", "failed", "cancelled", "lost")


@dataclass(frozen=True, kw_only=True)
class _Record:
    """
    :param seq: the place in the log; 0 until it is written.
    :param id: random: by it a writer whose answer was lost knows its own record again.
    :param owner: who wrote: the object's UID as its pods see it, or `airflow`.
    :param at: when, ISO 8601 UTC. For people; nothing is decided by it.
    """

    kind: ClassVar[str]

    seq: int = 0
    id: str
    generation: int
    owner: str
    at: str


@dataclass(frozen=True, kw_only=True)
class Open(_Record):
    """
    A generation begins; written by the Airflow side before it creates the object.

    :param max_tries: Airflow's, at this time: a clear raises it, a retry does not.
    :param restore_since: the lowest generation whose commits may be restored; itself: none.
    """

    kind = "open"

    spec_digest: str
    max_tries: int
    try_number: int
    restore_since: int


@dataclass(frozen=True, kw_only=True)
class Start(_Record):
    """
    An epoch begins; its number is this record's `seq`.

    :param members: the seat of each rank, in the order of ranks.
    :param restore_from: `seq` of the commit that all ranks restore, or None.
    :param damaged: commits that were found damaged: not restored by this epoch or any later one.
    """

    kind = "start"

    members: tuple[Seat, ...]
    world_size: int
    restore_from: int | None
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Commit(_Record):
    """
    The checkpoint of `step` exists.

    :param manifests: key → SHA-256 of what lists the checkpoint's files.
    :param metrics: JSON-safe, for people and for choosing a best one.
    """

    kind = "commit"

    epoch: int
    step: int
    manifests: Mapping[str, str]
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Retire(_Record):
    """These commits are no longer restorable; their data may be deleted from now on."""

    kind = "retire"

    epoch: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Finish(_Record):
    """
    The generation's one result.

    :param model: (key, SHA-256) of the manifest of the model to publish, or None.
    """

    kind = "finish"

    epoch: int
    result: Mapping[str, Any]
    model: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Close(_Record):
    """The generation is over: nothing of it may append again."""

    kind = "close"

    verdict: str
    reason: str


Record: TypeAlias = Open | Start | Commit | Retire | Finish | Close

_KINDS: dict[str, type[Record]] = {c.kind: c for c in (Open, Start, Commit, Retire, Finish, Close)}


def encode(record: Record) -> bytes:
    """Canonical JSON: equal records are equal bytes, so that a repeated write repeats them exactly."""
    return dumps({"version": VERSION, "kind": record.kind, **asdict(record)})


def dumps(data: Mapping[str, Any]) -> bytes:
    """
    Canonical JSON. Floats that JSON has no word for become text ("nan", "inf").

    Raises RunLogError for values that are not JSON at all.
    """
    try:
        text = json.dumps(_finite(data), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError) as error:
        raise RunLogError(f"not JSON-safe: {error}. Pass plain numbers, text, lists and dicts") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def decode(data: bytes, seq: int) -> Record:
    """Back from `encode`. Raises RunLogError for another version, an unknown kind, or another place."""
    try:
        raw = json.loads(data)
        version, kind = raw.pop("version"), raw.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunLogError(f"record {seq} of the run log is no record: {data[:80]!r}") from error
    if version != VERSION or kind not in _KINDS:
        raise RunLogError(
            f"record {seq} of the run log is a {kind!r} of version {version!r}; this release reads version "
            f"{VERSION}. Use the release that wrote it, on the Airflow side and in the image"
        )
    known = {f.name for f in fields(_KINDS[kind])}
    if set(raw) != known or raw["seq"] != seq:
        raise _malformed(seq, data)
    try:
        record = _KINDS[kind](**_typed(raw))
    except (TypeError, IndexError, KeyError, ValueError) as error:
        raise _malformed(seq, data) from error
    if isinstance(record, Commit) and not _is_sound(record):
        raise _malformed(seq, data)
    return record


def _malformed(seq: int, data: bytes) -> RunLogError:
    return RunLogError(
        f"record {seq} of the run log is malformed: {data[:200]!r}. Nothing of this package writes such; find out what "
        "else writes to the store, then delete the whole log of this run"
    )


def _is_sound(commit: Commit) -> bool:
    """What a restore relies on: without it there would be a checkpoint of nothing."""
    return isinstance(commit.step, int) and isinstance(commit.manifests, Mapping)


def _typed(raw: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""
    if "members" in raw:
        raw["members"] = tuple((seat[0], seat[1]) for seat in raw["members"])
    for name in ("seqs", "damaged"):
        if name in raw:
            raw[name] = tuple(raw[name])
    if raw.get("model"):
        raw["model"] = (raw["model"][0], raw["model"][1])
    return raw
