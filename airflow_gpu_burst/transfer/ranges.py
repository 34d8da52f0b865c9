"""Which requests bring the wanted ranges of an object, and where each byte belongs: pure, but for writing to files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from airflow_gpu_burst.errors import ChecksumMismatch, StoreError
from airflow_gpu_burst.store import files
from airflow_gpu_burst.transfer import crc
from airflow_gpu_burst.transfer.interface import MIB, Span

STEP = 32 * MIB
"""Bytes of one request: enough that its start costs nothing, few enough to share a large file among eight."""
GAP = 128 << 10
"""Bytes between two ranges that are fetched and dropped: 1 ms at 100 MB/s, and another request takes as long."""


class NotWritten(Exception):
    """A file of this node did not take the bytes; the cause says why."""


@dataclass(slots=True)
class Cut:
    """
    What a piece holds of a span.

    :param number: of the span.
    :param known: its CRC is known, so that one is computed.
    :param crc: of the bytes that came so far.
    """

    number: int
    start: int
    end: int
    known: bool
    crc: int = 0


@dataclass(slots=True)
class Run:
    """
    Bytes that belong to one place of one file.

    :param shift: from offset in the object to offset in the file.
    """

    start: int
    end: int
    fd: int
    shift: int


@dataclass(slots=True)
class Piece:
    """
    Bytes of an object that are fetched one after the other.

    :param at: how far it has come.
    """

    start: int
    end: int
    cuts: list[Cut]
    runs: list[Run]
    at: int = field(init=False)
    _cut: int = field(init=False, default=0)
    _run: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.at = self.start

    @property
    def done(self) -> bool:
        """All of it has come."""
        return self.at >= self.end

    def take(self, view: memoryview) -> None:
        """
        The bytes from `at` on; what lies beyond the end is dropped.

        :raises NotWritten: a file did not take them.
        """
        view = view[: self.end - self.at]
        at, end = self.at, self.at + len(view)
        self._cut = _skipped(self.cuts, self._cut, at)
        for cut in _touched(self.cuts, self._cut, at, end):
            if cut.known:
                cut.crc = crc.of_bytes(view[max(cut.start - at, 0) : cut.end - at], cut.crc)
        self._run = _skipped(self.runs, self._run, at)
        for run in _touched(self.runs, self._run, at, end):
            first = max(run.start, at)
            _write(run.fd, view[first - at : run.end - at], first + run.shift)
        self.at = end


def pieces(spans: Sequence[Span], *, step: int = STEP, gap: int = GAP) -> list[Piece]:
    """Spans as pieces of at most `step` bytes: large ones are cut, neighbours up to `gap` apart join."""
    found: list[Piece] = []
    joined: list[tuple[Cut, Span]] = []
    start = end = 0
    for cut, span in _sorted(spans, step):
        if joined and (cut.start > end + gap or max(end, cut.end) - start > step):
            found.append(_piece(joined))
            joined = []
        start, end = (start, max(end, cut.end)) if joined else (cut.start, cut.end)
        joined.append((cut, span))
    return [*found, _piece(joined)] if joined else found


def whole(spans: Sequence[Span]) -> list[Piece]:
    """All of them as one piece, whatever lies between."""
    cuts = _sorted(spans, 1 << 62)
    return [_piece(cuts)] if cuts else []


def wrong(spans: Sequence[Span], came: Sequence[Piece]) -> list[Span]:
    """Those whose bytes are not what they should be."""
    sums: dict[int, list[tuple[int, int]]] = {}
    for piece in came:  # in the order of their bytes
        for cut in piece.cuts:
            sums.setdefault(cut.number, []).append((cut.crc, cut.end - cut.start))
    return [
        span
        for number, span in enumerate(spans)
        if span.crc64nvme is not None and crc.joined(sums.get(number, [])) != span.crc64nvme
    ]


def verified(
    what: str, spans: Sequence[Span], fetch: Callable[[Sequence[Span]], Sequence[Piece]], again: Callable[[int], object]
) -> None:
    """
    Fetch spans, and once more those that came damaged.

    :param what: the object, as errors name it.
    :param fetch: brings all bytes of the spans it is given.
    :param again: told how many come a second time.
    :raises ChecksumMismatch: they are damaged again.
    """
    left = wrong(spans, fetch(spans))
    if not left:
        return
    again(len(left))
    left = wrong(left, fetch(left))
    if left:
        first = left[0]
        others = f" (and {len(left) - 1} more ranges)" if len(left) > 1 else ""
        raise ChecksumMismatch(
            f"{what}: bytes {first.start} to {first.start + first.length}{others} are not those that were stored: "
            "their CRC64NVME is another, twice. Use an older object; look at the store's disks, and at the way to them"
        )


def too_short(what: str, size: int, wanted: int) -> ChecksumMismatch:
    """The error about an object that ends before what is wanted of it does."""
    return ChecksumMismatch(
        f"{what} ends at byte {size}, and was to have at least {wanted}. Use an older object; see what writes there"
    )


def not_written(error: NotWritten, what: str) -> StoreError:
    """The error about a file of this node that did not take what `what` holds."""
    cause = error.__cause__
    assert isinstance(cause, OSError)
    return files.local_error(cause, f"write what {what} holds", "choose another folder on this node")


def _sorted(spans: Sequence[Span], step: int) -> list[tuple[Cut, Span]]:
    cuts = [
        (Cut(number, start, min(start + step, span.start + span.length), span.crc64nvme is not None), span)
        for number, span in enumerate(spans)
        for start in range(span.start, span.start + span.length, step)
    ]
    return sorted(cuts, key=lambda pair: (pair[0].start, pair[0].end))


def _piece(cuts: Sequence[tuple[Cut, Span]]) -> Piece:
    runs: list[Run] = []
    for cut, span in cuts:
        shift = span.at - span.start
        last = runs[-1] if runs else None
        if last and (last.fd, last.shift) == (span.fd, shift) and cut.start <= last.end:
            last.end = max(last.end, cut.end)
        else:
            runs.append(Run(cut.start, cut.end, span.fd, shift))
    return Piece(cuts[0][0].start, max(cut.end for cut, _ in cuts), [cut for cut, _ in cuts], runs)


class _Range(Protocol):
    start: int
    end: int


_Some = TypeVar("_Some", bound=_Range)


def _skipped(some: Sequence[_Range], index: int, at: int) -> int:
    """From where on there may be any that end behind `at`."""
    while index < len(some) and some[index].end <= at:
        index += 1
    return index


def _touched(some: Sequence[_Some], index: int, at: int, end: int) -> Iterator[_Some]:
    while index < len(some) and some[index].start < end:
        if some[index].end > at:
            yield some[index]
        index += 1


def _write(fd: int, view: memoryview, at: int) -> None:
    try:
        while view:
            count = os.pwrite(fd, view, at)
            view, at = view[count:], at + count
    except OSError as error:
        raise NotWritten from error
