"""Bringing back the checkpoint that an epoch names, on every rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from airflow_gpu_burst.errors import ChecksumMismatch, ObjectMissing
from airflow_gpu_burst.runlog import Epoch
from airflow_gpu_burst.runtime.agent_process import Agent
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.runtime.telling import Telling, moved, size_text
from airflow_gpu_burst.runtime.totals import Totals


def restore(
    agent: Agent,
    epoch: Epoch,
    target: Path,
    output: Output,
    *,
    rank: int = 0,
    local: Sequence[Path] = (),
    kept: Path | None = None,
    totals: Totals | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Epoch, int | None]:
    """
    Bring back the newest checkpoint that the epoch may restore: the files of all ranks that saved it.

    Of files that several ranks saved under one name this rank gets its own, or the lowest rank's if it has none
    (the world may have been a larger one). A damaged checkpoint is said and skipped: the epoch starts anew from the
    commit before, so that the log, not a guess, says what was restored. Returns the epoch that now holds, and the
    step or None.

    :param local: copies that this node has kept; what is whole in them need not be fetched.
    :param kept: where the node keeps copies; they go when there is no room.
    :param totals: counts.
    :param check: called several times a second; what it raises ends the restore.
    """
    totals = totals or Totals()
    while (commit := epoch.restore_from) is not None:
        manifests = sorted(commit.manifests.items(), key=lambda item: (rank_of(item[0]) != rank, rank_of(item[0])))
        telling = Telling(f"restoring checkpoint {commit.step}", output.say)
        try:
            restored = agent.restore(manifests, target, local, kept=kept, progress=telling.progress, check=check)
        except (ObjectMissing, ChecksumMismatch) as damage:
            output.say(f"checkpoint {commit.step} is damaged, going back to the one before: {damage}")
            shutil.rmtree(target, ignore_errors=True)
            epoch = epoch.restart_without(commit.seq)
            continue
        size = restored.fetched + restored.reused
        totals.restored_bytes += size
        totals.reused_bytes += restored.reused
        totals.restore_s += telling.seconds
        reused = f", {size_text(restored.reused)} of them from this node" if restored.reused else ""
        output.say(f"restored checkpoint {commit.step}: {moved(size, telling.seconds)}{reused}")
        return epoch, commit.step
    return epoch, None


def rank_of(manifest_key: str) -> int:
    """Which rank saved a tree: `<data prefix>/<rank>-<nonce>/<tree>/manifest.json`, see `Epoch.data_prefix`."""
    return int(manifest_key.split("/")[-3].partition("-")[0])
