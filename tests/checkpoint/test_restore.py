"""What is damaged is said, what was killed leaves nothing that looks restored, what this node has is checked first."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import Manifest, read_manifest, restore, save, space, together
from airflow_gpu_burst.checkpoint.manifest import Entries, File, encode
from airflow_gpu_burst.checkpoint.paths import Link
from airflow_gpu_burst.checkpoint.space import Kept, held
from airflow_gpu_burst.checkpoint.verifying import verify
from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, GpuBurstError, ObjectMissing, StoreUnavailable
from airflow_gpu_burst.store import Store
from airflow_gpu_burst.transfer import Mover, Span
from tests.checkpoint.trees import LARGE, MIB, Cut, Watched, content, dies_after, plant, seen


def named(manifest: Manifest) -> tuple[str, str]:
    return manifest.key, manifest.sha256


def key_of(store: Store, manifest: Manifest, path: str) -> File:
    (file,) = (file for file in read_manifest(store, *named(manifest)).files if file.path == path)
    return file


@pytest.mark.parametrize("path", ["shards/1.bin", "config.json", "sparse"])
@pytest.mark.parametrize("damage", ["a changed byte", "cut off", "lost"])
def test_damage_is_found_and_nothing_is_restored(
    mover: Mover, store: Store, tmp_path: Path, path: str, damage: str
) -> None:
    manifest = save(mover, plant(tmp_path / "source"), "p")
    file = key_of(store, manifest, path)
    assert verify(mover, [named(manifest)]) == []
    data = bytearray(store.get(file.key))
    expected: type[GpuBurstError] = ChecksumMismatch
    match damage:
        case "a changed byte":
            data[(file.offset or 0) + (6 * MIB + 7 if path == "sparse" else 100)] ^= 1
            store.put(file.key, bytes(data))
        case "cut off":
            store.put(file.key, bytes(data[:50]))
        case "lost":
            store.delete(file.key)
            expected = ObjectMissing
    with pytest.raises(expected, match=file.key):
        restore(mover, [named(manifest)], tmp_path / "rooms" / "target")
    assert list((tmp_path / "rooms").iterdir()) == []
    (said,) = verify(mover, [named(manifest)])
    assert file.key in said


def test_a_damaged_or_lost_manifest_is_found(mover: Mover, store: Store, tmp_path: Path) -> None:
    manifest = save(mover, plant(tmp_path / "source"), "p")
    data = store.get(manifest.key)
    store.put(manifest.key, data.replace(b"config.json", b"c0nfig.json"))
    with pytest.raises(ChecksumMismatch, match="the run log says"):
        restore(mover, [named(manifest)], tmp_path / "target")
    assert len(verify(mover, [named(manifest)])) == 1
    store.delete(manifest.key)
    with pytest.raises(ObjectMissing):
        restore(mover, [named(manifest)], tmp_path / "target")
    assert len(verify(mover, [named(manifest)])) == 1
    assert not (tmp_path / "target").exists()


def test_what_an_earlier_tree_has_need_not_be_sound_in_a_later_one(mover: Mover, store: Store, tmp_path: Path) -> None:
    manifests = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "model").write_bytes(content(str(rank), LARGE))
        manifests.append(save(mover, tmp_path / str(rank), f"p/{rank}"))
    store.delete(key_of(store, manifests[1], "model").key)
    restore(mover, [named(manifest) for manifest in manifests], tmp_path / "target")
    assert (tmp_path / "target" / "model").read_bytes() == content("0", LARGE)


@pytest.mark.parametrize("operations", range(7))
def test_a_restore_that_was_killed_is_not_there_and_goes_on(mover: Mover, tmp_path: Path, operations: int) -> None:
    source = plant(tmp_path / "source")
    manifest = save(mover, source, "p")
    target = tmp_path / "rooms" / "target"
    first = Watched(mover, dies_after(operations))
    if operations < 6:
        with pytest.raises(Cut):
            restore(first, [named(manifest)], target)
        assert not target.exists()
    second = Watched(mover)
    restored = restore(second, [named(manifest)], target)
    assert seen(target) == seen(source)
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    if operations < 6:  # the manifest twice, each object once
        assert len(first.done) + len(second.done) == 6 + (operations > 0)
        assert bool(restored.reused) == (operations > 1)


def test_what_a_killed_restore_left_is_verified_before_it_is_used(mover: Mover, tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    manifest = save(mover, source, "p")
    target = tmp_path / "rooms" / "target"
    with pytest.raises(Cut):
        restore(Watched(mover, dies_after(5)), [named(manifest)], target)
    (staging,) = target.parent.iterdir()
    left = [path for path in (staging / "tree").rglob("*") if path.is_file() and path.stat().st_size]
    assert left
    for path in left:  # as after a power cut
        path.write_bytes(bytes(path.stat().st_size))
    restored = restore(mover, [named(manifest)], target)
    assert seen(target) == seen(source)
    assert restored.reused < restored.fetched


def test_what_another_restore_left_is_removed(mover: Mover, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / f"of {folder.name}").write_bytes(content(folder.name, LARGE))
        (folder / "both").write_bytes(content(folder.name, LARGE))
    manifests = [save(mover, folder, f"p/{folder.name}") for folder in (one, other)]
    target = tmp_path / "rooms" / "target"
    with pytest.raises(Cut):
        restore(Watched(mover, dies_after(2)), [named(manifests[0])], target)
    restore(mover, [named(manifests[1])], target)
    assert seen(target) == seen(other)
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_store_that_does_not_answer_leaves_what_came_to_go_on_with(mover: Mover, tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    manifest = save(mover, source, "p")

    def away(_verb: str, _key: str) -> None:
        if len(watched.done) == 4:
            raise StoreUnavailable("503. Try again")

    watched = Watched(mover, away)
    with pytest.raises(StoreUnavailable):
        restore(watched, [named(manifest)], tmp_path / "target")
    assert not (tmp_path / "target").exists()
    restored = restore(mover, [named(manifest)], tmp_path / "target")
    assert restored.reused > 0
    assert seen(tmp_path / "target") == seen(source)
    watched.done.clear()
    with pytest.raises(StoreUnavailable):  # which is no damage
        verify(watched, [named(manifest)])


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "scratch" / "kept")


@pytest.fixture
def copy(kept: Kept, mover: Mover, tmp_path: Path) -> tuple[Manifest, Path, dict[str, object]]:
    """A checkpoint in the store that this node has kept; the kept folder; what it held."""
    source = plant(tmp_path / "scratch" / "ready")
    manifest, before = save(mover, source, "p"), seen(source)
    assert kept.keep(source, run="0a1b", rank=0, sha256=manifest.sha256)
    assert not source.exists()
    return manifest, kept.root / "0a1b-0" / manifest.sha256, before


Copy = tuple[Manifest, Path, dict[str, object]]


def test_what_this_node_has_kept_is_not_fetched(kept: Kept, copy: Copy, mover: Mover, tmp_path: Path) -> None:
    manifest, folder, before = copy
    watched = Watched(mover)
    restored = restore(watched, [named(manifest)], tmp_path / "target", local=kept.folders("0a1b"))
    assert watched.keys("fetch") == [manifest.key]
    assert restored.fetched == 0
    assert restored.reused > 0
    assert seen(tmp_path / "target") == before
    # a trainer may write into what it has restored
    (tmp_path / "target" / "shards" / "1.bin").write_bytes(b"trained on")
    assert seen(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["missing", "shorter", "a changed byte", "a folder", "a link", "a pipe"],
)
@pytest.mark.parametrize("name", ["shards/1.bin", "config.json"])
def test_a_kept_file_that_is_not_what_was_committed_is_fetched(
    kept: Kept, copy: Copy, mover: Mover, tmp_path: Path, name: str, change: Callable[[Path], object]
) -> None:
    manifest, folder, before = copy
    change(folder / name)
    restored = restore(mover, [named(manifest)], tmp_path / "target", local=kept.folders("0a1b"))
    assert seen(tmp_path / "target") == before
    assert restored.fetched == len(content(name, 3 * MIB if name == "shards/1.bin" else 200))


def test_files_of_another_commit_are_not_taken(kept: Kept, copy: Copy, mover: Mover, tmp_path: Path) -> None:
    """Same names, sizes and times, even the same bytes: what counts is the manifest."""
    _, folder, before = copy
    shutil.copytree(folder, tmp_path / "again", symlinks=True)
    (tmp_path / "again" / "config.json").write_bytes(content("other", 200))
    other = save(mover, tmp_path / "again", "q")
    expected = seen(tmp_path / "again")
    restored = restore(mover, [named(other)], tmp_path / "target", local=kept.folders("0a1b"))
    assert restored.reused == 0
    assert seen(tmp_path / "target") == expected != before


def test_a_copy_that_is_restored_from_is_held(
    kept: Kept, copy: Copy, mover: Mover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, folder, before = copy

    def meanwhile(_done: int, _total: int) -> None:
        kept.forget("0a1b")

    monkeypatch.setattr(together, "_EVERY_S", 0.0001)  # the first word comes when nothing is done yet
    (folder / "config.json").unlink()
    restored = restore(mover, [named(manifest)], tmp_path / "target", local=kept.folders("0a1b"), progress=meanwhile)
    assert seen(tmp_path / "target") == before
    assert restored.fetched == 200
    with held(folder) as there:
        assert not there  # forgotten once it was let go


def test_files_are_never_written_through_a_link(mover: Mover, store: Store, tmp_path: Path) -> None:
    """A staging folder in which somebody has laid a link where a folder of the tree belongs."""
    outside = tmp_path / "outside"
    outside.mkdir()
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "a").write_bytes(content("a", LARGE))
    (source / "d" / "b").write_bytes(content("b", LARGE - 1))
    manifest = save(mover, source, "p")
    target = tmp_path / "rooms" / "target"
    with pytest.raises(Cut):
        restore(Watched(mover, dies_after(1)), [named(manifest)], target)
    (staging,) = target.parent.iterdir()
    (staging / "tree" / "d").symlink_to(outside)
    with pytest.raises(GpuBurstError):
        restore(mover, [named(manifest)], target)
    assert list(outside.iterdir()) == []
    assert not target.exists()


def test_a_manifest_whose_file_lies_behind_its_own_link_is_not_restored_through_it(
    mover: Mover, store: Store, tmp_path: Path
) -> None:
    store.put("p/data/x", b"x")
    entries = Entries(files=(File("d/f", 1, 0, "p/data/x"),), links=(Link("d", "e"),))
    manifest, data = encode(entries, "p")
    store.put(manifest.key, data)
    with pytest.raises((CheckpointError, ChecksumMismatch)):
        restore(mover, [named(manifest)], tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_one_wrong_answer_does_not_condemn_a_checkpoint(mover: Mover, tmp_path: Path) -> None:
    """A manifest has no checksum on the wire: it is asked for again before anything is called damaged."""
    source = plant(tmp_path / "source")
    manifest = save(mover, source, "p")

    class Flips(Watched):
        left = 2

        def fetch(self, key: str, spans: Sequence[Span], *, etag: str = "") -> None:
            super().fetch(key, spans, etag=etag)
            if "manifest" in key and self.left:
                self.left -= 1
                os.pwrite(spans[0].fd, b"\0", 5)

    flips = Flips(mover)
    restore(flips, [named(manifest)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source) and not flips.left
    flips.left = 100
    with pytest.raises(ChecksumMismatch):
        restore(flips, [named(manifest)], tmp_path / "another")


def test_a_restore_beside_one_of_a_similar_name_leaves_it_alone(mover: Mover, tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    manifest = save(mover, source, "p")

    first = threading.Lock()

    def meanwhile(verb: str, key: str) -> None:
        if verb == "fetch" and "manifest" not in key and first.acquire(blocking=False):
            restore(mover, [named(manifest)], tmp_path / "out")

    restore(Watched(mover, meanwhile), [named(manifest)], tmp_path / "out-2")
    assert seen(tmp_path / "out") == seen(tmp_path / "out-2") == seen(source)


def test_copies_of_other_runs_go_when_there_is_no_room(
    mover: Mover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = save(mover, plant(tmp_path / "source"), "p")
    kept = Kept(tmp_path / "kept")
    assert kept.keep(plant(tmp_path / "foreign"), run="another", rank=0, sha256="a" * 64)
    (copy,) = (folder / ("a" * 64) for folder in kept.folders("another"))
    monkeypatch.setattr(space, "free", lambda folder: 0 if copy.exists() else 1 << 40)
    restore(mover, [named(manifest)], tmp_path / "target", kept=kept.root)
    assert not copy.exists()
