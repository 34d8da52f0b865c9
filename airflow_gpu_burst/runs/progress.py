"""Keeps the status object of a run up to date while somebody follows it."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.runlog import RunLog
from airflow_gpu_burst.runs import status
from airflow_gpu_burst.state import Handle, Observation, Phase
from airflow_gpu_burst.store import Store

CHECKPOINT_EVERY_S = 60.0
"""How often the run log is read for a new checkpoint while a run gives output: a LIST and a few small GETs."""


class Progress:
    """
    What is known of one run, written where pages read it. A hint throughout: no failure here is one of the run.
    """

    def __init__(self, store: Store, handle: Handle, *, wall: Callable[[], float] = time.time) -> None:
        self._store, self._handle, self._wall = store, handle, wall
        self._status: status.RunStatus | None = None
        self._looked_at = 0.0

    def note(self, observation: Observation, *, moved: bool, flowing: bool) -> None:
        """
        One more look at the run.

        :param moved: its phase or reason is another than before.
        :param flowing: there was output.
        """
        now = self._wall()
        due = flowing and observation.phase is Phase.RUNNING and now - self._looked_at > CHECKPOINT_EVERY_S
        if not moved and not due:
            return
        self._looked_at = now
        try:
            known = self._status or status.read(self._store, self._handle.run_key)
            if known is None or known.generation != self._handle.generation:
                return
            grown = known.moved(observation, now)
            grown = grown.with_history(RunLog(self._store, self._handle.run_key.prefix).read())
        except GpuBurstError:
            return
        if not grown.same_as(known):
            status.write(self._store, grown)
        self._status = grown


def read_status(store: Store, handle: Handle) -> status.RunStatus | None:
    """The status of this very generation; None when there is none, or the store does not say."""
    try:
        known = status.read(store, handle.run_key)
    except GpuBurstError:
        return None
    return known if known is not None and known.generation == handle.generation else None
