"""Saves that are cut off go on; what changes meanwhile is never taken for whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import read_manifest, restore, save
from airflow_gpu_burst.errors import CheckpointError, StoreError
from airflow_gpu_burst.store import Store
from airflow_gpu_burst.transfer import Mover, Stored
from tests.checkpoint.trees import LARGE, MIB, Cut, Watched, content, dies_after, plant, seen


@pytest.mark.parametrize("operations", range(7))
def test_a_save_that_was_killed_goes_on(mover: Mover, store: Store, tmp_path: Path, operations: int) -> None:
    source, state = plant(tmp_path / "source"), tmp_path / "state"
    first = Watched(mover, dies_after(operations))
    try:
        save(first, source, "p", state=state)
    except Cut:
        assert not [entry.key for entry in store.list("p/") if "manifest" in entry.key]
    second = Watched(mover)
    manifest = save(second, source, "p", state=state)
    if operations < 6:
        # each object once, however often it was tried
        assert sorted([*first.keys("upload"), *second.keys("upload")]) == sorted(
            set(first.keys("upload") + second.keys("upload"))
        )
        assert len(first.done) + len(second.done) == 6
    named = read_manifest(store, manifest.key, manifest.sha256).keys
    assert {entry.key for entry in store.list("p/")} == {manifest.key, *named}
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)


def test_without_its_state_a_save_begins_anew_and_is_right(mover: Mover, tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    with pytest.raises(Cut):
        save(Watched(mover, dies_after(3)), source, "p", state=tmp_path / "lost")
    manifest = save(mover, source, "p", state=tmp_path / "new")
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)


def test_a_torn_state_costs_only_what_it_does_not_say(mover: Mover, tmp_path: Path) -> None:
    source, state = plant(tmp_path / "source"), tmp_path / "state"
    with pytest.raises(Cut):
        save(Watched(mover, dies_after(5)), source, "p", state=state)
    journal = state / "done.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"nonsense\n[1, 2]\n" + b"".join(lines[:2]) + lines[2][:-20])
    manifest = save(mover, source, "p", state=state)
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)


def test_the_state_of_another_prefix_does_not_count(mover: Mover, store: Store, tmp_path: Path) -> None:
    source, state = plant(tmp_path / "source"), tmp_path / "state"
    save(mover, source, "p/1", state=state)
    manifest = save(mover, source, "p/10", state=state)
    assert all(key.startswith("p/10/") for key in read_manifest(store, manifest.key, manifest.sha256).keys)
    assert len(list(store.list("p/10/"))) == len(list(store.list("p/1/")))


@pytest.mark.parametrize("name", ["shards/1.bin", "config.json"])
def test_what_was_written_anew_after_a_kill_is_another_object(
    mover: Mover, store: Store, tmp_path: Path, name: str
) -> None:
    source, state = plant(tmp_path / "source"), tmp_path / "state"
    one = save(mover, source, "p", state=state)
    before = {entry.key: store.get(entry.key) for entry in store.list("p/data/")}
    (source / name).write_bytes(content("another", (source / name).stat().st_size))
    other = save(mover, source, "p", state=state)
    assert other.sha256 != one.sha256
    assert {key: store.get(key) for key in before} == before  # data keys are written once
    for number, manifest in enumerate([one, other]):
        restore(mover, [(manifest.key, manifest.sha256)], tmp_path / str(number))
    assert (tmp_path / "1" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "0" / name).read_bytes() != (source / name).read_bytes()


CHANGES = ["append", "truncate", "remove", "replace"]


@pytest.mark.parametrize("name", ["shards/1.bin", "config.json"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", [0, 4])
def test_a_file_that_changes_meanwhile_is_no_checkpoint(
    mover: Mover, store: Store, tmp_path: Path, name: str, change: str, moment: int
) -> None:
    source = plant(tmp_path / "source")
    path, done, lock = source / name, [0], threading.Lock()

    def meanwhile(_verb: str, _key: str) -> None:
        with lock:
            done[0] += 1
            if done[0] - 1 != moment:
                return
        match change:
            case "append":
                with path.open("ab") as file:
                    file.write(b"x")
            case "truncate":
                os.truncate(path, 1)
            case "remove":
                path.unlink()
            case "replace":
                (tmp_path / "new").write_bytes(path.read_bytes())
                (tmp_path / "new").rename(path)

    with pytest.raises(CheckpointError, match=rf"{path.name}.*(changed|gone|truncated)"):
        save(Watched(mover, meanwhile), source, "p")
    assert not [entry.key for entry in store.list("p/") if "manifest" in entry.key]


def test_an_error_of_one_file_is_the_error_of_the_save(mover: Mover, store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / str(number)).write_bytes(content(str(number), LARGE))

    def refuse(verb: str, _key: str) -> None:
        if verb == "upload" and len(watched.done) >= 2:
            raise StoreError("refused. Try another store")

    watched = Watched(mover, refuse)
    with pytest.raises(StoreError, match="refused"):
        save(watched, source, "p")
    assert len(watched.done) < 8
    assert not [entry.key for entry in store.list("p/") if "manifest" in entry.key]


def test_a_sparse_file_that_a_mapping_changes_unseen_is_noticed(mover: Mover, tmp_path: Path) -> None:
    """A mapping's writes show in the time of the last change only later: here, not at all."""
    path = tmp_path / "source" / "sparse"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(10 * MIB)

    class Mapped(Watched):
        def upload(self, key: str, path: Path, *, state: Path | None = None) -> Stored:
            stored, before = super().upload(key, path, state=state), path.stat()
            with path.open("r+b") as file:
                file.write(b"now there is something")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            return stored

    with pytest.raises(CheckpointError, match="sparse changed"):
        save(Mapped(mover), path.parent, "p")


def test_a_sparse_file_that_changes_is_noticed(mover: Mover, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.truncate(10 * MIB)

    def meanwhile(_verb: str, _key: str) -> None:
        with (source / "sparse").open("r+b") as file:
            file.seek(5 * MIB)
            file.write(b"now there is something")

    with pytest.raises(CheckpointError, match="sparse changed"):
        save(Watched(mover, meanwhile), source, "p")


@pytest.mark.parametrize("late", ["file", "folder", "link"])
def test_what_comes_meanwhile_is_not_left_out_in_silence(mover: Mover, tmp_path: Path, late: str) -> None:
    source = plant(tmp_path / "source")

    first = threading.Lock()

    def meanwhile(_verb: str, _key: str) -> None:
        if not first.acquire(blocking=False):
            return
        match late:
            case "file":
                (source / "late").write_bytes(b"x")
            case "folder":
                (source / "late").mkdir()
            case "link":
                (source / "late").symlink_to("config.json")

    with pytest.raises(CheckpointError, match="late changed"):
        save(Watched(mover, meanwhile), source, "p")
