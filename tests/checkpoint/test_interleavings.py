"""Collecting garbage beside a save, a restore and a successor, in any order of requests: no live commit is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.checkpoint import restore, save
from airflow_gpu_burst.checkpoint.collecting import delete_fenced, delete_retired
from airflow_gpu_burst.checkpoint.retention import staying
from airflow_gpu_burst.errors import Fenced, Renamed
from airflow_gpu_burst.runlog import Commit, Epoch, Member, RunLog, begin, open_generation
from airflow_gpu_burst.spec import Checkpointing
from airflow_gpu_burst.store import Entry, Store, StoreConfig, open_store
from airflow_gpu_burst.transfer import Mover, open_mover
from tests.checkpoint.trees import Watched

PREFIX = "runs/d/t/r-0123"
SETTLE_S = 0.002
"""For a request that was let go to have led to the next one."""


class Turns:
    """Requests wait here until it is their turn; which comes next is drawn."""

    def __init__(self, draws: list[int]) -> None:
        self._draws = iter(draws)
        self._waiting: list[tuple[str, threading.Event]] = []
        self._news = threading.Condition()
        self._live = 0

    def wait(self, what: str) -> None:
        """One request."""
        turn = threading.Event()
        with self._news:
            self._waiting.append((what, turn))
            self._news.notify_all()
        assert turn.wait(30), f"{what}: its turn never came"

    def run(self, actors: list[Callable[[], None]]) -> None:
        """All actors to their end; raises what one of them raised."""
        errors: list[BaseException] = []

        def act(actor: Callable[[], None]) -> None:
            try:
                actor()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._news:
                    self._live -= 1
                    self._news.notify_all()

        self._live = len(actors)
        threads = [threading.Thread(target=act, args=(actor,)) for actor in actors]
        for thread in threads:
            thread.start()
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or not self._live, 30)
                if not self._live and not self._waiting:
                    break
                while self._news.wait(SETTLE_S):  # more may be coming
                    pass
                if self._waiting:
                    ready = sorted(self._waiting, key=lambda item: item[0])
                    chosen = ready[next(self._draws, 0) % len(ready)]
                    self._waiting.remove(chosen)
                    chosen[1].set()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class Slow:
    """A store whose every request waits for its turn."""

    def __init__(self, store: Store, turns: Turns, who: str) -> None:
        self._store, self._turns, self._who = store, turns, who

    @property
    def uri(self) -> str:
        return self._store.uri

    def get(self, key: str) -> bytes:
        self._turns.wait(f"{self._who} get {key}")
        return self._store.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._turns.wait(f"{self._who} put {key}")
        self._store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._turns.wait(f"{self._who} create {key}")
        self._store.create(key, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._turns.wait(f"{self._who} list {prefix}")
        return iter(list(self._store.list(prefix)))

    def delete(self, key: str) -> None:
        self._turns.wait(f"{self._who} delete {key}")
        self._store.delete(key)


class Scene:
    """A run that has committed in two epochs, and whoever acts on it now."""

    def __init__(self, base: Path, turns: Turns) -> None:
        self.base, self.turns = base, turns
        config = StoreConfig(uri=f"file://{base}/store")
        self.store, self.mover = open_store(config), open_mover(config)
        self.saved: dict[str, bytes] = {}
        open_generation(RunLog(self.store, PREFIX), 1, spec_digest="d", max_tries=1, try_number=1)
        first = self.start(self.store, "one")
        for step in (1, 2, 3):
            self.checkpoint(first, step, self.mover)
        self.tree(first, "stray", self.mover)

    def start(self, store: object, owner: str) -> Epoch:
        log = RunLog(store, PREFIX)  # type: ignore[arg-type]
        member = Member(owner=owner, rank=0, pod_uid=f"pod-{owner}")
        return begin(log, generation=1, member=member, world_size=1, deadline_s=10, sleep=lambda _s: None)

    def tree(self, epoch: Epoch, name: str, mover: Mover) -> tuple[str, str]:
        folder = self.base / f"{epoch.number}-{name}"
        folder.mkdir()
        data = f"{name} of {epoch.number}".encode() * 10
        (folder / "weights").write_bytes(data)
        manifest = save(mover, folder, f"{epoch.data_prefix}/{name}")
        self.saved[manifest.key] = data
        return manifest.key, manifest.sha256

    def checkpoint(self, epoch: Epoch, step: int, mover: Mover) -> None:
        key, sha256 = self.tree(epoch, f"step-{step}", mover)
        epoch.commit(step, {key: sha256})

    def comes_back(self, commit: Commit, mover: Mover, who: str) -> None:
        target = self.base / f"{who}-{commit.seq}"
        restore(mover, list(commit.manifests.items()), target)
        (key,) = commit.manifests
        assert (target / "weights").read_bytes() == self.saved[key]

    def as_(self, who: str) -> tuple[Store, Mover]:
        slow = Slow(self.store, self.turns, who)
        return slow, Watched(self.mover, lambda verb, key: self.turns.wait(f"{who} {verb} {key}"))  # type: ignore[return-value]


def collect(scene: Scene, epoch: Epoch) -> None:
    store, mover = scene.as_("collector")
    policy = Checkpointing()
    history = RunLog(store, PREFIX).read()
    restored = epoch.restore_from.seq if epoch.restore_from else None
    keep = staying(history.restorable(1), policy, damaged=history.damaged, restore_from=restored)
    delete_retired(store, mover, epoch.retire(policy.keep, keep))
    delete_fenced(store, mover, history, PREFIX, generation=1, epoch=epoch.number)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(draws=st.lists(st.integers(0, 5), max_size=120), successor=st.booleans())
def test_no_live_commit_is_ever_lost(
    tmp_path_factory: pytest.TempPathFactory, draws: list[int], successor: bool
) -> None:
    turns = Turns(draws)
    scene = Scene(tmp_path_factory.mktemp("scene"), turns)
    slow, mover = scene.as_("present")
    waits: list[Epoch] = []
    turns.run([lambda: waits.append(scene.start(slow, "two"))])
    (epoch,) = waits

    def present() -> None:
        try:
            scene.checkpoint(epoch, 4, mover)
            scene.checkpoint(epoch, 5, mover)
        except (Fenced, Renamed):
            assert successor

    def collector() -> None:
        try:
            collect(scene, epoch)
            collect(scene, epoch)
        except (Fenced, Renamed):
            assert successor

    def restorer() -> None:
        commit = epoch.restore_from
        assert commit is not None and commit.step == 3
        scene.comes_back(commit, scene.as_("restorer")[1], "restorer")

    def heir() -> None:
        store, heirs = scene.as_("heir")
        after = scene.start(store, "three")
        assert after.restore_from is not None
        scene.comes_back(after.restore_from, heirs, "heir")
        scene.checkpoint(after, 6, heirs)

    turns.run([present, collector, restorer, *([heir] if successor else [])])
    history = RunLog(scene.store, PREFIX).read()
    assert len(history.live) >= 2
    for commit in history.live:
        scene.comes_back(commit, scene.mover, "judge")
    scene.mover.close()
