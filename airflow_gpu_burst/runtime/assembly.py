"""
Rank 0 puts the ranks' parts of a checkpoint together: a checkpoint is committed when all ranks have saved theirs.

Every rank saves in the order in which its trainer said that checkpoints are ready. So once a later one is whole, an
earlier one that is not never will be: it is dropped, and said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from airflow_gpu_burst.checkpoint import Manifest
from airflow_gpu_burst.errors import CheckpointError, StoreUnavailable
from airflow_gpu_burst.runtime.peers import Peers

STRANDED_S = 900.0
"""After this long with STRANDED checkpoints waiting for a rank that has never saved one, training is stopped: it would
go on for days without a net."""
STRANDED = 3
_SAY_AFTER_S = 60.0


@dataclass(kw_only=True)
class Waiting:
    """
    A checkpoint that rank 0 has saved.

    :param count: the n-th time that this step was ready in this epoch.
    :param ranks: whose parts belong to it.
    :param parts: the parts that are in the store.
    :param since: monotonic seconds when rank 0 had saved its own.
    """

    step: int
    count: int
    ranks: Sequence[int]
    parts: dict[int, Manifest]
    metrics: dict[str, Any]
    since: float = field(default_factory=time.monotonic)

    @property
    def missing(self) -> list[int]:
        """Ranks whose part is not there."""
        return [rank for rank in self.ranks if rank not in self.parts]


class Fate(Enum):
    """What becomes of a waiting checkpoint."""

    COMMIT = "commit"
    DROP = "drop"
    WAIT = "wait"


def fates(whole: Sequence[bool], *, last: bool) -> list[Fate]:
    """
    What becomes of checkpoints, oldest first, of which some are whole.

    :param last: nothing more will come.
    """
    newest = max((index for index, is_whole in enumerate(whole) if is_whole), default=-1)
    open_end = Fate.DROP if last else Fate.WAIT
    return [
        Fate.COMMIT if is_whole else Fate.DROP if index < newest else open_end for index, is_whole in enumerate(whole)
    ]


class Assembly:
    """
    Checkpoints that rank 0 has saved and that wait for the others' parts.

    :param commit: makes one exist; may raise, and is called again then.
    :param discard: deletes the parts of one that will never be committed.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        commit: Callable[[Waiting], None],
        discard: Callable[[Waiting], None],
        say: Callable[[str], None],
    ) -> None:
        self._peers, self._commit, self._discard, self._say = peers, commit, discard, say
        self._waiting: list[Waiting] = []
        self._heard: set[int] = set()
        self._said = 0.0
        self._look_after = 0.0

    def add(self, waiting: Waiting) -> None:
        """One more, the newest."""
        self._waiting.append(waiting)
        self._look_after = 0.0

    @property
    def empty(self) -> bool:
        """Whether none waits."""
        return not self._waiting

    def settle(self, *, last: bool = False) -> None:
        """
        Commit those that are whole, drop those that never will be.

        :param last: nothing more will come: drop the rest.
        :raises CheckpointError: some rank takes no part; says how to save on rank 0 alone.
        """
        now = time.monotonic()
        if not self._waiting or (now < self._look_after and not last):
            return
        try:
            # The newest first: what is not whole when a later one was, never will be.
            for waiting in reversed(self._waiting):
                self._look(waiting)
        except StoreUnavailable:
            if last:
                raise
            return  # cannot tell, so nothing is decided
        decided = fates([not waiting.missing for waiting in self._waiting], last=last)
        for waiting, fate in zip(list(self._waiting), decided, strict=True):
            if fate is Fate.COMMIT:
                self._commit(waiting)
            elif fate is Fate.DROP:
                self._say(f"checkpoint {waiting.step} is dropped: {_never_saved(waiting)}")
                self._discard(waiting)
            else:
                continue
            self._waiting.remove(waiting)
        if self._waiting:
            self._complain(now)

    def _look(self, waiting: Waiting) -> None:
        for rank in waiting.missing:
            part = self._peers.part(rank, waiting.step, waiting.count)
            if part is not None:
                waiting.parts[rank] = part
                self._heard.add(rank)

    def _complain(self, now: float) -> None:
        oldest = self._waiting[0]
        age = now - oldest.since
        # One GET for each rank and look: every second at first, every 10 s for what has waited for 5 minutes.
        self._look_after = now + min(10.0, max(1.0, age / 30))
        if age > _SAY_AFTER_S and now - self._said > STRANDED_S:
            self._said = now
            self._say(f"checkpoint {oldest.step} waits since {age:.0f} s: {_never_saved(oldest)}")
        silent = [rank for rank in oldest.missing if rank not in self._heard]
        if silent and age > STRANDED_S and len(self._waiting) >= STRANDED:
            raise CheckpointError(f"{len(self._waiting)} checkpoints wait in vain: {_never_saved(oldest)}")


def _never_saved(waiting: Waiting) -> str:
    return (
        f"ranks {waiting.missing} have not saved their part. Call ready({waiting.step}) on every rank, or "
        f'ready({waiting.step}, ranks="self") on rank 0 if its files are the whole checkpoint'
    )
