"""Several transfers at once, and how far they have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from airflow_gpu_burst.transfer.interface import Mover

Task: TypeAlias = Callable[[], None]
Progress: TypeAlias = Callable[[int, int], None]
"""Told bytes done and bytes in all."""

_EVERY_S = 0.2


def silent(_done: int, _total: int) -> None:
    """A `Progress` that tells nobody."""


def together(crews: Sequence[tuple[int, Sequence[Task]]], tick: Task) -> None:
    """
    Run tasks, of each crew only so many at once; the first error is raised, once what is running has ended.

    :param crews: (at once, tasks).
    :param tick: called in the caller's thread every 0.2 s, and at the end.
    """
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    pools = [(ThreadPoolExecutor(at_once, "gpu-burst-tree"), tasks) for at_once, tasks in crews if tasks]
    try:
        pending = {pool.submit(task) for pool, tasks in pools for task in tasks}
        while pending:
            finished, pending = wait(pending, _EVERY_S, FIRST_EXCEPTION)
            for future in finished:
                future.result()
            tick()
    finally:
        for pool, _ in pools:
            pool.shutdown(cancel_futures=True)


class Meter:
    """
    Bytes that are done: what needed no transfer, and what the mover has moved since.

    :param total: bytes; what was sent twice never shows as more than this.
    """

    def __init__(self, mover: Mover, total: int, progress: Progress) -> None:
        self._mover, self._total, self._progress = mover, total, progress
        self._before = self._moved()
        self.free = 0

    def tell(self) -> None:
        """How far it is now."""
        self._progress(min(self.free + self._moved() - self._before, self._total), self._total)

    def whole(self) -> None:
        """All of it is done."""
        self._progress(self._total, self._total)

    def _moved(self) -> int:
        tally = self._mover.tally
        return tally.bytes_sent + tally.bytes_received + tally.resumed_bytes
