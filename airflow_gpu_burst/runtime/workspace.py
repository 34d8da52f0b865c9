"""The scratch folder that runtime and trainer share: who writes what where."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_gpu_burst.contract import ENV_SCRATCH, PINNED
from airflow_gpu_burst.errors import SpecError

ENV_WORKSPACE = "GPU_BURST_WORKSPACE"
"""Tells the trainer where its workspace is."""


@dataclass(frozen=True)
class Workspace:
    """
    Folders and files under one root, all of them of one run.

    The trainer writes `checkpoint/<step>/`; being ready is one rename to `ready/`, so that a killed trainer never
    leaves a checkpoint that looks complete.
    """

    root: Path

    @property
    def trainer_file(self) -> Path:
        """What `context()` reads, JSON."""
        return self.root / "trainer.json"

    @property
    def started_file(self) -> Path:
        """There once the trainer runs: its pid, and when (wall clock), JSON."""
        return self.root / "started.json"

    @property
    def spool_file(self) -> Path:
        """Key prefix of this start's stream in the spool, JSON."""
        return self.root / "spool.json"

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
    def checkpoints(self) -> Path:
        """Where the trainer writes checkpoints: a folder for each step, and the markers of those that are ready."""
        return self.root / "checkpoint"

    @property
    def ready_folder(self) -> Path:
        """Checkpoints that are complete, in the order in which they became so."""
        return self.root / "ready"

    @property
    def uploads(self) -> Path:
        """What is needed to go on with an upload after its process was killed."""
        return self.root / "uploads"

    @property
    def size_file(self) -> Path:
        """Bytes of the newest saved checkpoint, in digits: so much room the next one will need."""
        return self.root / "size"

    @property
    def stall_file(self) -> Path:
        """A line for each call that kept the trainer from training: seconds."""
        return self.root / "stalls"

    def checkpoint(self, step: int) -> Path:
        """Where the trainer writes the checkpoint of a step."""
        return self.checkpoints / f"{step:012d}"

    def prepare(self) -> None:
        """
        Make the folders; what an earlier start or epoch left goes, ready checkpoints included.

        Output that is not in the store yet stays told of (`spool_file`): it is the start's, not the epoch's.

        :raises SpecError: the folder cannot be written.
        """
        try:
            for folder in (self.checkpoints, self.ready_folder, self.uploads, self.restored, self.model):
                _remove(folder)
            for file in (self.result_file, self.started_file, self.trainer_file, self.stall_file):
                file.unlink(missing_ok=True)
            for folder in (self.checkpoints, self.ready_folder, self.uploads, self.model):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from error

    def mark_ready(
        self, step: int, metrics: Mapping[str, Any], *, alone: bool = False, folder: Path | None = None
    ) -> None:
        """
        Say that the checkpoint of `step` is complete: its folder moves away from the trainer.

        What the trainer writes for that step later is another checkpoint; the two never mix.

        Nothing is synced to the disk. An fsync waits for gigabytes of the checkpoint's own dirty pages (ext4 writes
        them out with it), and whoever loses these pages in a power cut loses the pod, and with it all that is here.

        :param alone: no other rank has a part of it.
        :param folder: where it was written, unless in `checkpoint(step)`.
        """
        # Not the time of day: a clock that is set back would put a later checkpoint before an earlier one.
        name = f"{time.monotonic_ns():020d}-{step:012d}"
        # No temporary name: it is looked at only once the folder is there.
        self._about(name).write_text(json.dumps({"metrics": dict(metrics), "alone": alone}), encoding="utf-8")
        (folder or self.checkpoint(step)).rename(self.ready_folder / name)

    def ready(self) -> list[Ready]:
        """Checkpoints that are complete and not yet dropped, in the order in which they became so."""
        found = []
        for folder in sorted(self.ready_folder.iterdir()):
            if folder.is_dir():
                about = json.loads(self._about(folder.name).read_text(encoding="utf-8"))
                at, _, step = folder.name.partition("-")
                found.append(Ready(step=int(step), folder=folder, at=int(at) / 1e9, **about))
        return found

    def drop(self, ready: Ready) -> None:
        """Remove a checkpoint that is in the store, or never will be."""
        shutil.rmtree(ready.folder, ignore_errors=True)
        _remove(self.state(ready))
        self._about(ready.folder.name).unlink(missing_ok=True)

    def state(self, ready: Ready) -> Path:
        """Where the state of its upload is kept."""
        return self.uploads / ready.folder.name

    def note_stall(self, seconds: float) -> None:
        """The trainer waited for a call of ours."""
        with self.stall_file.open("a", encoding="ascii") as file:
            file.write(f"{seconds:.6f}\n")

    def stalls(self) -> list[float]:
        """Seconds of every such call in this epoch."""
        try:
            text = self.stall_file.read_text(encoding="ascii")
        except FileNotFoundError:
            return []
        return [float(line) for line in text.split("\n")[:-1]]

    def note_size(self, size: int) -> None:
        """A checkpoint has been saved."""
        write_json(self.size_file, size, sync=False)

    def size(self) -> int:
        """Bytes of the newest saved checkpoint; 0: there is none."""
        try:
            return int(self.size_file.read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0

    def _about(self, name: str) -> Path:
        return self.ready_folder / f"{name}.json"


@dataclass(frozen=True)
class Ready:
    """
    A complete checkpoint on its way to the store.

    :param at: monotonic seconds when it became so.
    :param metrics: the numbers that came with it.
    :param alone: no other rank has a part of it.
    """

    step: int
    folder: Path
    at: float
    metrics: dict[str, Any]
    alone: bool

    @property
    def pinned(self) -> bool:
        """Whether it is to be kept for ever."""
        return bool(self.metrics.get(PINNED))


def unwritable(folder: Path, error: OSError) -> SpecError:
    """What to say when the scratch folder cannot be used."""
    return SpecError(
        f"the scratch folder {folder} cannot be written ({error.strerror or error}). Mount a volume there that user "
        f"{os.getuid()} may write, with room for two checkpoints (an emptyDir will do), or name another folder in "
        f"{ENV_SCRATCH}"
    )


def _remove(path: Path) -> None:
    """A folder, a file or a link, whatever an earlier start left; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, data: Any, *, sync: bool = True) -> None:
    """
    Write JSON so that a reader sees all of it or nothing (temporary file, rename).

    :param sync: also after a power cut, at the price of waiting for the disk.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(data, file, ensure_ascii=False, allow_nan=False)
        if sync:
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave an empty file under the name
    temporary.replace(path)
