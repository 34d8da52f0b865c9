"""Pods and nodes without a cluster: real processes of `gpu-burst run`, and the blows that end them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import airflow_gpu_burst
from airflow_gpu_burst import contract
from airflow_gpu_burst.runtime.orphans import ENV_TRAINER_LOCK
from airflow_gpu_burst.runtime.workspace import ENV_WORKSPACE
from airflow_gpu_burst.store import StoreConfig
from tests.kill.content import PART_SIZE
from tests.kill.gate import Gate

TRAINER = Path(__file__).with_name("trainer.py")
GRACE_S = 4.0
_TOKEN = "KILL_TEST_POD"
# Also where the tests lie: the trainer's own program imports from them.
_PATHS = (Path(__file__).with_name("parts"), Path(airflow_gpu_burst.__file__).parents[1], Path(__file__).parents[2])


@dataclass(frozen=True)
class Node:
    """
    One machine: its NVMe.

    :param scratch: gone with the node.
    """

    scratch: Path

    @property
    def lock(self) -> Path:
        """By it the next start finds a trainer whose runtime was killed alone, as on the local route."""
        return self.scratch.with_suffix(".lock")

    def tear(self, rng: random.Random) -> int:
        """What a power cut does to files that no fsync has reached. How many were hit."""
        hit = 0
        for path in sorted(self.scratch.rglob("*")):
            if path.is_symlink() or not path.is_file() or rng.random() < 0.5:
                continue
            size = path.stat().st_size
            fate = rng.choice(("empty", "short", "zeros", "zeros", "gone"))
            if fate == "gone":
                path.unlink()
            elif fate == "zeros" and size:
                at = rng.randrange(size)
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes(min(4096, size - at)))
            else:
                os.truncate(path, 0 if fate == "empty" else rng.randint(0, size))
            hit += 1
        return hit


@dataclass(eq=False)
class Pod:
    """
    One start of a container.

    :param gate: its way to the store; None: a directory.
    :param code: its exit status, once it was taken.
    """

    uid: str
    rank: int
    owner: str
    node: Node
    home: Path
    gate: Gate | None
    env: Mapping[str, str]
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    code: int | None = None
    struck: str = ""

    def __post_init__(self) -> None:
        self.log = self.home / f"{self.uid}-{self.token[:6]}.log"
        self._word = self.log.with_suffix(".word")
        own = {
            contract.ENV_OWNER: self.owner,
            contract.ENV_RANK: str(self.rank),
            contract.ENV_POD_UID: self.uid,
            contract.ENV_SCRATCH: str(self.node.scratch),
            contract.ENV_TERMINATION_FILE: str(self._word),
            contract.ENV_GRACE: str(GRACE_S),
            ENV_TRAINER_LOCK: str(self.node.lock),
            _TOKEN: self.token,
        }
        self.node.scratch.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", sys.executable, str(TRAINER)],
                env={**self.env, **own},
                stdout=log,
                stderr=log,
                process_group=0,
            )

    @property
    def word(self) -> Mapping[str, Any]:
        """Its last one; empty when it had no time for it."""
        try:
            found: dict[str, Any] = json.loads(self._word.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def members(self) -> list[Member]:
        """Its processes that live, the runtime first."""
        found = list(_processes(self.token))
        return sorted(found, key=lambda member: member.pid != self.process.pid)

    def signal(self, number: signal.Signals, role: str = "") -> bool:
        """Signal the processes of a role, or all of them; whether there was one."""
        hit = False
        for member in self.members():
            if role in ("", member.role):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, number)
                    hit = True
        return hit

    def end(self) -> None:
        """Nothing of it is left."""
        while any(member.pid != self.process.pid for member in self.members()) or self.process.poll() is None:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        if self.gate:
            self.gate.close()


@dataclass(frozen=True)
class Member:
    """One process of a pod."""

    pid: int
    role: str


def pod_environment(config: StoreConfig, gate: Gate | None, context_key: str, context: bytes) -> dict[str, str]:
    """What a route would give to all pods of a generation."""
    at = replace(config, endpoint_url=gate.endpoint) if gate else config
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys(_PATHS))),
        "PYTHONDONTWRITEBYTECODE": "1",
        **at.to_env(),
        contract.ENV_CONTEXT: context_key,
        contract.ENV_CONTEXT_SHA256: contract.sha256_hex(context),
        "KILL_TEST_PART_SIZE": str(PART_SIZE),
    }


def _processes(token: str) -> Iterator[Member]:
    mark = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in variables:
            trains = any(variable.startswith(f"{ENV_WORKSPACE}=".encode()) for variable in variables)
            role = "trainer" if trains else "agent" if b"agent" in command else "runtime"
            yield Member(pid=int(entry.name), role=role)
