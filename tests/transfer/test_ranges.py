"""Every wanted byte lands where it belongs, whatever the ranges and however the stream is cut."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.errors import ChecksumMismatch, StoreError, StoreFull
from airflow_gpu_burst.transfer import Span, crc, ranges
from airflow_gpu_burst.transfer.ranges import NotWritten, Piece

SIZE = 4000
DATA = random.Random(0).randbytes(SIZE)


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[int, int]]:
    with tempfile.TemporaryFile() as a, tempfile.TemporaryFile() as b:
        yield a.fileno(), b.fileno()


def receive(piece: Piece, chance: random.Random) -> None:
    """The object's bytes, in views of any length; the last one goes beyond what is wanted."""
    while not piece.done:
        piece.take(memoryview(DATA)[piece.at : piece.at + chance.randrange(1, 700)])


wanted = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, 1500), st.booleans(), st.booleans(), st.booleans()), max_size=12
)


def spans_of(some: list[tuple[int, int, bool, bool, bool]], files: tuple[int, int]) -> list[Span]:
    """
    Ranges of the object: to the same offset of a file, or one after the other; with a known sum or without.
    """
    found, at = [], SIZE
    for start, length, second, same, known in some:
        length = min(length, SIZE - start)
        sum_ = crc.of_bytes(DATA[start : start + length]) if known else None
        found.append(Span(start, length, files[second], start if same else at, sum_))
        at += length
    return found


@settings(deadline=None)
@given(some=wanted, step=st.integers(1, 2000), gap=st.integers(0, 800), seed=st.integers(0, 99))
def test_bytes_and_sums(
    files: tuple[int, int], some: list[tuple[int, int, bool, bool, bool]], step: int, gap: int, seed: int
) -> None:
    for fd in files:
        os.ftruncate(fd, 0)
    spans, chance = spans_of(some, files), random.Random(seed)
    pieces = ranges.pieces(spans, step=step, gap=gap) if seed % 5 else ranges.whole(spans)
    for piece in chance.sample(pieces, len(pieces)):
        assert seed % 5 == 0 or piece.end - piece.start <= step
        receive(piece, chance)
    for span in spans:
        assert os.pread(span.fd, span.length, span.at) == DATA[span.start : span.start + span.length]
    assert ranges.wrong(spans, pieces) == []
    asked = sum(span.length for span in spans)
    assert seed % 5 == 0 or sum(piece.end - piece.start for piece in pieces) <= asked + gap * len(spans)
    damaged = [Span(s.start, s.length, s.fd, s.at, s.crc64nvme ^ 1) for s in spans if s.crc64nvme is not None]
    pieces = ranges.pieces(damaged, step=step, gap=gap)
    for piece in pieces:
        receive(piece, chance)
    assert ranges.wrong(damaged, pieces) == damaged


@settings(deadline=None)
@given(some=wanted, step=st.integers(1, 2000), gap=st.integers(0, 800))
def test_nothing_is_fetched_that_lies_far_from_what_is_wanted(
    some: list[tuple[int, int, bool, bool, bool]], step: int, gap: int
) -> None:
    spans = spans_of(some, (0, 1))
    for piece in ranges.pieces(spans, step=step, gap=gap):
        near = set(range(piece.start, piece.end))
        for span in spans:
            near -= set(range(span.start, span.start + span.length + gap))
        assert not near
        assert piece.start in {cut.start for cut in piece.cuts}
        assert piece.end in {cut.end for cut in piece.cuts}


def shape(spans: Sequence[Span]) -> list[tuple[int, int]]:
    return [(piece.start, piece.end) for piece in ranges.pieces(spans)]


def test_a_large_file_is_cut_and_small_neighbours_join() -> None:
    step = ranges.STEP
    assert shape([Span(0, 3 * step + 1, 0)]) == [
        (0, step),
        (step, 2 * step),
        (2 * step, 3 * step),
        (3 * step, 3 * step + 1),
    ]
    assert shape([Span(4096 * n, 4096, 0) for n in range(20_000)])[:2] == [(0, step), (step, 2 * step)]
    assert shape([Span(0, 10, 0), Span(10 + ranges.GAP, 10, 0), Span(21 + 2 * ranges.GAP, 10, 0)]) == [
        (0, 20 + ranges.GAP),
        (21 + 2 * ranges.GAP, 31 + 2 * ranges.GAP),
    ]
    assert shape([]) == shape([Span(5, 0, 0)]) == []


def test_neighbours_in_one_file_are_written_together() -> None:
    (piece,) = ranges.pieces([Span(4096 * n, 4096, 3, 4096 * n + 7) for n in range(256)])
    assert len(piece.runs) == 1 and len(piece.cuts) == 256


def test_an_empty_range_has_the_sum_of_nothing() -> None:
    assert ranges.wrong([Span(5, 0, 0, 0, 0)], []) == []
    assert len(ranges.wrong([Span(5, 0, 0, 0, 1)], [])) == 1


def test_a_full_disk_is_said() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        (piece,) = ranges.pieces([Span(0, 10, full)])
        with pytest.raises(NotWritten) as raised:
            piece.take(memoryview(DATA))
    finally:
        os.close(full)
    found = ranges.not_written(raised.value, "'a' in s3://b")
    assert isinstance(found, StoreFull) and "'a' in s3://b" in str(found)
    closed = NotWritten()
    closed.__cause__ = OSError(9, "Bad file descriptor")
    assert isinstance(ranges.not_written(closed, "x"), StoreError)


class TestVerified:
    SPANS = (Span(0, 10, 0, 0, 1), Span(10, 10, 0, 10, 2), Span(20, 10, 0, 20, None))

    def run(self, *sums: tuple[int, int]) -> list[list[Span]]:
        """What is fetched each time, when the first two spans come with these sums."""
        asked: list[list[Span]] = []
        counted: list[int] = []

        def fetch(wanted: Sequence[Span]) -> Sequence[Piece]:
            asked.append(list(wanted))
            pieces = ranges.pieces(wanted)
            for piece in pieces:
                for cut in piece.cuts:
                    cut.crc = sums[len(asked) - 1][cut.start // 10] if cut.start < 20 else 0
            return pieces

        ranges.verified("it", self.SPANS, fetch, counted.append)
        assert counted == [len(some) for some in asked[1:]]
        return asked

    def test_once_when_all_is_well(self) -> None:
        assert self.run((1, 2)) == [list(self.SPANS)]

    def test_only_the_wrong_ones_again(self) -> None:
        assert self.run((1, 9), (9, 2)) == [list(self.SPANS), [self.SPANS[1]]]

    def test_twice_wrong(self) -> None:
        with pytest.raises(ChecksumMismatch, match=r"it: bytes 0 to 10 \(and 1 more ranges\)"):
            self.run((9, 9), (9, 9))
