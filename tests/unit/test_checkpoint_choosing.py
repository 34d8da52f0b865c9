"""Several trees into one folder: what the earlier one has, wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint.choosing import choose
from airflow_gpu_burst.checkpoint.manifest import Entries, File, Same
from airflow_gpu_burst.checkpoint.paths import Link
from airflow_gpu_burst.errors import CheckpointError

PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
KINDS = st.sampled_from(["file", "folder", "link"])
TREES = st.lists(st.dictionaries(PATHS, KINDS, max_size=5), min_size=1, max_size=3)


def entries(kinds: dict[str, str]) -> Entries:
    """Those that one file system could hold."""
    leaves = {p for p in kinds if not any(other.startswith(f"{p}/") for other in kinds)}
    of = {kind: sorted(p for p in leaves if kinds[p] == kind) for kind in ("file", "folder", "link")}
    return Entries(
        files=tuple(File(path, 1, 1, "k") for path in of["file"]),
        folders=tuple(of["folder"]),
        links=tuple(Link(path, "nowhere") for path in of["link"]),
    )


def above(path: str) -> set[str]:
    parts = path.split("/")
    return {"/".join(parts[:n]) for n in range(1, len(parts))}


@given(TREES)
def test_everything_comes_but_where_an_earlier_tree_is_in_the_way(trees: list[dict[str, str]]) -> None:
    given_trees = [entries(kinds) for kinds in trees]
    leaves: dict[str, int] = {}
    folders: set[str] = set()
    for number, tree in enumerate(given_trees):
        before_leaves, before_folders = set(leaves), set(folders)
        for path in [*(f.path for f in tree.files), *(link.path for link in tree.links)]:
            if path not in before_leaves | before_folders and not above(path) & before_leaves:
                leaves[path] = number
                folders |= above(path)
        for path in tree.folders:
            if path not in before_leaves and not above(path) & before_leaves:
                folders |= above(path) | {path}
    chosen = choose(given_trees)
    found = {placed.file.path: placed.tree for placed in chosen.files}
    assert {**found, **{link.path: leaves[link.path] for link in chosen.links}} == leaves
    made = set(chosen.folders)
    for path in [*leaves, *chosen.folders]:
        made |= above(path)
    assert made == folders


def test_a_second_name_of_a_file_that_another_tree_has_becomes_a_file_of_its_own() -> None:
    ours = Entries(files=(File("a", 1, 11, "ours"),))
    theirs = Entries(files=(File("a", 1, 22, "theirs"),), same=(Same("b", "a"), Same("c", "a")))
    chosen = choose([ours, theirs])
    assert [(p.file.path, p.file.key) for p in chosen.files] == [("a", "ours"), ("b", "theirs")]
    assert chosen.same == [Same("c", "b")]


def test_links_of_two_trees_that_lead_out_together_are_refused() -> None:
    one = Entries(links=(Link("d/up", ".."),))
    other = Entries(links=(Link("x", "d/up/.."),))
    assert choose([one]).links and len(choose([other]).links) == 1
    with pytest.raises(CheckpointError, match="points out of the tree"):
        choose([one, other])


def test_a_second_name_of_nothing_is_refused() -> None:
    with pytest.raises(CheckpointError, match="which is no file"):
        choose([Entries(same=(Same("b", "a"),))])
