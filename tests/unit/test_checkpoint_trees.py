"""Several trees into one folder: what the earlier one has, wins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint import restore_trees, save_tree
from airflow_gpu_burst.runtime.restoring import rank_of
from airflow_gpu_burst.store import Store, StoreConfig, open_store

NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
TREES = st.lists(st.sets(NAMES, max_size=4), min_size=1, max_size=3)


def write(folder: Path, names: set[str], content: str) -> set[str]:
    """Files of these names, as far as a file system takes them; the names that it took."""
    folder.mkdir(parents=True)
    for name in sorted(names):
        path = folder / name
        if not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def in_the_way(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}/") or other.startswith(f"{name}/")


@given(trees=TREES)
def test_every_file_comes_but_where_an_earlier_tree_is_in_the_way(
    trees: list[set[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("trees")
    (base / "store").mkdir()
    store: Store = open_store(StoreConfig(uri=f"file://{base}/store"))
    manifests, expected = [], {}
    for number, names in enumerate(trees):
        taken = write(base / str(number), names, str(number))
        manifest = save_tree(store, base / str(number), f"data/{number}")
        manifests.append((manifest.key, manifest.sha256))
        before = set(expected)
        expected |= {name: str(number) for name in taken if not any(in_the_way(name, other) for other in before)}
    restore_trees(store, manifests, base / "target")
    found = {
        p.relative_to(base / "target").as_posix(): p.read_text() for p in (base / "target").rglob("*") if p.is_file()
    }
    assert found == expected


def test_the_rank_is_read_from_the_key() -> None:
    key = "runs/d/t/r-0123/data/000000000012/00007-0a1b2c3d/step-000000000001-1/manifest.json"
    assert rank_of(key) == 7
