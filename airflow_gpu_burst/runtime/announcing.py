"""
How a trainer says that a checkpoint is ready: what is allowed, and the way for those that are no Python.

`ready(step)` of the trainer's context and `gpu-burst checkpoint ready STEP` move the folder themselves. Any other
program creates the file `<step>.ready` beside the folder `<step>`, empty or with the arguments of `ready` as JSON,
e.g. `{"loss": 0.12, "pin": true}`; the runtime finds it and does the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow_gpu_burst.contract import PINNED
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.runtime.workspace import Workspace

MARKER = ".ready"
REFUSED = ".refused"


def announcement(
    step: int, metrics: Mapping[str, Any], *, ranks: Any, pin: Any, rank: int, world_size: int
) -> tuple[dict[str, Any], bool]:
    """
    The metrics of a checkpoint as they are kept, and whether its files are one rank's. Pure.

    :raises SpecError: that cannot be said; says what can.
    """
    if step < 0:
        raise SpecError(f"ready({step}): steps count from 0")
    if ranks not in ("all", "self"):
        raise SpecError(f'ready({step}, ranks={ranks!r}): say "all" or "self"')
    if ranks == "self" and rank != 0:
        raise SpecError(
            f'ready({step}, ranks="self") on rank {rank}: a checkpoint of one rank is rank 0\'s; call it '
            "there only, or ready(step) on every rank"
        )
    if PINNED in metrics:
        raise SpecError(f"a metric cannot be called {PINNED!r}: to keep a checkpoint for ever say pin=True")
    values: dict[str, Any] = {name: _number(name, value) for name, value in metrics.items()}
    return values | ({PINNED: True} if pin else {}), ranks == "self" or world_size == 1


def _number(name: str, value: Any) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise SpecError(f"metric {name}={value!r} is no number") from error
    return number if math.isfinite(number) else str(number)


class Markers:
    """
    Finds the marker files of a trainer.

    :param refused: told which step cannot be taken, and why.
    """

    def __init__(
        self, workspace: Workspace, *, rank: int, world_size: int, refused: Callable[[int | None, SpecError], None]
    ) -> None:
        self._workspace, self._rank, self._world_size, self._refused = workspace, rank, world_size, refused
        self._seen: dict[Path, tuple[int, int]] = {}

    def take(self) -> None:
        """One look. A marker is taken at the second one: at the first its writer may be in the middle of it."""
        found = {}
        for marker in self._workspace.checkpoints.glob(f"*{MARKER}"):
            try:
                stat = marker.stat()
            except FileNotFoundError:
                continue
            found[marker] = (stat.st_mtime_ns, stat.st_size)
        settled = [marker for marker, seen in found.items() if self._seen.get(marker) == seen]
        for marker in sorted(settled, key=lambda marker: (found[marker], marker.name)):
            del found[marker]
            self._take(marker)
        self._seen = found

    def _take(self, marker: Path) -> None:
        step = None
        try:
            step, folder = _folder_of(marker)
            metrics, alone = announcement(step, rank=self._rank, world_size=self._world_size, **_arguments(marker))
        except SpecError as error:
            # Renamed, so that it is said once and somebody may look at it.
            marker.rename(marker.with_name(marker.name + REFUSED))
            self._refused(step, error)
            return
        self._workspace.mark_ready(step, metrics, alone=alone, folder=folder)
        marker.unlink(missing_ok=True)


def _folder_of(marker: Path) -> tuple[int, Path]:
    """A step and its folder, written with leading zeros or without, in the marker's name as in the folder's."""
    name = marker.name.removesuffix(MARKER)
    if not (name.isascii() and name.isdecimal()):
        raise SpecError(f"{marker.name}: name the marker <step>{MARKER}, e.g. 1200{MARKER}")
    step = int(name)
    for folder in [marker.with_name(name), *sorted(marker.parent.iterdir())]:
        is_step = folder.name.isascii() and folder.name.isdecimal() and int(folder.name) == step
        if is_step and folder.is_dir() and any(folder.iterdir()):
            return step, folder
    raise SpecError(f"{marker.name}: write files into the folder {step} beside it first")


def _arguments(marker: Path) -> dict[str, Any]:
    text = marker.read_text(encoding="utf-8", errors="replace").strip() or "{}"
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise SpecError(f'{marker.name} holds no JSON object: leave it empty, or write e.g. {{"loss": 0.12}} into it')
    return {"ranks": values.pop("ranks", "all"), "pin": values.pop("pin", False), "metrics": values}
