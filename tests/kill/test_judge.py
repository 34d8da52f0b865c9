"""The judge of the kill test sees what it must see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.runlog.records import Close, Commit, Record, Start
from tests.kill.content import chain, differences, part, whole, write
from tests.kill.judge import lineage_of, nothing_was_damaged, one_epoch_at_a_time
from tests.kill.report import page

STAMP: dict[str, Any] = {"id": "i", "generation": 1, "at": "now"}


def start(seq: int, owner: str, restore_from: int | None = None, damaged: tuple[int, ...] = ()) -> Start:
    members = ((f"pod-{owner}", "nonce"),)
    return Start(
        **STAMP, seq=seq, owner=owner, members=members, world_size=1, restore_from=restore_from, damaged=damaged
    )


def commit(seq: int, owner: str, epoch: int, step: int = 1) -> Commit:
    return Commit(**STAMP, seq=seq, owner=owner, epoch=epoch, step=step, manifests={})


def close(seq: int) -> Close:
    return Close(**STAMP, seq=seq, owner="airflow", verdict="failed", reason="")


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([start(1, "a"), commit(2, "a", 1), start(3, "b"), commit(4, "b", 3)], ""),
        ([start(1, "a"), start(2, "b"), commit(3, "a", 1)], "record 3 (commit) is of epoch 1"),
        ([start(1, "a"), start(2, "b"), commit(3, "a", 2)], "record 3 (commit) is of epoch 2"),
        ([start(1, "a"), close(2), commit(3, "a", 1)], "after its generation was closed"),
        ([commit(1, "a", 1)], "the newest is None"),
    ],
)
def test_a_commit_of_another_than_the_newest_epoch_is_seen(records: list[Record], says: str) -> None:
    found = "\n".join(one_epoch_at_a_time(records))
    assert says in found and bool(says) == bool(found)


def test_a_checkpoint_that_was_found_damaged_is_seen() -> None:
    records: list[Record] = [start(1, "a"), commit(2, "a", 1), start(3, "a", damaged=(2,))]
    assert list(nothing_was_damaged(records)) == ["record 3 (start) found damaged: (2,)"]


def test_the_lineage_follows_what_each_start_restored() -> None:
    records: list[Record] = [start(1, "a"), commit(2, "a", 1, 2), commit(3, "a", 1, 3), start(4, "b", restore_from=2)]
    assert lineage_of(records, commit(5, "b", 4, 5)) == [1, 1, 4, 4, 4]
    assert chain(1, 0, [1, 1, 4]) != chain(1, 0, [1, 4, 4]) != chain(2, 0, [1, 4, 4])


EXPECTED = whole(1, 2, [2, 2], 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("small/02.bin")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the large file": lambda at: flip(at / "rank-0/large.bin"),
    "a bit in a hole": lambda at: flip(at / "rank-0/sparse.bin"),
    "a file is gone": lambda at: (at / "rank-0/small/03.bin").unlink(),
    "a file too many": lambda at: (at / "rank-0/more").touch(),
    "a link leads elsewhere": lambda at: relink(at / "rank-0/inside"),
    "the empty folder is gone": lambda at: (at / "rank-0/empty-folder").rmdir(),
    "the empty file is longer": lambda at: (at / "rank-0/empty").write_text("x"),
    "a shared file of the other rank": lambda at: (at / "shared").write_text(f"rank 1 {chain(1, 1, [2, 2])}"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_to_a_checkpoint_is_seen(tmp_path: Path, name: str) -> None:
    write(EXPECTED, tmp_path)
    assert differences(tmp_path, EXPECTED) == []
    DAMAGE[name](tmp_path)
    assert len(differences(tmp_path, EXPECTED)) == 1


def test_checkpoints_of_other_epochs_seeds_and_ranks_have_no_byte_in_common() -> None:
    trees = [part(1, 0, [2, 2]), part(1, 0, [2, 3]), part(2, 0, [2, 2])]
    assert len({tree["rank-0/large.bin"] for tree in trees}) == len({tree["shared"] for tree in trees}) == 3
    assert EXPECTED["shared"] == trees[0]["shared"] != part(1, 1, [2, 2])["shared"]


def test_the_page_shows_what_went_wrong() -> None:
    kill = {"kind": "node", "moment": {"phase": "save", "when": "during"}}
    result = {
        "round": {"number": 7, "world_size": 2, "directory": False, "rough": True},
        "blows": [{"kill": kill, "at": "PUT x", "hit": True}],
        "wrong": ["commit 3 cannot be restored"],
        "epochs": 2,
        "commits": 5,
        "restored": 1,
        "seconds": 4.0,
    }
    about = {"date": "2026-01-01", "seed": 5, "store": "a server", "jobs": 1, "cores": 2}
    text = page([result], about)
    assert "**1 rounds, 1 went wrong, see below.**" in text and "- commit 3 cannot be restored" in text
    assert "none went wrong" in page([{**result, "wrong": []}], about)
