"""Live lines and the spool together: every line once, in order, wherever the live source begins, breaks or is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst import contract
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.routes import Piece
from airflow_gpu_burst.routes.pod_logs import Stamps
from airflow_gpu_burst.runs.output import OutputReader, ranks_wanted
from airflow_gpu_burst.runtime.output import chunk_key, stream_prefix
from airflow_gpu_burst.store.directory import DirectoryStore

STREAM = "20260101T000000-00000-aaaaaaaa"
OTHER = "20260101T000001-00001-bbbbbbbb"


class World:
    """A store with a spool, and a reader."""

    def __init__(self, path: Path, **reader: object) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.store = DirectoryStore(str(path))
        self.options = reader
        self.reader = OutputReader(self.store, "p", 1, **reader)  # type: ignore[arg-type]

    def spool(self, data: bytes, *sizes: int, stream: str = STREAM) -> None:
        offset = 0
        for size in [*sizes, len(data)]:
            if piece := data[offset : offset + size]:
                self.store.put(chunk_key(f"{stream_prefix('p', 1)}{stream}", offset), piece)
                offset += len(piece)

    def live(self, data: bytes, source: str = "pod/trainer/0", ended: bool = False, rank: int = 0) -> list[str]:
        return self.reader.feed(Piece(source=source, pod="pod", rank=rank, data=data, ended=ended))

    def rest(self) -> list[str]:
        lines: list[str] = []
        while True:
            lines += self.reader.read(ended=True)
            if self.reader.exhausted:
                return lines

    def successor(self) -> None:
        """Another triggerer takes over."""
        self.reader = OutputReader(self.store, "p", 1, self.reader.cursor, **self.options)  # type: ignore[arg-type]


def text(count: int, rank: int = 0, stream: str = STREAM, world: int = 1) -> bytes:
    return contract.header(stream, rank, world) + b"".join(b"line %d\n" % number for number in range(count))


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[-1]) for line in lines]


@settings(max_examples=120, deadline=None)
@given(
    count=st.integers(0, 30),
    cuts=st.lists(st.integers(1, 60), max_size=8),
    chunks=st.lists(st.integers(1, 60), max_size=8),
    breaks=st.integers(0, 400),
    takes_over=st.booleans(),
    before=st.sampled_from([b"", b"a warning\n", b"two\nwarnings\n"]),
)
def test_each_line_once_whatever_breaks(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    cuts: list[int],
    chunks: list[int],
    breaks: int,
    takes_over: bool,
    before: bytes,
) -> None:
    world = World(tmp_path_factory.mktemp("w"))
    data = text(count)
    seen, offset = (before + data)[:breaks], 0
    lines: list[str] = []
    for size in [*cuts, len(seen)]:
        lines += world.live(seen[offset : offset + size])
        offset += size
    whole = breaks >= len(before) + len(contract.header(STREAM, 0, 1))
    lines += world.live(b"", ended=True)
    if takes_over:
        world.successor()
    world.spool(data, *chunks)
    lines += world.rest()
    extra = before.decode().splitlines() if whole else [line for line in lines if not line.startswith("line ")]
    assert lines == [*extra, *(f"line {number}" for number in range(count))]


def test_a_source_that_begins_again_prints_nothing_twice(tmp_path: Path) -> None:
    world = World(tmp_path)
    data = text(10)
    lines = world.live(data[:70])
    world.successor()
    lines += world.live(data, source="pod/trainer/0")
    assert numbers(lines) == list(range(10))


def test_a_rotated_log_is_left_to_the_spool(tmp_path: Path) -> None:
    world = World(tmp_path)
    tail = b"x" * 70 + b"\n"
    lines = [line for _ in range(1000) for line in world.live(tail)]
    world.spool(text(5))
    assert lines == [] and numbers(world.rest()) == list(range(5))


def test_what_a_container_says_before_it_dies_without_a_stream_is_printed(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.live(b"exec: gpu-burst: not found\n") == []
    assert world.live(b"", ended=True) == ["exec: gpu-burst: not found"]


def test_ranks_are_labelled_and_chosen(tmp_path: Path) -> None:
    world = World(tmp_path, labelled=True, wanted=ranks_wanted("1"))
    assert world.live(text(2, world=2), source="a") == []
    assert world.live(text(2, rank=1, stream=OTHER, world=2), source="b", rank=1) == ["[1] line 0", "[1] line 1"]
    world.spool(text(9, world=2))
    world.spool(text(3, rank=1, stream=OTHER, world=2), stream=OTHER)
    assert world.rest() == ["[1] line 2"]


def test_without_a_spool_lines_come_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, spooled=False)
    assert world.live(b"one\ntw") == ["one"]
    assert world.live(b"o\n") == ["two"]
    assert world.live(b"thr", ended=False) == []
    assert world.live(b"", ended=True) == ["thr"]
    assert world.rest() == []


def test_a_new_stream_is_found_while_the_run_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.spool(text(2))
    assert numbers(world.reader.read()) == [0, 1]
    world.spool(text(1, rank=0, stream="20260101T000009-00000-cccccccc"), stream="20260101T000009-00000-cccccccc")
    assert world.reader.read() == []
    assert numbers(world.reader.read(find=True)) == [0]


@pytest.mark.parametrize(
    ("logs", "chosen"),
    [("all", [0, 1, 2, 3]), ("none", []), ("rank0", [0]), ("0,2-3", [0, 2, 3]), ("1", [1])],
)
def test_ranks_wanted(logs: str, chosen: list[int]) -> None:
    assert [rank for rank in range(4) if ranks_wanted(logs)(rank)] == chosen


@pytest.mark.parametrize("logs", ["some", "", "1-", "rank", "-1", "a=b"])
def test_ranks_wanted_says_what_is_right(logs: str) -> None:
    with pytest.raises(SpecError, match="rank0"):
        ranks_wanted(logs)


def stamped(lines: list[str], second: int = 0) -> bytes:
    """As a kubelet gives them: several lines may carry the same stamp."""
    return b"".join(f"2026-01-01T00:00:{second + n // 3:02d}.5Z {line}\n".encode() for n, line in enumerate(lines))


@given(
    lines=st.lists(
        st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30), max_size=20
    ),
    cuts=st.lists(st.integers(1, 80), max_size=10),
)
def test_stamps_are_taken_off_wherever_the_pieces_are_cut(lines: list[str], cuts: list[int]) -> None:
    data, stamps, offset, found = stamped(lines), Stamps(), 0, b""
    for size in [*cuts, len(data)]:
        found += stamps.strip(data[offset : offset + size])
        offset += size
    assert found + stamps.rest() == "".join(f"{line}\n" for line in lines).encode()


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4))
def test_a_stream_taken_up_again_repeats_and_loses_nothing(count: int, breaks: list[int]) -> None:
    lines = [f"line {number}" for number in range(count)]
    stamps, found = Stamps(), b""
    for broke_after in [*breaks, count]:
        # The server gives whole seconds: everything from the second of the last line on comes again.
        given = stamped(lines[: max(broke_after, found.count(b"\n"))])
        second = stamps.last[:19].encode()
        stamps = Stamps(stamps.last, stamps.count)
        found += stamps.strip(b"".join(f + b"\n" for f in given.split(b"\n")[:-1] if f[:19] >= second))
    assert found == "".join(f"{line}\n" for line in lines).encode()


def test_a_line_without_end_goes_on_and_is_not_held_back() -> None:
    stamps = Stamps()
    found = stamps.strip(b"2026-01-01T00:00:00Z " + b"x" * 40000)
    assert len(found) == 40000
    assert stamps.strip(b"yy\n2026-01-01T00:00:01Z next\n") == b"yy\nnext\n"
