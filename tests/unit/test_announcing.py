"""How a trainer says that a checkpoint is ready, in Python or by a marker file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_gpu_burst.checkpoint import space
from airflow_gpu_burst.checkpoint.space import Kept
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.runtime.announcing import Markers, announcement
from airflow_gpu_burst.runtime.trainer import TrainerContext
from airflow_gpu_burst.runtime.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "pod")
    made.prepare()
    return made


def trainer(workspace: Workspace, **values: Any) -> TrainerContext:
    own: dict[str, Any] = {"rank": 0, "world_size": 1, "params": {}, "inputs": {}, "run": {}, "restored": None}
    return TrainerContext(workspace=workspace, **{**own, **values})


@pytest.mark.parametrize(
    ("rank", "world_size", "ranks", "alone"),
    [(0, 1, "all", True), (0, 2, "all", False), (0, 2, "self", True), (1, 2, "all", False)],
)
def test_whose_files_make_up_a_checkpoint(rank: int, world_size: int, ranks: str, alone: bool) -> None:
    found = announcement(5, {"loss": 1}, ranks=ranks, pin=False, rank=rank, world_size=world_size)
    assert found == ({"loss": 1.0}, alone)


def test_a_trainer_does_not_pay_for_what_moves_bytes() -> None:
    program = "import sys, airflow_gpu_burst.runtime; sys.exit('airflow_gpu_burst.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_pin_travels_with_the_metrics() -> None:
    assert announcement(5, {"loss": "0.5"}, ranks="all", pin=True, rank=0, world_size=1)[0] == {
        "loss": 0.5,
        "pinned": True,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": -1}, "steps count from 0"),
        ({"ranks": "one"}, 'say "all" or "self"'),
        ({"ranks": "self", "rank": 1}, "rank 0's; call it there only"),
        ({"metrics": {"loss": "low"}}, "is no number"),
        ({"metrics": {"loss": None}}, "is no number"),
        ({"metrics": {"pinned": 1}}, "say pin=True"),
    ],
)
def test_what_cannot_be_said(changes: dict[str, Any], says: str) -> None:
    values = {"step": 1, "metrics": {}, "ranks": "all", "pin": False, "rank": 0, "world_size": 2}
    with pytest.raises(SpecError, match=says):
        announcement(**{**values, **changes})


def test_ready_moves_the_folder_and_notes_how_long_it_took(workspace: Workspace) -> None:
    ctx = trainer(workspace)
    (ctx.checkpoint_folder(7) / "state").write_text("x")
    ctx.ready(7, pin=True, loss=0.5)
    (ready,) = workspace.ready()
    assert (ready.step, ready.alone, ready.pinned) == (7, True, True)
    assert ready.metrics == {"loss": 0.5, "pinned": True}
    assert (ready.folder / "state").read_text() == "x" and not workspace.checkpoint(7).exists()
    assert len(workspace.stalls()) == 2 and sum(workspace.stalls()) < 0.1


def test_a_clock_that_is_set_back_changes_no_order(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = trainer(workspace)
    for step, clock in ((10, 2_000_000_000_000_000_000), (20, 1_000_000_000_000_000_000)):
        monkeypatch.setattr(time, "time_ns", lambda clock=clock: clock)
        (ctx.checkpoint_folder(step) / "state").write_text("x")
        ctx.ready(step)
    assert [ready.step for ready in workspace.ready()] == [10, 20]


def test_ready_waits_for_no_disk(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an fsync waits for all of the checkpoint's dirty pages")

    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, never)
    ctx = trainer(workspace)
    (ctx.checkpoint_folder(7) / "state").write_text("x")
    ctx.ready(7)


class Looks:
    """Markers of one trainer, and what was refused."""

    def __init__(self, workspace: Workspace, **values: int) -> None:
        self.workspace, self.refused = workspace, []
        self.markers = Markers(
            workspace,
            refused=lambda step, error: self.refused.append((step, str(error))),
            **{"rank": 0, "world_size": 1, **values},
        )

    def write(self, folder: str, marker: str, text: str = "", file: str = "state") -> None:
        place = self.workspace.checkpoints
        (place / folder).mkdir(exist_ok=True)
        if file:
            (place / folder / file).write_text("x")
        (place / marker).write_text(text)

    def take(self) -> list[int]:
        self.markers.take()
        return [ready.step for ready in self.workspace.ready()]


@pytest.mark.parametrize("folder", ["42", "042", "000000000042"])
@pytest.mark.parametrize("marker", ["42.ready", "000000000042.ready"])
def test_a_marker_with_leading_zeros_or_without(workspace: Workspace, folder: str, marker: str) -> None:
    looks = Looks(workspace)
    looks.write(folder, marker, '{"loss": 0.25, "pin": true}')
    assert looks.take() == [], "its writer may be in the middle of it"
    assert looks.take() == [42]
    (ready,) = workspace.ready()
    assert ready.metrics == {"loss": 0.25, "pinned": True} and (ready.folder / "state").exists()
    assert not list(workspace.checkpoints.iterdir()) and not looks.refused


def test_a_marker_that_is_still_written_is_left_alone(workspace: Workspace) -> None:
    looks = Looks(workspace)
    looks.write("1", "1.ready", '{"loss"')
    assert looks.take() == []
    looks.write("1", "1.ready", '{"loss": 1}')
    assert looks.take() == [] and looks.take() == [1] and not looks.refused


def test_markers_found_together_keep_the_order_in_which_they_were_made(workspace: Workspace) -> None:
    looks = Looks(workspace)
    for step, made in ((9, 100), (10, 200), (100, 150)):
        looks.write(str(step), f"{step}.ready")
        os.utime(workspace.checkpoints / f"{step}.ready", (made, made))
    looks.take()
    assert looks.take() == [9, 100, 10]


@pytest.mark.parametrize(
    ("folder", "marker", "text", "file", "says"),
    [
        ("1", "one.ready", "", "state", "name the marker <step>.ready"),
        ("1", "2.ready", "", "state", "write files into the folder 2"),
        ("1", "1.ready", "", "", "write files into the folder 1"),
        ("1", "1.ready", "loss=1", "state", "holds no JSON object"),
        ("1", "1.ready", "[1]", "state", "holds no JSON object"),
        ("1", "1.ready", '{"loss": "low"}', "state", "is no number"),
        ("1", "1.ready", '{"ranks": "two"}', "state", 'say "all" or "self"'),
    ],
)
def test_a_marker_that_cannot_be_taken_is_said_once_and_put_aside(
    workspace: Workspace, folder: str, marker: str, text: str, file: str, says: str
) -> None:
    looks = Looks(workspace)
    looks.write(folder, marker, text, file)
    assert [looks.take() for _ in range(4)] == [[]] * 4
    ((_, said),) = looks.refused
    assert says in said and (workspace.checkpoints / f"{marker}.refused").exists()


def test_what_another_program_left_half_written_as_ready_is_not_listed(workspace: Workspace) -> None:
    """Killed between the note about it and the rename."""
    (workspace.ready_folder / f"{1:020d}-{5:012d}.json").write_text(json.dumps({"metrics": {}, "alone": True}))
    assert workspace.ready() == []


@pytest.mark.parametrize("room", ["enough", "after a copy goes", "none"])
def test_a_disk_that_is_short_is_cleared_of_copies_before_the_next_checkpoint(
    workspace: Workspace, room: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """How much is free is simulated, what lies there is not."""
    kept = workspace.root.parent / "kept"
    (workspace.root / "saved").mkdir()
    Kept(kept).keep(workspace.root / "saved", run="run", rank=0, sha256="a" * 64)
    copy = kept / "run-0" / ("a" * 64)
    assert copy.is_dir()
    workspace.note_size(1000)

    def free(_: Path) -> int:
        return 1100 if room == "enough" or (room == "after a copy goes" and not copy.exists()) else 1099

    monkeypatch.setattr(space, "free", free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free(path)))
    assert trainer(workspace, kept=kept).checkpoint_folder(1).is_dir()
    assert copy.is_dir() is (room == "enough")
    assert ("1 are missing. Free space there" in capfd.readouterr().err) is (room == "none")
