"""What becomes of a checkpoint once it is in the store: kept on the node, retired by the policy, in the end deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from airflow_gpu_burst.checkpoint import Manifest
from airflow_gpu_burst.checkpoint.collecting import delete_fenced, delete_retired, delete_trees
from airflow_gpu_burst.checkpoint.retention import staying
from airflow_gpu_burst.checkpoint.space import Kept
from airflow_gpu_burst.errors import Fenced, GpuBurstError, Renamed
from airflow_gpu_burst.runlog import Commit, Epoch, RunLog
from airflow_gpu_burst.runtime.telling import size_text
from airflow_gpu_burst.runtime.workspace import Ready, Workspace
from airflow_gpu_burst.spec import Checkpointing
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import Store, StoreConfig
from airflow_gpu_burst.transfer import Mover, open_mover


def kept_copies(kept: Path | None, run_key: RunKey) -> list[Path]:
    """Where this node may have copies of a run's checkpoints."""
    return [] if kept is None else Kept(kept).folders(_name(run_key))


def forget_copies(kept: Path | None, run_key: RunKey) -> None:
    """The run has its result: nobody will restore its checkpoints."""
    if kept is not None:
        Kept(kept).forget(_name(run_key))
        with suppress(OSError):
            kept.rmdir()


def _name(run_key: RunKey) -> str:
    return run_key.digest[:32]


class Keeping:
    """
    One epoch's checkpoints, seen from one rank. Only rank 0 retires and deletes, and never within a save.

    :param log: of the run.
    :param policy: which commits stay.
    :param kept: where this node keeps copies; None: nowhere.
    """

    def __init__(
        self,
        *,
        workspace: Workspace,
        epoch: Epoch,
        log: RunLog,
        store: Store,
        config: StoreConfig,
        policy: Checkpointing,
        kept: Path | None,
        run_key: RunKey,
        rank: int,
        say: Callable[[str], None],
    ) -> None:
        self._workspace, self._epoch, self._log, self._policy = workspace, epoch, log, policy
        self._store, self._config, self._kept, self._run_key = store, config, kept, run_key
        self._rank, self._say = rank, say
        self._due = False
        self._first = True
        self._going: list[Commit] = []
        self._opened: Mover | None = None
        self._said_stays = False

    def saved(self, ready: Ready, part: Manifest) -> None:
        """
        This rank's part is in the store: its folder becomes the node's copy.

        Also before rank 0 has committed it, of which other ranks hear nothing: a copy is known by its manifest, and
        none is restored that no commit names.
        """
        with suppress(OSError):
            self._workspace.note_size(part.size)
        if self._kept is not None:
            Kept(self._kept).keep(ready.folder, run=_name(self._run_key), rank=self._rank, sha256=part.sha256)
        self._workspace.drop(ready)

    def committed(self) -> None:
        """There is a newer checkpoint, so that older ones may go."""
        self._due = True

    def discard(self, parts: Sequence[Manifest]) -> None:
        """Delete what was saved for a checkpoint that will never be committed."""
        try:
            delete_trees(self._store, self._mover, [(part.key, part.sha256) for part in parts])
        except GpuBurstError as error:
            self._say_stays(error)

    def clean(self) -> None:
        """
        After a commit: retire what is too old, then delete its data, and once what earlier epochs have left.

        A store that does not delete costs room, never the run: what is left is tried again after the next commit.

        :raises Fenced: this epoch is over; so says Renamed.
        """
        if not self._due:
            return
        self._due = False
        try:
            self._going += self._epoch.retire(self._policy.keep, self._staying())
            while self._going:
                delete_retired(self._store, self._mover, self._going[:1])
                del self._going[0]
            self._sweep()
        except (Fenced, Renamed):
            raise
        except GpuBurstError as error:
            self._say_stays(error)

    def finish(self) -> None:
        """
        Before the run's result: also an epoch that committed nothing removes what earlier ones have left.

        :raises Fenced: as `clean`.
        """
        self._due = True
        self.clean()

    def close(self) -> None:
        """Let go of the store."""
        if self._opened is not None:
            self._opened.close()

    def _staying(self) -> frozenset[int]:
        history = self._log.known
        restored = self._epoch.restore_from
        return staying(
            history.restorable(self._epoch.generation),
            self._policy,
            damaged=history.damaged,
            restore_from=restored.seq if restored else None,
        )

    def _sweep(self) -> None:
        if not self._first:
            return
        garbage = delete_fenced(
            self._store,
            self._mover,
            self._log.known,
            self._log.prefix,
            generation=self._epoch.generation,
            epoch=self._epoch.number,
        )
        self._first = False
        if garbage.keys:
            self._say(f"deleted what earlier starts had left: {len(garbage.keys)} objects, {size_text(garbage.size)}")
        for reason in garbage.left:
            self._say(f"what an earlier start has left stays, since it cannot be judged: {reason}")

    def _say_stays(self, error: GpuBurstError) -> None:
        if not self._said_stays:
            self._say(f"old checkpoints stay, they could not be deleted: {error}")
        self._said_stays = True

    @property
    def _mover(self) -> Mover:
        # Not the agent's: nobody is to wait for an upload to delete something, nor the other way round.
        self._opened = self._opened or open_mover(self._config)
        return self._opened
