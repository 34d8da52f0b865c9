"""Bringing back the checkpoint that an epoch names, on every rank."""

from __future__ import annotations

import shutil
from pathlib import Path

from airflow_gpu_burst.checkpoint import restore_trees
from airflow_gpu_burst.errors import ChecksumMismatch, ObjectMissing
from airflow_gpu_burst.runlog import Epoch
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.store import Store


def restore(store: Store, epoch: Epoch, target: Path, output: Output, rank: int = 0) -> tuple[Epoch, int | None]:
    """
    Bring back the newest checkpoint that the epoch may restore: the files of all ranks that saved it.

    Of files that several ranks saved under one name this rank gets its own, or the lowest rank's if it has none
    (the world may have been a larger one). A damaged checkpoint is said and skipped: the epoch starts anew from the
    commit before, so that the log, not a guess, says what was restored. Returns the epoch that now holds, and the
    step or None.
    """
    while (commit := epoch.restore_from) is not None:
        manifests = sorted(commit.manifests.items(), key=lambda item: (rank_of(item[0]) != rank, rank_of(item[0])))
        try:
            total = restore_trees(store, manifests, target)
        except (ObjectMissing, ChecksumMismatch) as damage:
            output.say(f"checkpoint {commit.step} is damaged, going back to the one before: {damage}")
            shutil.rmtree(target, ignore_errors=True)
            epoch = epoch.restart_without(commit.seq)
            continue
        output.say(f"restored checkpoint {commit.step}: {total} bytes")
        return epoch, commit.step
    return epoch, None


def rank_of(manifest_key: str) -> int:
    """Which rank saved a tree: `<data prefix>/<rank>-<nonce>/<tree>/manifest.json`, see `Epoch.data_prefix`."""
    return int(manifest_key.split("/")[-3].partition("-")[0])
