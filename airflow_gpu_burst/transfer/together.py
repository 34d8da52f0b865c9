"""Parts of one transfer in several threads: the first failure stops the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import TypeVar

from airflow_gpu_burst.transfer.flow import Halted, Stopped

_Work = TypeVar("_Work")


def all_of(pool: Executor, work: Sequence[_Work], do: Callable[[_Work, Halted], None]) -> None:
    """
    Do all of it. Returns, or raises the first error, when no thread is at it any more: they use the caller's files.

    :param do: is to raise `Stopped` when its second argument says True.
    """
    if len(work) == 1:  # most transfers: no thread is waited for
        do(work[0], lambda: False)
        return
    failed = threading.Event()
    running: list[Future[None]] = []
    try:
        running.extend(pool.submit(do, one, failed.is_set) for one in work)
        wait(running, return_when=FIRST_EXCEPTION)
    finally:
        failed.set()
        for future in running:
            future.cancel()
        wait(running)
    errors = [error for future in running if not future.cancelled() and (error := future.exception())]
    for error in sorted(errors, key=lambda one: isinstance(one, Stopped)):  # that of a part which was not just stopped
        raise error
    if any(future.cancelled() for future in running):
        raise Stopped
