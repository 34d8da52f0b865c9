from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.errors import CheckpointError
from airflow_gpu_burst.transfer import MIB
from airflow_gpu_burst.transfer.parts import LARGEST, MOST, SMALLEST, Part, cut, part_size

TIB = 1 << 40
END = MOST * LARGEST  # 48.8 TiB


@given(st.integers(0, 50 * TIB), st.integers(1, 6 << 30))
def test_what_s3_takes(size: int, target: int) -> None:
    if size > END:
        with pytest.raises(CheckpointError, match="save it as several"):
            part_size(size, target)
        return
    step = part_size(size, target)
    count = -(-size // step)
    assert SMALLEST <= step <= LARGEST
    assert count <= MOST
    assert (count - 1) * step < size or not size
    if SMALLEST <= target <= LARGEST and size <= 9000 * target:
        assert step == target


@pytest.mark.parametrize(
    ("size", "step"),
    [
        (0, 32 * MIB),
        (1, 32 * MIB),
        (9000 * 32 * MIB, 32 * MIB),
        (9000 * 32 * MIB + 1, 33 * MIB),
        (5 * TIB, 583 * MIB),
        (END, LARGEST),
    ],
)
def test_of_32_mib(size: int, step: int) -> None:
    assert part_size(size, 32 * MIB) == step


@given(st.integers(0, 10_000), st.integers(1, 999))
def test_parts_cover_the_file_once(size: int, step: int) -> None:
    at = 0
    for number, part in enumerate(cut(size, step), 1):
        assert part == Part(number, at, min(step, size - at))
        at += part.length
    assert at == size
