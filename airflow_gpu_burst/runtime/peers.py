"""
What the ranks of one epoch tell each other, through the store: small records under each rank's own data prefix.

    ready/<step>-<n>.json   its part of a checkpoint is in the store (n: the n-th time it was ready for that step)
    exited.json             its trainer has exited, with this status
    flushed.json            it uploads nothing more in this epoch

Rank 0 knows all prefixes from the start record. A later epoch has other prefixes, so nothing here outlives its epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from airflow_gpu_burst.checkpoint import Manifest
from airflow_gpu_burst.errors import ObjectMissing
from airflow_gpu_burst.runlog import Epoch
from airflow_gpu_burst.store import Store


class Peers:
    """The records of one epoch, seen from one rank. Every method may raise the errors of the store."""

    def __init__(self, store: Store, epoch: Epoch, world_size: int) -> None:
        self._store, self._epoch = store, epoch
        self._ranks = range(world_size)
        self._seen: dict[str, Mapping[str, Any]] = {}

    def offer(self, step: int, count: int, part: Manifest) -> None:
        """This rank's part of the checkpoint of a step is in the store."""
        self._put(_part(step, count), asdict(part))

    def part(self, rank: int, step: int, count: int) -> Manifest | None:
        """Another rank's part, or None: not (yet) there."""
        found = self._get(rank, _part(step, count))
        return None if found is None else Manifest(**found)

    def exited(self, status: int) -> None:
        """This rank's trainer is over."""
        self._put("exited.json", {"status": status})

    def flushed(self, *, succeeded: bool) -> None:
        """This rank has uploaded its last; `succeeded`: its trainer exited with 0."""
        self._put("flushed.json", {"succeeded": succeeded})

    def all_exited(self, ranks: Iterable[int]) -> bool:
        """Whether the trainers of all these ranks are over, however they ended."""
        return all(self._get(rank, "exited.json") is not None for rank in ranks)

    def all_flushed(self, ranks: Iterable[int]) -> bool:
        """Whether nothing more will come from these ranks."""
        return all(self._get(rank, "flushed.json") is not None for rank in ranks)

    def all_succeeded(self, ranks: Iterable[int]) -> bool:
        """Whether all these ranks have ended well, and all their parts are in the store."""
        return all((found := self._get(rank, "flushed.json")) is not None and found["succeeded"] for rank in ranks)

    def others(self, rank: int) -> list[int]:
        """All ranks but this one."""
        return [other for other in self._ranks if other != rank]

    def _put(self, name: str, values: Mapping[str, Any]) -> None:
        self._store.put(f"{self._epoch.data_prefix}/{name}", json.dumps(values).encode())

    def _get(self, rank: int, name: str) -> Mapping[str, Any] | None:
        key = f"{self._epoch.data_prefix_of(rank)}/{name}"
        if key not in self._seen:
            try:
                self._seen[key] = json.loads(self._store.get(key))
            except ObjectMissing:
                return None
        return self._seen[key]


def _part(step: int, count: int) -> str:
    return f"ready/{step:012d}-{count}.json"
