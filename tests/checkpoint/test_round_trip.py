"""Trees come back bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint import read_bytes, read_manifest, restore, save, save_bytes
from airflow_gpu_burst.checkpoint.packing import PACK, SMALL
from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch
from airflow_gpu_burst.store import Store, StoreConfig
from airflow_gpu_burst.transfer import Mover, open_mover
from tests.checkpoint.trees import MIB, Watched, content, plant, seen


@pytest.mark.parametrize("config", ["directory", "s3", "moto"], indirect=True)
def test_everything_comes_back_as_it_was(mover: Mover, tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    told: list[tuple[int, int]] = []
    manifest = save(mover, source, "run/data/1", progress=lambda done, total: told.append((done, total)))
    assert (manifest.files, manifest.size) == (
        8,
        sum(f.stat().st_size for f in source.rglob("*") if f.is_file() and not f.is_symlink() and f.name != "zero.bin"),
    )
    assert told[-1] == (manifest.size, manifest.size)
    assert all(one <= other for one, other in zip(told, told[1:], strict=False))
    restored = restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "deep" / "target")
    assert seen(tmp_path / "deep" / "target") == seen(source)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["target"]
    assert (restored.files, restored.reused) == (8, 0)
    # holes are neither fetched nor written
    assert restored.fetched < manifest.size - 11 * MIB
    assert (tmp_path / "deep" / "target" / "sparse").stat().st_blocks * 512 < MIB


def test_a_manifest_is_read_from_a_store_and_by_a_mover(mover: Mover, store: Store, tmp_path: Path) -> None:
    manifest = save(mover, plant(tmp_path / "source"), "p")
    entries = read_manifest(store, manifest.key, manifest.sha256)
    assert entries == read_manifest(mover, manifest.key, manifest.sha256)
    listed = {entry.key: entry.size for entry in store.list("p/")}
    assert set(listed) == {manifest.key, *entries.keys}


def test_an_empty_folder_is_a_tree_too(mover: Mover, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    manifest = save(mover, tmp_path / "source", "p")
    assert (manifest.files, manifest.size) == (0, 0)
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == {}


def test_small_files_share_objects(mover: Mover, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(2000):
        folder = source / f"{number % 50:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04d}").write_bytes(content(str(number), 4096))
    watched = Watched(mover)
    manifest = save(watched, source, "p")
    assert len(watched.done) == 2  # 8 MB, and the manifest
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)


def test_no_pack_is_larger_than_its_limit(config: StoreConfig, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(PACK // SMALL + 10):
        (source / f"{number:04d}").write_bytes(bytes([number % 256]) * (SMALL - 1))
    mover = open_mover(config)
    manifest = save(mover, source, "p")
    entries = read_manifest(mover, manifest.key, manifest.sha256)
    assert len(entries.keys) == 2
    assert max((f.offset or 0) + f.size for f in entries.files) <= PACK
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)
    mover.close()


def test_names_that_are_equal_but_for_their_form_are_two_files(mover: Mover, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "\u00e4").write_text("composed")
    (source / "a\u0308").write_text("decomposed")
    manifest = save(mover, source, "p")
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert sorted(os.listdir(os.fsencode(tmp_path / "target"))) == [b"a\xcc\x88", b"\xc3\xa4"]
    assert seen(tmp_path / "target") == seen(source)


def test_no_name_of_a_tree_is_in_the_way_of_restoring_it(mover: Mover, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (".landing-0", ".landing-target-0123456789abcdef", "tree", "parts", "0", "manifest-1.json"):
        (source / name).write_text(name)
    manifest = save(mover, source, "p")
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert seen(tmp_path / "target") == seen(source)


NAMES = st.text("abcde.äß ☃-_", min_size=1, max_size=12).filter(lambda n: n.strip(".") and n == n.strip())
SIZES = st.sampled_from([0, 1, 4096, SMALL - 1, SMALL, SMALL + 1]) | st.integers(0, 300)
LEAVES = st.one_of(SIZES, st.just("folder"), st.just("link"), st.just("again"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), LEAVES, max_size=8))
def test_any_tree_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, leaves: dict[str, int | str]) -> None:
    base = tmp_path_factory.mktemp("tree")
    mover = open_mover(StoreConfig(uri=f"file://{base}/store"))
    source = base / "source"
    source.mkdir()
    last: Path | None = None
    for name, what in leaves.items():
        path = source / name
        if any(p.is_symlink() or p.is_file() for p in path.parents) or os.path.lexists(path):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if what == "folder":
            path.mkdir()
        elif what == "link":
            path.symlink_to(os.path.relpath(last or source, path.parent))
        elif what == "again" and last:
            os.link(last, path)
        else:
            path.write_bytes(content(name, what if isinstance(what, int) else 7))
            path.chmod(0o400 + len(name))
            last = path
    manifest = save(mover, source, "p")
    restore(mover, [(manifest.key, manifest.sha256)], base / "target")
    assert seen(base / "target") == seen(source)
    mover.close()


def test_of_several_trees_the_earlier_one_wins(mover: Mover, tmp_path: Path) -> None:
    expected = {}
    manifests = []
    for rank, names in enumerate([["model", "rng"], ["model", "rng", "rng.d/x"], ["rng/sub/x", "only/two"]]):
        for name in names:
            path = tmp_path / str(rank) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} of {rank}")
        manifest = save(mover, tmp_path / str(rank), f"data/{rank}")
        manifests.append((manifest.key, manifest.sha256))
    watched = Watched(mover)
    restore(watched, manifests, tmp_path / "target")
    expected = {"model": 0, "rng": 0, "rng.d/x": 1, "only/two": 2}
    found = {
        p.relative_to(tmp_path / "target").as_posix(): p.read_text()
        for p in (tmp_path / "target").rglob("*")
        if p.is_file()
    }
    assert found == {name: f"{name} of {rank}" for name, rank in expected.items()}


def test_a_small_result_needs_no_mover(store: Store, mover: Mover, tmp_path: Path) -> None:
    manifest = save_bytes(store, b'{"a": 1}', "p/result", "result.json")
    assert read_bytes(store, manifest.key, manifest.sha256) == ("p/result/data/result.json", b'{"a": 1}')
    restore(mover, [(manifest.key, manifest.sha256)], tmp_path / "target")
    assert (tmp_path / "target" / "result.json").read_bytes() == b'{"a": 1}'
    store.put("p/result/data/result.json", b'{"a": 2}')
    with pytest.raises(ChecksumMismatch, match="is not what was saved"):
        read_bytes(store, manifest.key, manifest.sha256)
    empty = save_bytes(store, b"", "p/empty", "x")
    assert read_bytes(store, empty.key, empty.sha256)[1] == b""


@pytest.mark.parametrize("there", ["a file", "a folder with files", "a link"])
def test_a_target_that_holds_something_is_left_alone(mover: Mover, tmp_path: Path, there: str) -> None:
    manifest = save(mover, plant(tmp_path / "source"), "p")
    target = tmp_path / "target"
    match there:
        case "a file":
            target.write_text("precious")
        case "a folder with files":
            target.mkdir()
            (target / "precious").touch()
        case "a link":
            target.symlink_to(tmp_path / "source")
    with pytest.raises(CheckpointError, match="name a folder that is new or empty"):
        restore(mover, [(manifest.key, manifest.sha256)], target)
    assert target.is_file() or (target / "precious").exists() or target.is_symlink()
