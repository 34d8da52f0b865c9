"""A scratch folder that several pods of a node share: each has its own in it, and the dead ones' go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import ExitCode, SpecError
from airflow_gpu_burst.runtime.scratch import PodFolder
from airflow_gpu_burst.runtime.workspace import Workspace

DIES = """
import os, sys
from pathlib import Path
from airflow_gpu_burst.runtime.scratch import PodFolder
folder = PodFolder(Path(sys.argv[1]), sys.argv[2])
(folder.path / "big").write_text("x")
os._exit(9)
"""


def die(scratch: Path, pod: str) -> None:
    assert subprocess.run([sys.executable, "-c", DIES, str(scratch), pod], check=False).returncode == 9


def names(scratch: Path) -> list[str]:
    return sorted(path.name for path in scratch.iterdir())


def test_what_a_killed_pod_left_goes_when_the_next_comes(tmp_path: Path) -> None:
    die(tmp_path, "dead")
    assert names(tmp_path) == ["dead", "dead.gpu-burst-lock"]
    folder = PodFolder(tmp_path, "new")
    assert names(tmp_path) == ["new", "new.gpu-burst-lock"]
    folder.close()
    assert names(tmp_path) == []


def test_a_living_pod_and_what_is_not_ours_stay(tmp_path: Path) -> None:
    (tmp_path / "somebody").mkdir()
    (tmp_path / "somebody.lock").touch()
    living = PodFolder(tmp_path, "living")
    (living.path / "file").write_text("x")
    PodFolder(tmp_path, "other").close()
    assert (living.path / "file").read_text() == "x" and (tmp_path / "somebody").is_dir()
    assert (tmp_path / "somebody.lock").exists()
    living.close()


def test_a_restarted_container_takes_its_own_folder_again(tmp_path: Path) -> None:
    die(tmp_path, "pod")
    folder = PodFolder(tmp_path, "pod")
    Workspace(folder.path).prepare()
    folder.close()
    assert names(tmp_path) == []


def test_output_that_the_store_did_not_take_stays_until_the_next_pod(tmp_path: Path) -> None:
    PodFolder(tmp_path, "pod").close(unsent=True)
    assert (tmp_path / "pod").is_dir()
    PodFolder(tmp_path, "next").close()
    assert names(tmp_path) == []


def test_a_folder_that_a_person_wants_to_look_at_stays_for_good(tmp_path: Path) -> None:
    PodFolder(tmp_path, "pod").close(keep=True)
    PodFolder(tmp_path, "next").close()
    assert names(tmp_path) == ["pod"]


@pytest.mark.parametrize("scratch", ["file", "/proc/nothing-goes-here"])
def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path, scratch: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SpecError, match=f"user {os.getuid()} may write.*GPU_BURST_SCRATCH") as caught:
        PodFolder(tmp_path / scratch, "pod")
    assert caught.value.exit_code == ExitCode.REQUEST_WRONG


def test_what_an_earlier_start_left_goes_whatever_it_is(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.prepare()
    workspace.checkpoint(3).mkdir()
    workspace.checkpoint(4).mkdir()
    workspace.mark_ready(4, {})
    (workspace.model / "old").write_text("x")
    workspace.restored.symlink_to("/etc")
    workspace.result_file.write_text("{}")
    workspace.prepare()
    assert workspace.ready() == [] and not workspace.checkpoint(3).exists()
    assert (
        not list(workspace.model.iterdir()) and not workspace.restored.exists() and not workspace.result_file.exists()
    )
