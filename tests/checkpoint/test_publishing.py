"""A model under its own names: whole behind its marker, whoever else publishes and whenever it is cut off."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import Manifest, save
from airflow_gpu_burst.checkpoint.packing import SMALL
from airflow_gpu_burst.checkpoint.publishing import CLAIM, MARKER, publish_tree
from airflow_gpu_burst.errors import CheckpointError, PromotionConflict
from airflow_gpu_burst.store import Store, StoreConfig, open_store
from airflow_gpu_burst.transfer import Mover, open_mover
from tests.checkpoint.trees import LARGE, MIB, Cut, Watched, content, dies_after

PREFIX = "models/yield-rca/3f2a-g1"


def model(folder: Path, seed: str = "") -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "empty folder").mkdir()
    for name, size in {
        "config.json": 100,
        "model-1.safetensors": LARGE,
        "model-2.safetensors": 7 * MIB,
        "tokenizer/vocab": 5000,
        "tokenizer/none": 0,
    }.items():
        (folder / name).write_bytes(content(seed + name, size))
    (folder / "model.safetensors").symlink_to("model-1.safetensors")
    (folder / "tokenizer" / "latest").symlink_to("../model.safetensors")
    os.link(folder / "config.json", folder / "config.again")
    return folder


def published(store: Store, prefix: str = PREFIX) -> dict[str, bytes]:
    return {e.key.removeprefix(f"{prefix}/"): store.get(e.key) for e in store.list(f"{prefix}/")}


def expected(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def saved(mover: Mover, folder: Path, prefix: str = "run/data/model") -> tuple[str, str]:
    manifest: Manifest = save(mover, folder, prefix)
    return manifest.key, manifest.sha256


def test_every_file_has_its_own_name_and_the_marker_says_what_there_is(
    mover: Mover, store: Store, tmp_path: Path
) -> None:
    folder = model(tmp_path / "model")
    size = publish_tree(mover, saved(mover, folder), to=mover, store=store, prefix=PREFIX)
    found = published(store)
    marker = json.loads(found.pop(MARKER))
    assert found == expected(folder)
    assert {file["path"]: file["size"] for file in marker["files"]} == {n: len(data) for n, data in found.items()}
    assert size == sum(map(len, found.values()))
    assert [entry.key for entry in store.list("models/") if entry.key.endswith(CLAIM)] == []


def test_the_marker_comes_last_and_again_is_fine(mover: Mover, store: Store, tmp_path: Path) -> None:
    manifest = saved(mover, model(tmp_path / "model"))

    def before(_verb: str, _key: str) -> None:
        assert f"{PREFIX}/{MARKER}" not in {entry.key for entry in store.list("models/")}

    publish_tree(mover, manifest, to=Watched(mover, before), store=store, prefix=PREFIX)
    watched = Watched(mover)
    publish_tree(mover, manifest, to=watched, store=store, prefix=PREFIX)
    assert watched.done == []


def test_the_same_content_saved_anew_is_the_same_model(mover: Mover, store: Store, tmp_path: Path) -> None:
    for number in range(2):
        manifest = saved(mover, model(tmp_path / str(number)), f"run/data/{number}")
        publish_tree(mover, manifest, to=mover, store=store, prefix=PREFIX)


@pytest.mark.parametrize("operations", range(8))
def test_what_was_cut_off_is_completed(mover: Mover, store: Store, tmp_path: Path, operations: int) -> None:
    folder = model(tmp_path / "model")
    manifest = saved(mover, folder)
    with pytest.raises(Cut):
        publish_tree(
            Watched(mover, dies_after(operations)),
            manifest,
            to=Watched(mover, dies_after(operations)),
            store=store,
            prefix=PREFIX,
        )
    assert MARKER not in published(store)
    publish_tree(mover, manifest, to=mover, store=store, prefix=PREFIX)
    found = published(store)
    del found[MARKER]
    assert found == expected(folder)


def test_another_content_touches_nothing(mover: Mover, store: Store, tmp_path: Path) -> None:
    ours = saved(mover, model(tmp_path / "ours"), "run/data/ours")
    theirs = saved(mover, model(tmp_path / "theirs", "other"), "run/data/theirs")
    publish_tree(mover, ours, to=mover, store=store, prefix=PREFIX)
    before = published(store)
    for _ in range(2):
        with pytest.raises(PromotionConflict, match="Publish under another one"):
            publish_tree(mover, theirs, to=mover, store=store, prefix=PREFIX)
    assert published(store) == before
    publish_tree(mover, ours, to=mover, store=store, prefix=PREFIX)


def test_another_content_is_refused_while_one_is_being_published(mover: Mover, store: Store, tmp_path: Path) -> None:
    ours = saved(mover, model(tmp_path / "ours"), "run/data/ours")
    theirs = saved(mover, model(tmp_path / "theirs", "other"), "run/data/theirs")
    with pytest.raises(Cut):
        publish_tree(mover, ours, to=Watched(mover, dies_after(2)), store=store, prefix=PREFIX)
    before = published(store)
    with pytest.raises(PromotionConflict, match="Publish under another one"):
        publish_tree(mover, theirs, to=mover, store=store, prefix=PREFIX)
    assert published(store) == before


class Meanwhile:
    """A store where something happens before a claim is laid."""

    def __init__(self, store: Store, what: Callable[[], object]) -> None:
        self._store, self._what = store, what

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> None:
        if key.endswith(CLAIM):
            self._what()
        self._store.create(key, data)


def test_who_claims_just_after_another_one_was_published_touches_nothing(
    mover: Mover, store: Store, tmp_path: Path
) -> None:
    ours = saved(mover, model(tmp_path / "ours"), "run/data/ours")
    theirs = saved(mover, model(tmp_path / "theirs", "other"), "run/data/theirs")
    late = Meanwhile(store, lambda: publish_tree(mover, ours, to=mover, store=store, prefix=PREFIX))
    with pytest.raises(PromotionConflict, match="Publish under another one"):
        publish_tree(mover, theirs, to=mover, store=late, prefix=PREFIX)  # type: ignore[arg-type]
    found = published(store)
    del found[MARKER]
    assert found == expected(tmp_path / "ours")
    assert [entry.key for entry in store.list("models/") if entry.key.endswith(CLAIM)] == []


def test_publishers_at_once_agree(config: StoreConfig, tmp_path: Path) -> None:
    mover, store = open_mover(config), open_store(config)
    contents = {seed: model(tmp_path / seed, seed) for seed in ("a", "b")}
    manifests = {seed: saved(mover, folder, f"run/data/{seed}") for seed, folder in contents.items()}
    ended: dict[str, list[str]] = {"a": [], "b": []}

    def publish(seed: str) -> None:
        try:
            publish_tree(mover, manifests[seed], to=mover, store=open_store(config), prefix=PREFIX)
            ended[seed].append("published")
        except PromotionConflict:
            ended[seed].append("refused")

    threads = [threading.Thread(target=publish, args=(seed,)) for seed in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [seed for seed in ended if "published" in ended[seed]]
    assert ended[winner] == ["published"] * 2
    assert ended["b" if winner == "a" else "a"] == ["refused"] * 2
    found = published(store)
    del found[MARKER]
    assert found == expected(contents[winner])
    mover.close()


def test_into_a_store_of_its_own(mover: Mover, elsewhere: tuple[Mover, Store], tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    to, store = elsewhere
    publish_tree(mover, saved(mover, folder), to=to, store=store, prefix="yield-rca/1")
    found = published(store, "yield-rca/1")
    del found[MARKER]
    assert found == expected(folder)


def test_where_no_server_copies_the_bytes_go_through_this_machine(mover: Mover, store: Store, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    manifest = saved(mover, folder)

    def refuse(verb: str, _key: str) -> None:
        if verb == "copy":
            raise NotImplementedError("another server")

    (tmp_path / "scratch").mkdir()
    source = Watched(mover, refuse)
    publish_tree(source, manifest, to=mover, store=store, prefix=PREFIX, scratch=tmp_path / "scratch")
    found = published(store)
    del found[MARKER]
    assert found == expected(folder)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / MARKER).write_text("x"), "rename it"),
        (lambda folder: (folder / "link").symlink_to("nowhere"), "leads to 'nowhere', which is no file"),
        (lambda folder: (folder / "link").symlink_to("tokenizer"), "which is no file"),
        (lambda folder: (folder / "link").symlink_to("link"), "which is no file"),
    ],
)
def test_what_has_no_place_in_a_published_model_is_refused(
    mover: Mover, store: Store, tmp_path: Path, spoil: object, says: str
) -> None:
    folder = model(tmp_path / "model")
    spoil(folder)  # type: ignore[operator]
    manifest = saved(mover, folder)
    with pytest.raises(CheckpointError, match=says):
        publish_tree(mover, manifest, to=mover, store=store, prefix=PREFIX)
    assert list(store.list("models/")) == []


def test_a_file_of_the_size_of_the_limit(mover: Mover, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for size in (SMALL - 1, SMALL):
        (folder / str(size)).write_bytes(content(str(size), size))
    publish_tree(mover, saved(mover, folder), to=mover, store=store, prefix=PREFIX)
    assert published(store)[str(SMALL)] == content(str(SMALL), SMALL)
