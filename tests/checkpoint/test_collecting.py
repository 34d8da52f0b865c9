"""What nobody will restore goes; what is not certain stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import Manifest, restore, save, save_bytes
from airflow_gpu_burst.checkpoint.collecting import delete_fenced, delete_retired, delete_trees, fenced
from airflow_gpu_burst.contract import Artifact, PodResult
from airflow_gpu_burst.errors import Fenced, StoreUnavailable
from airflow_gpu_burst.runlog import Epoch, Member, RunLog, begin, close_generation, open_generation
from airflow_gpu_burst.store import Entry, Store
from airflow_gpu_burst.transfer import Mover
from tests.checkpoint.trees import LARGE, Cut, Watched, content, dies_after, seen

PREFIX = "runs/d/t/r-0123"


class Run:
    """One run of one rank, epoch after epoch."""

    def __init__(self, store: Store, mover: Mover, tmp_path: Path) -> None:
        self.store, self.mover, self.tmp_path = store, mover, tmp_path
        self.log = RunLog(store, PREFIX)
        open_generation(self.log, 1, spec_digest="d", max_tries=1, try_number=1)
        self.saved = 0

    def start(self, owner: str) -> Epoch:
        member = Member(owner=owner, rank=0, pod_uid=f"pod-{owner}")
        return begin(self.log, generation=1, member=member, world_size=1, deadline_s=10)

    def tree(self, epoch: Epoch, name: str) -> Manifest:
        """A tree with its own content, saved and not committed."""
        self.saved += 1
        folder = self.tmp_path / f"{name}-{self.saved}"
        folder.mkdir()
        (folder / "large").write_bytes(content(name, LARGE))
        (folder / "small").write_bytes(content(name, 100))
        return save(self.mover, folder, f"{epoch.data_prefix}/{folder.name}")

    def commit(self, epoch: Epoch, step: int) -> Manifest:
        manifest = self.tree(epoch, f"step-{step}")
        epoch.commit(step, {manifest.key: manifest.sha256})
        return manifest

    def objects(self) -> set[str]:
        return {entry.key for entry in self.store.list(f"{PREFIX}/data/")}

    def comes_back(self, manifest: Manifest) -> bool:
        target = self.tmp_path / f"back-{len(list(self.tmp_path.iterdir()))}"
        restore(self.mover, [(manifest.key, manifest.sha256)], target)
        return {"large", "small"} <= set(seen(target))


@pytest.fixture
def run(store: Store, mover: Mover, tmp_path: Path) -> Run:
    return Run(store, mover, tmp_path)


def test_retired_commits_go_and_others_stay(run: Run) -> None:
    epoch = run.start("one")
    manifests = [run.commit(epoch, step) for step in range(4)]
    (retired, other) = epoch.retire(keep=2)
    before = run.objects()
    watched = Watched(run.mover)
    garbage = delete_retired(run.store, watched, [retired, other])
    assert len(before - run.objects()) == 6  # large, small, manifest
    assert set(garbage.keys) == before - run.objects()
    assert watched.keys("delete")[-1] == next(iter(other.manifests))  # a manifest last
    assert all(run.comes_back(manifest) for manifest in manifests[2:])
    assert delete_retired(run.store, run.mover, [retired, other]).keys == []  # somebody else did it


def test_a_deletion_that_was_killed_is_brought_to_its_end(run: Run) -> None:
    epoch = run.start("one")
    manifest = run.tree(epoch, "dropped")
    with pytest.raises(Cut):
        delete_trees(run.store, Watched(run.mover, dies_after(1)), [(manifest.key, manifest.sha256)])
    assert run.objects() == {manifest.key}
    delete_trees(run.store, run.mover, [(manifest.key, manifest.sha256)])
    assert run.objects() == set()


def test_a_manifest_that_cannot_be_read_deletes_nothing_and_is_said(run: Run) -> None:
    epoch = run.start("one")
    manifest = run.tree(epoch, "dropped")
    run.store.put(manifest.key, b"other bytes")
    before = run.objects()
    garbage = delete_trees(run.store, run.mover, [(manifest.key, manifest.sha256)])
    assert (run.objects(), garbage.keys, len(garbage.left)) == (before, [], 1)


def delete(run: Run, epoch: Epoch, store: Store | None = None, mover: Mover | None = None) -> set[str]:
    before = run.objects()
    delete_fenced(store or run.store, mover or run.mover, run.log.read(), PREFIX, generation=1, epoch=epoch.number)
    return before - run.objects()


def test_what_fenced_epochs_left_goes_but_for_what_the_log_names(run: Run) -> None:
    first = run.start("one")
    old = run.commit(first, 1)
    dropped = run.tree(first, "never-committed")
    run.store.put(f"{first.data_prefix}/half/data/0", b"half of a save")
    run.store.put(f"{PREFIX}/data/notes.txt", b"not ours")
    run.store.put(f"{PREFIX}/database/x", b"not ours")
    run.store.put(f"{PREFIX}/output/g1/x", b"the spool")
    second = run.start("two")
    new = run.commit(second, 2)
    mine = run.tree(second, "on-its-way")
    kept_before = {entry.key for entry in run.store.list(f"{PREFIX}/")}
    gone = delete(run, second)
    assert dropped.key in gone
    assert f"{first.data_prefix}/half/data/0" in gone
    assert all(key.startswith(f"{PREFIX}/data/{first.number:012d}/") for key in gone)
    assert len(gone) == 4
    assert {entry.key for entry in run.store.list(f"{PREFIX}/")} == kept_before - gone
    assert run.comes_back(old) and run.comes_back(new) and run.comes_back(mine)
    assert delete(run, second) == set()


def test_results_and_models_stay(run: Run) -> None:
    first = run.start("one")
    result = save_bytes(run.store, b"{}", f"{first.data_prefix}/result", "result.json")
    model = run.tree(first, "model")
    artifacts = [Artifact(key=saved.key, sha256=saved.sha256) for saved in (result, model)]
    said = PodResult(seconds=1.0, result=artifacts[0], model=artifacts[1], model_name="m", model_version="v")
    stray = run.tree(first, "stray")
    first.finish(said.to_dict(), (model.key, model.sha256))
    close_generation(run.log, 1, "succeeded")
    garbage = fenced(run.store, run.log.read(), PREFIX, before=1 << 40)
    assert len(garbage.keys) == 3 and stray.key in garbage.keys
    run.mover.delete(garbage.keys)
    assert run.comes_back(model)
    assert run.store.get(f"{first.data_prefix}/result/data/result.json") == b"{}"


def test_who_is_not_the_present_epoch_deletes_nothing(run: Run) -> None:
    first = run.start("one")
    run.tree(first, "stray")
    second = run.start("two")
    run.start("three")
    before = run.objects()
    with pytest.raises(Fenced):
        delete(run, second)
    assert run.objects() == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda store, manifest: store.put(manifest.key, b"other bytes"),
        lambda store, manifest: store.delete(manifest.key),
    ],
    ids=["changed", "lost"],
)
def test_an_epoch_with_an_unreadable_manifest_is_left_alone(run: Run, spoil: Callable[[Store, Manifest], None]) -> None:
    first = run.start("one")
    committed = run.commit(first, 1)
    run.tree(first, "stray")
    second = run.start("two")
    run.tree(second, "stray too")
    third = run.start("three")
    spoil(run.store, committed)
    gone = delete(run, third)
    assert gone and all(key.startswith(f"{PREFIX}/data/{second.number:012d}/") for key in gone)
    assert len(fenced(run.store, run.log.read(), PREFIX, before=third.number).left) == 1


class Listing:
    """A store whose listing is not what it should be."""

    def __init__(self, store: Store, listing: Callable[[Iterator[Entry]], Iterator[Entry]]) -> None:
        self._store, self._listing = store, listing

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._listing(self._store.list(prefix))


def breaks_off(entries: Iterator[Entry]) -> Iterator[Entry]:
    yield next(entries)
    raise StoreUnavailable("503. Try again")


def test_a_listing_that_is_empty_or_breaks_off_deletes_nothing(run: Run) -> None:
    first = run.start("one")
    run.tree(first, "stray")
    second = run.start("two")
    before = run.objects()
    assert delete(run, second, Listing(run.store, lambda _: iter(()))) == set()  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        delete(run, second, Listing(run.store, breaks_off))  # type: ignore[arg-type]
    assert run.objects() == before


def test_a_listing_that_is_late_deletes_only_what_it_shows(run: Run) -> None:
    first = run.start("one")
    committed, stray = run.commit(first, 1), run.tree(first, "stray")
    second = run.start("two")
    late = Listing(run.store, lambda entries: (entry for entry in entries if entry.key != stray.key))
    gone = delete(run, second, late)  # type: ignore[arg-type]
    assert stray.key not in gone and len(gone) == 2
    assert run.comes_back(committed)


def test_uploads_that_were_left_half_way_are_given_up(run: Run) -> None:
    first = run.start("one")
    key = f"{first.data_prefix}/half/data/0"
    run.store.put(f"{key}.upload", json.dumps({"upload_id": "of nobody"}).encode())
    second = run.start("two")
    watched = Watched(run.mover)
    delete(run, second, mover=watched)
    assert watched.keys("abandon") == [key]
    assert f"{key}.upload" not in run.objects()
