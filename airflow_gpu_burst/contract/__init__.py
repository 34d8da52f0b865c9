"""
The border between worker and pod: versioned JSON, kept in the store.

The pod's environment carries only where the context lies and its SHA-256, the store and who the pod is;
a context can be long, and an environment string may not (128 KiB), nor may a Kubernetes object (1.5 MiB).
`pod_context.schema.json` and `pod_result.schema.json` beside this file are the published form. A pod that
meets a version that it does not know refuses: guessing at the border costs GPU hours.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from airflow_gpu_burst.errors import ContractError
from airflow_gpu_burst.spec import Checkpointing, RunSpec, TablePin
from airflow_gpu_burst.state import RunKey

CONTRACT_VERSION = 1
"""Version of the border, not of the package. Changes when either side would misread the other."""

ENV_CONTEXT = "GPU_BURST_CONTEXT"
"""Key of the context in the store."""
ENV_CONTEXT_SHA256 = "GPU_BURST_CONTEXT_SHA256"
ENV_OWNER = "GPU_BURST_OWNER"
"""UID of the submitted object, as the pods see it."""
ENV_POD_UID = "GPU_BURST_POD_UID"
ENV_RANK = "GPU_BURST_RANK"
ENV_SCRATCH = "GPU_BURST_SCRATCH"
"""Folder for inputs, checkpoints and the model while the run lasts: node-local NVMe where there is one."""
ENV_TERMINATION_FILE = "GPU_BURST_TERMINATION_FILE"
"""Where the runtime leaves its last word (JSON: code, reason, message)."""
ENV_CATALOG_SECRETS = "GPU_BURST_CATALOG_SECRETS"
"""JSON, catalog → property → secret. From a Secret in a cluster; never in the context."""
ENV_GRACE = "GPU_BURST_GRACE_S"
"""Seconds between SIGTERM and SIGKILL for the trainer. The last checkpoints may take as long again, so a pod needs
twice this, and some seconds, between its own SIGTERM and SIGKILL."""
ENV_SITE = "GPU_BURST_SITE"
"""Set by the launcher of a runtime that an init container brought: the folder of its packages."""

PINNED = "pinned"
"""Among a checkpoint's metrics, true: it is kept for ever. No metric may have this name."""

_HEADER = re.compile(rb"gpu-burst: output ([0-9A-Za-z-]{1,64}) rank (0|[1-9]\d{0,5}) of ([1-9]\d{0,5})\r?\n?")


def header(stream: str, rank: int, world_size: int) -> bytes:
    """
    The first line of a stream of the spool, and of the container's log; from here on both are the same bytes.

    Whoever reads the live log learns from it which stream this is, and where its byte 0 is. A trainer can print such
    a line too: only the first one of a container's log counts.

    :param stream: the stream's name, the last segment of its key prefix.
    :raises ContractError: no name, or no rank, that `parse_header` would give back.
    """
    line = f"gpu-burst: output {stream} rank {rank} of {world_size}\n".encode(errors="replace")
    if parse_header(line) != (stream, rank, world_size):
        raise ContractError(
            f"stream {stream!r}, rank {rank} of {world_size}: use 1 to 64 letters, digits and '-', and ranks from 0"
        )
    return line


def parse_header(line: bytes) -> tuple[str, int, int] | None:
    """Stream, rank and world size back from a `header`, with or without its newline; None for any other line."""
    found = _HEADER.fullmatch(line)
    if found is None:
        return None
    stream, rank, world_size = found[1].decode("ascii"), int(found[2]), int(found[3])
    return (stream, rank, world_size) if rank < world_size else None


@dataclass(frozen=True, kw_only=True)
class PodContext:
    """
    What the pod must know. No secret.

    :param catalogs: catalog name → its properties without secrets.
    :param world_size: ranks that must join before training starts.
    :param join_deadline_s: how long rank 0 waits for them, in seconds.
    :param run_s: the request's run timeout, enforced in the pod as a net behind the trigger; None: none.
    """

    run_key: RunKey
    generation: int
    prefix: str
    inputs: Mapping[str, TablePin] = field(default_factory=dict)
    catalogs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    checkpoint: Checkpointing | None = None
    publish: str = ""
    world_size: int = 1
    join_deadline_s: float = 600.0
    run_s: float | None = None
    version: int = CONTRACT_VERSION

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        *,
        run_key: RunKey,
        generation: int,
        catalogs: Mapping[str, Mapping[str, str]],
        world_size: int = 1,
    ) -> Self:
        """
        The context of one generation of a request.

        :param world_size: ranks, one for each node.
        """
        return cls(
            run_key=run_key,
            generation=generation,
            prefix=run_key.prefix,
            inputs=spec.inputs,
            catalogs=catalogs,
            params=spec.params,
            env=spec.env,
            working_dir=spec.working_dir,
            checkpoint=spec.checkpoint,
            publish=spec.publish,
            world_size=world_size,
            run_s=spec.timeouts.run_s,
        )

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return _canonical(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, sha256: str) -> Self:
        """
        Read what `to_bytes` wrote.

        :param sha256: hex digest that the submitting side announced.
        :raises ContractError: other bytes, not JSON, or a version that this package does not know.
        """
        if sha256_hex(data) != sha256:
            raise ContractError("the context in the store is not the one that was submitted; submit again")
        try:
            values = json.loads(data)
            version = values["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ContractError(f"the context is not readable ({error}); submit again") from error
        check_version("context", version)
        values["run_key"] = RunKey.from_dict(values["run_key"])
        values["inputs"] = {name: TablePin.from_dict(pin) for name, pin in values["inputs"].items()}
        values["checkpoint"] = Checkpointing(**values["checkpoint"]) if values["checkpoint"] else None
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A manifest in the store: its key and the SHA-256 of its bytes."""

    key: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PodResult:
    """
    What a run produced; the `result` of the run log's `finish` record.

    :param result: manifest of the trainer's own result (`context().result(...)`), or None.
    :param model: manifest of the model's files, or None when nothing is published.
    :param step: step of the last committed checkpoint, or None.
    :param model_uri: the folder of the published model: its files under their own names, or empty.
    :param checkpoints: what checkpoints cost rank 0, numbers by name (see the schema); None: there was none.
    """

    seconds: float
    result: Artifact | None = None
    model: Artifact | None = None
    model_name: str = ""
    model_version: str = ""
    step: int | None = None
    model_uri: str = ""
    checkpoints: Mapping[str, float] | None = None
    version: int = CONTRACT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """
        Back from `to_dict`.

        :raises ContractError: a version that this package does not know.
        """
        check_version("result", data.get("version"))
        values = dict(data)
        for name in ("result", "model"):
            values[name] = Artifact(**values[name]) if values[name] else None
        return cls(**values)


def check_version(what: str, version: Any) -> None:
    """
    Refuse any version but ours.

    :raises ContractError: says which side to update.
    """
    if version == CONTRACT_VERSION:
        return
    newer = isinstance(version, int) and version > CONTRACT_VERSION
    side = "this side (the image, if this is the pod's log)" if newer else "the other side"
    raise ContractError(
        f"{what} of contract version {version!r}, and this airflow-gpu-burst speaks version {CONTRACT_VERSION}. "
        f"Update {side}: pip install --upgrade airflow-gpu-burst, the same release on the workers and in the image"
    )


def sha256_hex(data: bytes) -> str:
    """SHA-256 of bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
