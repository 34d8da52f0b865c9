"""A full disk: said with what is missing, nothing half-written is left, and no save fails for its notes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import restore, save
from airflow_gpu_burst.checkpoint.space import Kept
from airflow_gpu_burst.errors import StoreFull
from airflow_gpu_burst.transfer import Mover
from tests.checkpoint.trees import LARGE, MIB, Watched, content, plant, seen


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.getuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("NOT TESTED: a full disk. It needs root and the right to mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_restore_that_does_not_fit_says_how_much_is_missing(mover: Mover, small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(content("w", 20 * MIB))
    manifest = save(mover, source, "p")
    watched = Watched(mover)
    with pytest.raises(StoreFull, match=r"are missing\. Free space there, give the pod a larger scratch volume"):
        restore(watched, [(manifest.key, manifest.sha256)], small_disk / "target")
    assert watched.keys("fetch") == [manifest.key]
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_is_filled_by_others_meanwhile(mover: Mover, small_disk: Path, tmp_path: Path) -> None:
    manifest = save(mover, plant(tmp_path / "source"), "p")

    def meanwhile(_verb: str, key: str) -> None:
        if "/data/" in key and not (small_disk / "filler").exists():
            fill(small_disk)

    with pytest.raises(StoreFull, match="free space there, or name another folder|[Ff]ree"):
        restore(Watched(mover, meanwhile), [(manifest.key, manifest.sha256)], small_disk / "target")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_kept_copies_go_for_what_is_restored(mover: Mover, small_disk: Path, tmp_path: Path) -> None:
    kept = Kept(small_disk / "kept")
    for run in ("0a", "0b"):
        ready = small_disk / "ready"
        ready.mkdir()
        (ready / "weights").write_bytes(bytes(2 * MIB + 500_000))
        assert kept.keep(ready, run=run, rank=0, sha256="a" * 64)
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(content("w", 5 * MIB))
    manifest = save(mover, source, "p")
    restore(mover, [(manifest.key, manifest.sha256)], small_disk / "target", local=kept.folders("0b"))
    assert seen(small_disk / "target") == seen(source)
    assert [path.parent.name for path in kept.root.glob("*/*") if path.is_dir()] == ["0b-0"]  # the oldest went


def test_a_kept_copy_and_what_is_made_of_it_need_not_both_fit(mover: Mover, small_disk: Path) -> None:
    kept = Kept(small_disk / "kept")
    ready = small_disk / "ready"
    ready.mkdir()
    (ready / "weights").write_bytes(content("w", 5 * MIB))
    manifest, before = save(mover, ready, "p"), seen(ready)
    assert kept.keep(ready, run="0a", rank=0, sha256=manifest.sha256)
    restored = restore(mover, [(manifest.key, manifest.sha256)], small_disk / "target", local=kept.folders("0a"))
    assert (restored.fetched, restored.reused) == (5 * MIB, 0)
    assert seen(small_disk / "target") == before


def test_a_save_goes_on_without_its_notes(mover: Mover, small_disk: Path, tmp_path: Path) -> None:
    source = small_disk / "source"
    source.mkdir()
    for number in range(300):
        (source / f"{number:03d}").write_bytes(content(str(number), 100))
    (source / "large").write_bytes(content("large", LARGE))
    fill(small_disk)
    manifest = save(mover, source, "p", state=small_disk / "state")
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)
