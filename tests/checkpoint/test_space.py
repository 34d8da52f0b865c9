"""Copies that a node keeps: moved, found, limited, and gone when the room is needed, but never under a reader."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import space
from airflow_gpu_burst.checkpoint.space import Kept, free, held
from airflow_gpu_burst.errors import StoreFull

A, B, C = (letter * 64 for letter in "abc")


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "kept")


def checkpoint(tmp_path: Path, name: str, size: int = 10) -> Path:
    folder = tmp_path / "ready" / name
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * size)
    return folder


def keep(kept: Kept, tmp_path: Path, sha256: str, *, run: str = "0a", rank: int = 0, most: int = 1) -> Path:
    assert kept.keep(checkpoint(tmp_path, f"{run}-{rank}-{sha256}"), run=run, rank=rank, sha256=sha256, most=most)
    return kept.root / f"{run}-{rank}" / sha256


def names(kept: Kept) -> list[str]:
    return sorted(path.relative_to(kept.root).as_posix()[:6] for path in kept.root.glob("*/*") if path.is_dir())


def test_the_newest_of_each_run_and_rank_stays(kept: Kept, tmp_path: Path) -> None:
    for sha256 in (A, C, B):
        keep(kept, tmp_path, sha256)
    keep(kept, tmp_path, A, rank=1)
    keep(kept, tmp_path, A, run="0b", rank=0)
    assert names(kept) == ["0a-0/b", "0a-1/a", "0b-0/a"]
    assert [folder.name for folder in kept.folders("0a")] == ["0a-0", "0a-1"]
    kept.forget("0a")
    assert names(kept) == ["0b-0/a"]
    assert [path.name for path in kept.root.iterdir()] == ["0b-0"]


def test_the_same_content_again_takes_the_place_of_the_first(kept: Kept, tmp_path: Path) -> None:
    copy = keep(kept, tmp_path, A)
    (copy / "weights").write_text("old")
    folder = checkpoint(tmp_path, "again")
    assert kept.keep(folder, run="0a", rank=0, sha256=A)
    assert (copy / "weights").read_bytes() == b"x" * 10


def test_what_cannot_be_kept_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file is in the way")
    folder = checkpoint(tmp_path, "x")
    assert not Kept(tmp_path / "kept").keep(folder, run="0a", rank=0, sha256=A)
    assert (folder / "weights").exists()
    assert Kept(tmp_path / "kept").folders("0a") == []


def test_room_is_made_of_the_oldest_first_and_of_no_more_than_needed(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run, sha256 in (("0a", B), ("0b", A), ("0c", C)):
        keep(kept, tmp_path, sha256, run=run)
    monkeypatch.setattr(space, "free", lambda _where: 100 * (4 - len(names(kept))))
    kept.make_room(100, tmp_path)
    assert len(names(kept)) == 3
    kept.make_room(200, tmp_path)
    assert names(kept) == ["0b-0/a", "0c-0/c"]
    with held(kept.root / "0b-0" / A) as there:
        assert there
        with pytest.raises(StoreFull, match=r"400 bytes are needed.*300 are free: 100 are missing. Free space"):
            kept.make_room(400, tmp_path)
        assert names(kept) == ["0b-0/a"]
    kept.make_room(400, tmp_path)
    assert names(kept) == []


def test_only_copies_are_removed(kept: Kept, tmp_path: Path) -> None:
    keep(kept, tmp_path, A)
    for name in ("0a-0/mine", "0a-0/b", f"other/{'z' * 64}", f"{B}/x"):
        (kept.root / name).mkdir(parents=True)
        (kept.root / name / "precious").touch()
    with pytest.raises(StoreFull):
        kept.make_room(1 << 60, tmp_path)
    assert len(list(kept.root.rglob("precious"))) == 4
    assert not (kept.root / "0a-0" / A).exists()


def test_free_space_is_that_of_where_a_folder_will_be(tmp_path: Path) -> None:
    assert abs(free(tmp_path / "not" / "yet") - free(tmp_path)) < 1 << 30
    assert 0 < free(tmp_path) < 1 << 60


def test_a_reader_in_another_process_is_respected_until_it_dies(kept: Kept, tmp_path: Path) -> None:
    copy = keep(kept, tmp_path, A)
    code = (
        "import sys, time; from pathlib import Path; from airflow_gpu_burst.checkpoint.space import held\n"
        "with held(Path(sys.argv[1])) as there:\n    print(there, flush=True); time.sleep(60)"
    )
    reader = subprocess.Popen([sys.executable, "-c", code, str(copy)], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "True\n"
        kept.forget("0a")
        assert (copy / "weights").exists()
    finally:
        reader.kill()
        reader.communicate()
    kept.forget("0a")
    assert not copy.exists()


def test_a_lock_that_is_removed_while_one_waits_for_it_is_no_lock(kept: Kept, tmp_path: Path) -> None:
    copy = keep(kept, tmp_path, A)
    path = copy.with_name(f"{A}.lock")
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with held(copy) as there:
            assert there
            inside.set()
            leave.wait(30)

    with path.open("r+") as remover:
        fcntl.flock(remover, fcntl.LOCK_EX)
        reader = threading.Thread(target=read)
        reader.start()
        assert not inside.wait(0.2)
        path.unlink()
        path.touch()
    assert inside.wait(30)
    kept.forget("0a")
    assert (copy / "weights").exists()
    leave.set()
    reader.join()


def test_readers_and_removers_at_once_never_see_half_a_copy(kept: Kept, tmp_path: Path) -> None:
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with held(kept.root / "0a-0" / A) as there:
                if there and len(os.listdir(kept.root / "0a-0" / A)) != 20:
                    wrong.append("half a copy")

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        folder = tmp_path / "ready" / str(number)
        folder.mkdir(parents=True)
        for name in range(20):
            (folder / str(name)).touch()
        kept.keep(folder, run="0a", rank=0, sha256=A)
        kept.forget("0a")
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
