"""A trainer's bytes become lines of a task log: none lost, none twice, none too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.runs.lines import MAX_LINE, LineAssembler


def lines_of(*pieces: bytes) -> list[str]:
    assembler = LineAssembler()
    return [line for piece in pieces for line in assembler.feed(piece)] + assembler.flush()


@given(st.binary(max_size=200).filter(lambda b: b"\r" not in b), st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_where_the_pieces_are_cut(data: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(data), *(c for c in cuts if c <= len(data))})
    pieces = [data[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert lines_of(*pieces) == lines_of(data)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a\n\nb"], ["a", "", "b"]),
        ([b"one ", b"line\n"], ["one line"]),
        ([b"windows\r\n"], ["windows"]),
        ([b"10%\r20%\r30%\ndone\n"], ["30%", "done"]),
        ([b"10%\r", b"20%\r", b"30%\n"], ["30%"]),
        (["wäfer\n".encode()[:2], "wäfer\n".encode()[2:]], ["wäfer"]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"::group::x\n::endgroup::\n"], [": :group::x", ": :endgroup::"]),
    ],
)
def test_lines(pieces: list[bytes], expected: list[str]) -> None:
    assert lines_of(*pieces) == expected


def test_a_megabyte_line_is_cut_and_says_so() -> None:
    (line,) = lines_of(*[b"x" * 65536] * 16, b"\n")
    assert line.startswith("x" * MAX_LINE) and len(line) < MAX_LINE + 100
    assert f"{1048576 - MAX_LINE} more bytes" in line


def test_pending_bytes_survive_the_reader() -> None:
    first = LineAssembler()
    assert first.feed(b"whole\nhal") == ["whole"]
    assert LineAssembler(first.pending, first.dropped).feed(b"f\n") == ["half"]
