"""How a large object is cut for a multipart upload. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from airflow_gpu_burst.errors import CheckpointError
from airflow_gpu_burst.transfer.interface import MIB

SMALLEST = 5 * MIB
"""S3 refuses smaller ones, the last excepted."""
LARGEST = 5 << 30
MOST = 10_000
_USUAL = 9_000  # parts at most; the rest is room for stores that count otherwise


@dataclass(frozen=True, slots=True)
class Part:
    """
    :param number: from 1.
    :param start: offset in the file.
    """

    number: int
    start: int
    length: int


def part_size(size: int, target: int) -> int:
    """
    Bytes of each part of an object of `size` bytes, the last excepted.

    `target` where it fits, else as much as 9,000 parts need, in whole MiB; 10,000 parts of 5 GiB (48.8 TiB) is the end.

    :raises CheckpointError: the file is larger than S3 can take.
    """
    needed = -(-size // (_USUAL * MIB)) * MIB
    chosen = min(max(target, needed, SMALLEST), LARGEST)
    if size > MOST * chosen:
        raise CheckpointError(
            f"a file of {size} bytes is more than S3 takes in {MOST} parts of 5 GiB; save it as several"
        )
    return chosen


def cut(size: int, step: int) -> Iterator[Part]:
    """The parts of an object, none for an empty one."""
    for number, start in enumerate(range(0, size, step), 1):
        yield Part(number, start, min(step, size - start))
