"""Checkpoints: the trainer says that one is ready, a thread saves and commits it while training goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping

from airflow_gpu_burst.checkpoint import save_tree
from airflow_gpu_burst.checkpoint.tree import read_manifest
from airflow_gpu_burst.errors import CheckpointError, ChecksumMismatch, Fenced, GpuBurstError, ObjectMissing, Renamed
from airflow_gpu_burst.runlog import Commit, Epoch
from airflow_gpu_burst.runtime.assembly import Assembly, Waiting
from airflow_gpu_burst.runtime.output import Output
from airflow_gpu_burst.runtime.peers import Peers
from airflow_gpu_burst.runtime.workspace import Ready, Workspace
from airflow_gpu_burst.store import Store

MAX_FAILURES = 3
"""Checkpoints that may fail in a row before training is stopped: beyond that it runs without a net."""


class Uploader(threading.Thread):
    """
    Takes ready checkpoints, oldest first, one at a time: each rank saves its own, rank 0 commits what is whole.

    A failed upload is said, kept on disk and tried again with the next round; after MAX_FAILURES in a row, or
    when the epoch is over, `error` is set and the main loop ends the trainer. Nothing is dropped silently.

    :param peers: the other ranks; None: there are none.
    :param rank: this rank.
    """

    def __init__(
        self,
        *,
        store: Store,
        workspace: Workspace,
        epoch: Epoch,
        keep: int,
        output: Output,
        peers: Peers | None = None,
        rank: int = 0,
        pause_s: float = 0.2,
    ) -> None:
        super().__init__(name="gpu-burst-uploader", daemon=True)
        self._store, self._workspace, self._epoch, self._keep = store, workspace, epoch, keep
        self._output, self._pause_s, self._rank = output, pause_s, rank
        self._peers = peers or Peers(store, epoch, 1)
        self._assembly = Assembly(self._peers, commit=self._commit, discard=self._discard, say=output.say)
        self._stop_event = threading.Event()
        self._abandoned = False
        self._counts: Counter[int] = Counter()
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

    def finish(self, timeout_s: float, *, peers_s: float = 0.0) -> None:
        """
        Save and commit what is ready, then stop. `error` says whether something could not be committed.

        :param timeout_s: for what is under way on this rank.
        :param peers_s: how long rank 0 waits for other ranks' parts.
        """
        self._stop_event.set()
        deadline = time.monotonic() + peers_s
        if self.is_alive():
            self.join(timeout_s)
            if self.is_alive():
                return
        self._take_all()
        while not self._assembly.empty and self.error is None and not self._nothing_comes(deadline):
            time.sleep(0.5)
            self._take_all()
        self._take_all(last=True)

    def abandon(self) -> None:
        """Stop at once, without a word: the epoch is over, and its checkpoints with it."""
        self._abandoned = True
        self._stop_event.set()
        self.join(1.0)  # an upload under way goes on in the background, to keys that nobody reads

    def _nothing_comes(self, deadline: float) -> bool:
        if time.monotonic() > deadline:
            return True
        try:
            return self._peers.all_flushed(self._peers.others(self._rank))
        except GpuBurstError:
            return False

    def _take_all(self, *, last: bool = False) -> None:
        if self.error is not None or self._abandoned:
            return
        step: int | None = None
        try:
            for ready in self._workspace.ready():
                step = ready.step
                try:
                    self._save(ready)
                except CheckpointError as error:
                    # This one can never be saved; it must not stand in the way of those after it.
                    self._counts[step] += 1
                    self._failed(step, error)
                    self._workspace.drop(ready)
                self._settle()
            self._settle(last=last)
            self._clean()
        except (Fenced, Renamed) as error:
            self.error = error
        except Exception as error:  # a thread that dies in silence would leave training without a net
            self._failed(step, error)

    def _settle(self, *, last: bool = False) -> None:
        try:
            self._assembly.settle(last=last)
        except CheckpointError as error:
            self.error = error  # ranks that take no part: no further try helps

    def _failed(self, step: int | None, error: Exception) -> None:
        if self._abandoned:
            return
        self._failures += 1
        name = "a checkpoint" if step is None else f"checkpoint {step}"
        self._output.say(f"{name} could not be saved ({self._failures}. time): {error}")
        if self._failures >= MAX_FAILURES:
            own = error if isinstance(error, GpuBurstError) else CheckpointError(f"{name}: {error!r}")
            self.error = own

    def _save(self, ready: Ready) -> None:
        # A new key for every attempt: data keys are written once.
        self._attempt += 1
        count = self._counts[ready.step] + 1
        prefix = f"{self._epoch.data_prefix}/step-{ready.step:012d}-{self._attempt}"
        part = save_tree(self._store, ready.folder, prefix)
        if self._rank == 0:
            ranks = [0] if ready.alone else [0, *self._peers.others(0)]
            self._assembly.add(
                Waiting(step=ready.step, count=count, ranks=ranks, parts={0: part}, metrics=ready.metrics)
            )
        else:
            self._peers.offer(ready.step, count, part)
            self._failures = 0
            self._output.say(f"checkpoint {ready.step}: this rank's part is saved, {part.size} bytes")
        self._counts[ready.step] = count
        self._workspace.drop(ready)

    def _commit(self, whole: Waiting) -> None:
        self._epoch.commit(whole.step, {part.key: part.sha256 for part in whole.parts.values()}, whole.metrics)
        self._failures = 0
        self.step = whole.step
        self._may_retire = True
        files, size = (sum(getattr(part, name) for part in whole.parts.values()) for name in ("files", "size"))
        self._output.say(f"checkpoint {whole.step} committed: {files} files, {size} bytes")

    def _discard(self, dropped: Waiting) -> None:
        try:
            _delete_trees(self._store, {part.key: part.sha256 for part in dropped.parts.values()})
        except GpuBurstError as error:
            self._say_stays(error)

    def _clean(self) -> None:
        """Retire what is too old, then delete its data. A store that does not delete costs room, never the run."""
        try:
            if self._may_retire:
                self._going += self._epoch.retire(self._keep)
                self._may_retire = False
            while self._going:
                delete_data(self._store, self._going[0])
                del self._going[0]
        except (Fenced, Renamed):
            raise
        except GpuBurstError as error:
            self._say_stays(error)

    def _say_stays(self, error: GpuBurstError) -> None:
        if not self._said_stays:
            self._output.say(f"old checkpoints stay, they could not be deleted: {error}")
        self._said_stays = True


def delete_data(store: Store, commit: Commit) -> None:
    """Delete the data of a retired commit."""
    _delete_trees(store, commit.manifests)


def _delete_trees(store: Store, manifests: Mapping[str, str]) -> None:
    """The manifests last: they are the list of what to delete."""
    for key, sha256 in manifests.items():
        try:
            entries = read_manifest(store, key, sha256)
        except (ObjectMissing, ChecksumMismatch):
            continue
        for entry in entries:
            if "key" in entry:
                store.delete(entry["key"])
        store.delete(key)
