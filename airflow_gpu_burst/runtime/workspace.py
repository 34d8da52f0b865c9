"""The scratch folder that runtime and trainer share: who writes what where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV_WORKSPACE = "GPU_BURST_WORKSPACE"
"""Tells the trainer where its workspace is."""


@dataclass(frozen=True)
class Workspace:
    """
    Folders and files under one root, all of them of one run.

    The trainer writes `checkpoint/<step>/`, then a marker `ready/<step>`; the marker's arrival is atomic
    (rename), so that a killed trainer never leaves a checkpoint that looks complete.
    """

    root: Path

    @property
    def trainer_file(self) -> Path:
        """What `context()` reads, JSON."""
        return self.root / "trainer.json"

    @property
    def restored(self) -> Path:
        """The restored checkpoint, if there is one."""
        return self.root / "restored"

    @property
    def model(self) -> Path:
        """What the trainer leaves here is published."""
        return self.root / "model"

    @property
    def result_file(self) -> Path:
        """The trainer's own result, JSON."""
        return self.root / "result.json"

    @property
    def output_file(self) -> Path:
        """Everything that the trainer printed."""
        return self.root / "output.log"

    @property
    def ready_folder(self) -> Path:
        """Markers of checkpoints that are complete."""
        return self.root / "ready"

    def checkpoint(self, step: int) -> Path:
        """Where the trainer writes the checkpoint of a step."""
        return self.root / "checkpoint" / f"{step:012d}"

    def prepare(self) -> None:
        """Make the folders; what an earlier start left half done goes."""
        for name in ("checkpoint", "ready", "restored", "model"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.result_file.unlink(missing_ok=True)
        for folder in (self.root / "checkpoint", self.ready_folder, self.model):
            folder.mkdir(parents=True, exist_ok=True)

    def ready_steps(self) -> list[int]:
        """Steps whose checkpoint is complete and not yet taken, oldest first."""
        return sorted(int(p.name) for p in self.ready_folder.iterdir() if p.name.isdigit())

    def mark_ready(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say that the checkpoint of `step` is complete."""
        write_json(self.ready_folder / f"{step:012d}", dict(metrics))

    def take_ready(self, step: int) -> dict[str, Any]:
        """The metrics that came with a step; leaves the marker (see `drop`)."""
        metrics: dict[str, Any] = json.loads((self.ready_folder / f"{step:012d}").read_text(encoding="utf-8"))
        return metrics

    def drop(self, step: int) -> None:
        """Remove a step's marker and files."""
        (self.ready_folder / f"{step:012d}").unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint(step), ignore_errors=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a reader sees all of it or nothing (temporary file, rename)."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    temporary.replace(path)
