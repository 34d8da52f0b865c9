"""The cache of a node: each file fetched once, never half, never removed while it is read, never more than allowed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.transfer.cache import Ahead, Held, NodeCache, Wanted, half_of_free

FORK = multiprocessing.get_context("spawn")


def content(name: str, size: int) -> bytes:
    return (name.encode() * (size // max(len(name), 1) + 1))[:size]


class Source:
    """Where files come from."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.fetched: list[str] = []
        self.pause_s = pause_s

    def wanted(self, name: str, size: int = 100) -> Wanted:
        def fill(fd: int) -> None:
            self.fetched.append(name)
            data = content(name, size)
            os.pwrite(fd, data[: size // 2], 0)
            time.sleep(self.pause_s)
            os.pwrite(fd, data[size // 2 :], size // 2)

        return Wanted(name, size, fill)


def taken(found: Held | None) -> Held:
    assert found is not None
    return found


def held(root: Path) -> int:
    return sum(path.stat().st_size for path in root.iterdir())


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    source, cache = Source(), NodeCache(tmp_path / "a" / "cache", 1000)
    for _ in range(3):
        found = taken(cache.take(source.wanted("x")))
        assert found.path.read_bytes() == content("x", 100)
        found.close()
        found.close()
    again = taken(NodeCache(tmp_path / "a" / "cache", 1000).take(source.wanted("x")))
    again.close()
    assert source.fetched == ["x"]


def test_another_size_is_another_file(tmp_path: Path) -> None:
    source, cache = Source(), NodeCache(tmp_path, 1000)
    for size in (0, 1, 100, 101):
        found = taken(cache.take(source.wanted("x", size)))
        assert found.path.read_bytes() == content("x", size)
        found.close()
    assert len(source.fetched) == 4


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    source, cache = Source(), NodeCache(tmp_path, 300)
    for name in ("a", "b", "c", "a", "d"):
        taken(cache.take(source.wanted(name))).close()
        time.sleep(0.02)
    assert held(tmp_path) == 300
    source.fetched.clear()
    for name in ("a", "c", "d"):
        taken(cache.take(source.wanted(name))).close()
    assert source.fetched == []


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    source, cache = Source(), NodeCache(tmp_path, 200)
    first, second = taken(cache.take(source.wanted("a"))), taken(cache.take(source.wanted("b")))
    assert cache.take(source.wanted("c")) is None
    assert first.path.read_bytes() == content("a", 100)
    again = taken(cache.take(source.wanted("a")))
    first.close()
    assert cache.take(source.wanted("c")) is None  # `a` is in use by another
    again.close()
    taken(cache.take(source.wanted("c"))).close()
    assert not first.path.exists() and second.path.exists()
    second.close()
    assert held(tmp_path) <= 200


def test_larger_than_the_cache(tmp_path: Path) -> None:
    source, cache = Source(), NodeCache(tmp_path, 200)
    taken(cache.take(source.wanted("a"))).close()
    assert cache.take(source.wanted("x", 201)) is None
    assert source.fetched == ["a"]
    assert held(tmp_path) in (0, 100)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 1000)

    def broken(fd: int) -> None:
        os.write(fd, b"half")
        raise KeyError("no")

    with pytest.raises(KeyError):
        cache.take(Wanted("x", 100, broken))
    with pytest.raises(OSError, match="200 bytes"):
        cache.take(Wanted("x", 100, lambda fd: os.ftruncate(fd, 200)))
    assert held(tmp_path) == 0
    taken(cache.take(Source().wanted("x"))).close()


def test_many_threads_want_the_same(tmp_path: Path) -> None:
    source, cache = Source(pause_s=0.1), NodeCache(tmp_path, 1000)
    errors: list[str] = []

    def work() -> None:
        found = taken(cache.take(source.wanted("x")))
        if found.path.read_bytes() != content("x", 100):
            errors.append("half")
        found.close()

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (source.fetched, errors) == (["x"], [])


def _one(root: Path, log: Path, seed: int, limit: int) -> None:
    """A process that uses files of a cache; says what it fetched; exits with 1 if one is wrong."""
    import random

    chance, source = random.Random(seed), Source(pause_s=0.001)
    cache = NodeCache(root, limit)
    for _ in range(60):
        name = chance.choice("abcdefgh")
        found = cache.take(source.wanted(name))
        if found is None:
            continue
        time.sleep(chance.random() * 0.003)
        if found.path.read_bytes() != content(name, 100):
            os._exit(1)
        found.close()
    log.write_text("".join(source.fetched))


@pytest.mark.parametrize("limit", [300, 10_000])
def test_many_processes(tmp_path: Path, limit: int) -> None:
    """With room for all, each is fetched once on the node; with too little, still nothing is wrong."""
    root = tmp_path / "cache"
    processes = [FORK.Process(target=_one, args=(root, tmp_path / f"log{n}", n, limit)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    fetched = "".join((tmp_path / f"log{n}").read_text() for n in range(4))
    if limit == 10_000:
        assert sorted(fetched) == list("abcdefgh")
    assert held(root) <= limit


def _hang(root: Path, ready: Path) -> None:
    def fill(fd: int) -> None:
        os.pwrite(fd, b"half", 0)
        ready.touch()
        time.sleep(60)

    NodeCache(root, 1000).take(Wanted("x", 100, fill))


@pytest.mark.parametrize("sweep", [True, False])
def test_a_kill_half_way(tmp_path: Path, sweep: bool) -> None:
    root, ready = tmp_path / "cache", tmp_path / "ready"
    before = NodeCache(root, 1000)
    process = FORK.Process(target=_hang, args=(root, ready))
    process.start()
    while not ready.exists():
        time.sleep(0.01)
    NodeCache(root, 1000)  # sweeps nothing that somebody is at
    assert held(root) == 100
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if sweep:
        NodeCache(root, 1000)
        assert held(root) == 0
    found = taken(before.take(Source().wanted("x")))
    assert found.path.read_bytes() == content("x", 100)
    found.close()


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    uses=st.lists(st.integers(0, 7), max_size=30),
    limit=st.integers(0, 150),
)
def test_never_more_than_allowed(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], uses: list[int], limit: int
) -> None:
    root, source = tmp_path_factory.mktemp("cache"), Source()
    cache = NodeCache(root, limit)
    for use in uses:
        index = use % len(sizes)
        found = cache.take(source.wanted(f"f{index}", sizes[index]))
        assert (found is None) == (sizes[index] > limit)
        if found:
            assert found.path.read_bytes() == content(f"f{index}", sizes[index])
            found.close()
        assert held(root) <= limit


class TestAhead:
    def test_the_next_ones_come_while_one_is_used(self, tmp_path: Path) -> None:
        source = Source()
        ahead = Ahead(NodeCache(tmp_path, 10_000), [source.wanted(str(n)) for n in range(10)], depth=2)
        first = taken(ahead.take(0))
        _until(lambda: len(source.fetched) == 3)
        time.sleep(0.05)
        assert sorted(source.fetched) == ["0", "1", "2"]
        first.close()
        for number in range(1, 10):
            found = taken(ahead.take(number))
            assert found.path.read_bytes() == content(str(number), 100)
            found.close()
        assert sorted(source.fetched) == [str(n) for n in range(10)]
        ahead.close()

    def test_what_was_fetched_ahead_is_not_removed_before_its_use(self, tmp_path: Path) -> None:
        source, cache = Source(), NodeCache(tmp_path, 300)
        ahead = Ahead(cache, [source.wanted(str(n)) for n in range(3)], depth=2)
        taken(ahead.take(0)).close()
        _until(lambda: len(source.fetched) == 3)
        time.sleep(0.05)
        for name in "abc":
            if found := cache.take(source.wanted(name)):
                found.close()
        source.fetched.clear()
        for number in (1, 2):
            taken(ahead.take(number)).close()
        assert source.fetched == []
        ahead.close()

    def test_with_room_for_one_only(self, tmp_path: Path) -> None:
        source = Source()
        ahead = Ahead(NodeCache(tmp_path, 100), [source.wanted(str(n)) for n in range(6)], depth=2)
        for number in range(6):
            found = ahead.take(number)
            if found:
                assert found.path.read_bytes() == content(str(number), 100)
                found.close()
        ahead.close()
        assert held(tmp_path) <= 100

    def test_a_failure_is_told_at_its_file(self, tmp_path: Path) -> None:
        source = Source()

        def broken(fd: int) -> None:
            raise KeyError("no")

        files = [source.wanted("0"), Wanted("1", 5, broken), source.wanted("2")]
        ahead = Ahead(NodeCache(tmp_path, 1000), files)
        taken(ahead.take(0)).close()
        with pytest.raises(KeyError):
            ahead.take(1)
        taken(ahead.take(2)).close()
        ahead.close()

    def test_closed_it_holds_nothing(self, tmp_path: Path) -> None:
        source, cache = Source(), NodeCache(tmp_path, 300)
        ahead = Ahead(cache, [source.wanted(str(n)) for n in range(3)])
        taken(ahead.take(0)).close()
        ahead.close()
        for name in "abc":
            taken(cache.take(source.wanted(name))).close()


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_half_of_free(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    with (tmp_path / "file").open("rb"):
        free = os.statvfs(tmp_path)
    assert half_of_free(tmp_path) == pytest.approx((free.f_bavail * free.f_frsize + (1 << 20)) / 2, rel=0.05)
