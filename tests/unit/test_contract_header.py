"""The line that ties a container's log to a stream of the spool."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.contract import header, parse_header
from airflow_gpu_burst.errors import ContractError
from airflow_gpu_burst.runtime.output import stream_name

NAMES = st.text("0123456789abcdefABCDEFTZ-", min_size=1, max_size=64)
SIZES = st.integers(1, 999_999)


@given(NAMES, SIZES, st.data())
def test_a_header_comes_back(stream: str, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    line = header(stream, rank, size)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert parse_header(line) == parse_header(line[:-1]) == (stream, rank, size)


@given(st.binary(max_size=120) | st.from_regex(rb"gpu-burst: output .{0,30} rank .{0,8} of .{0,8}", fullmatch=True))
def test_whatever_parses_is_a_header(line: bytes) -> None:
    found = parse_header(line)
    assert found is None or header(*found).rstrip() == line.rstrip(b"\r\n")


@given(NAMES, SIZES, st.binary(min_size=1, max_size=3).filter(lambda data: data.strip(b"\r\n0123456789")))
def test_nothing_may_stand_around_it(stream: str, size: int, more: bytes) -> None:
    line = header(stream, 0, size)
    assert parse_header(more + line) is None and parse_header(line[:-1] + more) is None


@pytest.mark.parametrize(
    ("stream", "rank", "size"),
    [("", 0, 1), ("a b", 0, 1), ("a\n", 0, 1), ("ä", 0, 1), ("a", 1, 1), ("a", -1, 1), ("a", 0, 0), ("a" * 65, 0, 1)],
)
def test_what_would_not_come_back_is_refused(stream: str, rank: int, size: int) -> None:
    with pytest.raises(ContractError, match="letters, digits"):
        header(stream, rank, size)


def test_a_stream_is_named_by_time_rank_and_nonce() -> None:
    name = stream_name(7, "0123456789abcdef")
    assert re.fullmatch(r"\d{8}T\d{6}-00007-01234567", name)
    assert parse_header(header(name, 7, 8)) == (name, 7, 8)
