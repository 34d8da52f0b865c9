"""Trees come back bit for bit, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint import restore_tree, save_bytes, save_tree
from airflow_gpu_burst.contract import sha256_hex
from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, ObjectMissing
from airflow_gpu_burst.store import Store, StoreConfig, open_store

NAMES = st.text("abcde.äß ☃-_", min_size=1, max_size=12).filter(lambda n: n.strip(".") and n == n.strip())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(StoreConfig(uri=f"file://{tmp_path}/store"))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
        if p.is_file() or not any(p.iterdir())
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=300), max_size=8))
def test_a_tree_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    base = tmp_path_factory.mktemp("tree")
    store = open_store(StoreConfig(uri=f"file://{base}/store"))
    source = base / "source"
    (source / "an empty folder").mkdir(parents=True)
    for name, data in files.items():
        path = source / name
        if any(p.is_file() for p in path.parents) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    manifest = save_tree(store, source, "p")
    total = restore_tree(store, manifest.key, manifest.sha256, base / "target")
    assert contents(base / "target") == contents(source)
    assert total == manifest.size


def test_a_changed_byte_is_found_and_nothing_of_the_file_stays(store: Store, tmp_path: Path) -> None:
    manifest = save_bytes(store, b"payload", "p", "weights")
    store.put("p/data/weights", b"pAyload")
    with pytest.raises(ChecksumMismatch, match="the manifest p/manifest.json says"):
        restore_tree(store, manifest.key, manifest.sha256, tmp_path / "t")
    assert not (tmp_path / "t" / "weights").exists()


def test_a_changed_manifest_is_found(store: Store, tmp_path: Path) -> None:
    manifest = save_bytes(store, b"payload", "p", "weights")
    store.put(manifest.key, store.get(manifest.key) + b" ")
    with pytest.raises(ChecksumMismatch, match="the run log says"):
        restore_tree(store, manifest.key, manifest.sha256, tmp_path / "t")


def test_a_lost_file_is_found(store: Store, tmp_path: Path) -> None:
    manifest = save_bytes(store, b"payload", "p", "weights")
    store.delete("p/data/weights")
    with pytest.raises(ObjectMissing):
        restore_tree(store, manifest.key, manifest.sha256, tmp_path / "t")


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "a\\b", ""])
def test_a_manifest_that_leads_outside_is_refused(store: Store, tmp_path: Path, path: str) -> None:
    store.put("p/data/x", b"x")
    entry = {"path": path, "size": 1, "sha256": sha256_hex(b"x"), "key": "p/data/x"}
    data = json.dumps({"version": 1, "files": [entry]}).encode()
    store.put("p/manifest.json", data)
    with pytest.raises(CheckpointError, match="neither saved nor restored"):
        restore_tree(store, "p/manifest.json", sha256_hex(data), tmp_path / "t")
    assert not (tmp_path / "outside").exists()


def test_a_manifest_of_another_version_is_refused(store: Store, tmp_path: Path) -> None:
    data = json.dumps({"version": 2, "files": []}).encode()
    store.put("m", data)
    with pytest.raises(CheckpointError, match="use the release"):
        restore_tree(store, "m", sha256_hex(data), tmp_path)


@pytest.mark.parametrize("target", ["inside", "/etc/hostname"])
def test_links_are_refused_rather_than_skipped(store: Store, tmp_path: Path, target: str) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "inside").write_text("x")
    (folder / "link").symlink_to(target)
    with pytest.raises(CheckpointError, match="plain files and folders only"):
        save_tree(store, folder, "p")


def test_no_name_of_a_tree_is_in_the_way_of_restoring_it(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / f".landing-{number}").write_text(f"hidden {number}")
        (source / f".restore-{number}").write_text(f"other {number}")
    (source / "x").write_text("x")
    manifest = save_tree(store, source, "p")
    restore_tree(store, manifest.key, manifest.sha256, tmp_path / "deep" / "target")
    assert contents(tmp_path / "deep" / "target") == contents(source)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["target"]
