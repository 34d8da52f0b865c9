"""Checkpoints: the trainer says that one is ready, a thread uploads and commits it while training goes on."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from airflow_gpu_burst.checkpoint import restore_tree, save_tree
from airflow_gpu_burst.checkpoint.tree import read_manifest
from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, Fenced, GpuBurstError, ObjectMissing
from airflow_gpu_burst.runlog import Commit, Epoch
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.runtime.workspace import Ready, Workspace
from airflow_gpu_burst.store import Store

MAX_FAILURES = 3
"""Checkpoints that may fail in a row before training is stopped: beyond that it runs without a net."""


class Uploader(threading.Thread):
    """
    Takes ready checkpoints, oldest first, one at a time.

    A failed upload is said, kept on disk and tried again with the next round; after MAX_FAILURES in a row, or
    when fenced, `error` is set and the main loop ends the trainer. Nothing is dropped silently.
    """

    def __init__(
        self,
        *,
        store: Store,
        workspace: Workspace,
        epoch: Epoch,
        keep: int,
        output: Output,
        pause_s: float = 0.2,
    ) -> None:
        super().__init__(name="gpu-burst-uploader", daemon=True)
        self._store, self._workspace, self._epoch, self._keep = store, workspace, epoch, keep
        self._output, self._pause_s = output, pause_s
        self._stop_event = threading.Event()
        self._failures = 0
        self._attempt = 0
        self._may_retire = False
        self._going: list[Commit] = []
        self._said_stays = False
        self.error: GpuBurstError | None = None
        self.step: int | None = None

    def run(self) -> None:
        """Until `finish` is called or an error ends it."""
        while not self._stop_event.wait(self._pause_s * (1 + 25 * self._failures)):
            self._take_all()

    def finish(self, timeout_s: float) -> None:
        """Commit what is ready, then stop. `error` says whether something could not be committed."""
        self._stop_event.set()
        if self.is_alive():
            self.join(timeout_s)
        if not self.is_alive():
            self._take_all()

    def _take_all(self) -> None:
        if self.error is not None:
            return
        step: int | None = None
        try:
            for ready in self._workspace.ready():
                step = ready.step
                try:
                    self._commit(ready)
                    self._failures = 0
                except CheckpointError as error:
                    # This one can never be saved; it must not stand in the way of those after it.
                    self._failed(step, error)
                    self._workspace.drop(ready)
            self._clean()
        except Fenced as error:
            self.error = error
        except Exception as error:  # a thread that dies in silence would leave training without a net
            self._failed(step, error)

    def _failed(self, step: int | None, error: Exception) -> None:
        self._failures += 1
        self._output.say(f"checkpoint {step} could not be saved ({self._failures}. time): {error}")
        if self._failures >= MAX_FAILURES:
            own = error if isinstance(error, GpuBurstError) else CheckpointError(f"checkpoint {step}: {error!r}")
            self.error = own

    def _commit(self, ready: Ready) -> None:
        # A new key for every attempt: data keys are written once.
        self._attempt += 1
        prefix = f"{self._epoch.data_prefix}/step-{ready.step:012d}-{self._attempt}"
        manifest = save_tree(self._store, ready.folder, prefix)
        self._epoch.commit(ready.step, {manifest.key: manifest.sha256}, self._workspace.metrics(ready))
        self._workspace.drop(ready)
        self.step = ready.step
        self._may_retire = True
        self._output.say(f"checkpoint {ready.step} committed: {manifest.files} files, {manifest.size} bytes")

    def _clean(self) -> None:
        """Retire what is too old, then delete its data. A store that does not delete costs room, never the run."""
        try:
            if self._may_retire:
                self._going += self._epoch.retire(self._keep)
                self._may_retire = False
            while self._going:
                delete_data(self._store, self._going[0])
                del self._going[0]
        except Fenced:
            raise
        except GpuBurstError as error:
            if not self._said_stays:
                self._output.say(f"old checkpoints stay, they could not be deleted: {error}")
            self._said_stays = True


def delete_data(store: Store, commit: Commit) -> None:
    """Delete the data of a retired commit, the manifests last: they are the list of what to delete."""
    for key, sha256 in commit.manifests.items():
        try:
            entries = read_manifest(store, key, sha256)
        except (ObjectMissing, ChecksumMismatch):
            continue
        for entry in entries:
            if "key" in entry:
                store.delete(entry["key"])
        store.delete(key)


def restore(store: Store, epoch: Epoch, target: Path, output: Output) -> tuple[Epoch, int | None]:
    """
    Bring back the newest checkpoint that the epoch may restore.

    A damaged one is said and skipped: the epoch starts anew from the commit before, so that the log, not a
    guess, says what was restored. Returns the epoch that now holds, and the step or None.
    """
    while (commit := epoch.restore_from) is not None:
        try:
            total = sum(restore_tree(store, key, sha256, target) for key, sha256 in commit.manifests.items())
        except (ObjectMissing, ChecksumMismatch) as damage:
            output.say(f"checkpoint {commit.step} is damaged, going back to the one before: {damage}")
            shutil.rmtree(target, ignore_errors=True)
            epoch = epoch.restart_without(commit.seq)
            continue
        output.say(f"restored checkpoint {commit.step}: {total} bytes")
        return epoch, commit.step
    return epoch, None
