"""Every run of a connection's namespace, as it is now."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from airflow_gpu_burst import runs
from airflow_gpu_burst.commands.words import ago, path_of, seconds_of
from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.routes import Found
from airflow_gpu_burst.runs import RunStatus, Site

AT_ONCE = 8
"""Runs looked at at once: each is a small read of the store, and for one that goes on a few requests to the cluster."""
UNKNOWN = "UNKNOWN"
"""In place of a phase: neither status nor cluster could be read."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    One run.

    :param own: its log is in this site's store.
    """

    found: Found
    phase: str
    reason: str
    own: bool
    status: RunStatus | None

    @property
    def name(self) -> str:
        """Of the object."""
        return self.found.handle.name

    @property
    def state(self) -> tuple[Any, ...]:
        """What makes it worth a line again when it changes."""
        return self.phase, self.reason, self.status and self.status.last_checkpoint

    def cells(self, now: float) -> tuple[str, ...]:
        """For a table."""
        last = self.status.last_checkpoint if self.status else None
        created = self.found.created
        return (
            self.name,
            self.phase,
            "-" if created is None else ago(now - created),
            str(self.status.gpus) if self.status else "-",
            f"step {last.step}, {ago(now - seconds_of(last.at))} ago" if last else "-",
            path_of(self.found.handle.run_key) + ("" if self.own else "  (another store)"),
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        last = self.status.last_checkpoint if self.status else None
        handle = self.found.handle
        return {
            "name": self.name,
            "namespace": handle.namespace,
            "kind": handle.kind,
            "run_key": handle.run_key.to_dict(),
            "generation": handle.generation,
            "phase": self.phase,
            "reason": self.reason,
            "created": self.found.created,
            "gpus": self.status.gpus if self.status else None,
            "last_checkpoint": None if last is None else {"step": last.step, "at": last.at},
            "store": self.found.store_uri,
        }


def listed(site: Site) -> list[Row]:
    """Newest first."""
    found = sorted(site.route.find(), key=lambda one: one.created or 0.0, reverse=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda one: _row(site, one), found))


def _row(site: Site, found: Found) -> Row:
    own = found.store_uri == site.store.uri
    status = runs.read_status(site.store, found.handle) if own else None
    if status is not None and status.phase.terminal:
        return Row(found=found, phase=status.phase, reason=status.reason, own=own, status=status)
    try:
        # Nobody may be following it, so the status may be old.
        seen = site.route.observe(found.handle)
    except GpuBurstError:
        phase = status.phase if status else UNKNOWN
        return Row(found=found, phase=phase, reason=status.reason if status else "", own=own, status=status)
    status = status.moved(seen, time.time()) if status else None
    return Row(found=found, phase=seen.phase, reason=seen.reason, own=own, status=status)
