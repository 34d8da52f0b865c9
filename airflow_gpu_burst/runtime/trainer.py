"""The trainer's view of its run: inputs at their pins, checkpoints, parameters, result."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from airflow_gpu_burst.contract import ENV_CATALOG_SECRETS
from airflow_gpu_burst.errors import ContractError, SpecError, StoreFull
from airflow_gpu_burst.runtime.announcing import announcement
from airflow_gpu_burst.runtime.workspace import ENV_WORKSPACE, Workspace, write_json
from airflow_gpu_burst.spec import TablePin

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, kw_only=True)
class Input:
    """A pinned table, read by this rank."""

    pin: TablePin
    properties: Mapping[str, str]
    rank: int
    world_size: int

    def batches(
        self, columns: Sequence[str] | None = None, row_filter: str | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        """
        This rank's share of the rows at the pin, as Arrow batches. All ranks together see each row once.

        :raises DataError: the snapshot or the table is not the pinned one any more.
        """
        from airflow_gpu_burst.lake.read import batches

        return batches(
            self._catalog(),
            self.pin,
            rank=self.rank,
            world_size=self.world_size,
            columns=columns,
            row_filter=row_filter,
        )

    def table(self, columns: Sequence[str] | None = None, row_filter: str | None = None) -> pyarrow.Table:
        """All rows at the pin in memory, whatever the rank."""
        from airflow_gpu_burst.lake.read import table

        return table(self._catalog(), self.pin, columns=columns, row_filter=row_filter)

    def _catalog(self) -> Any:
        from airflow_gpu_burst.lake.catalog import CatalogConfig

        secrets = json.loads(os.environ.get(ENV_CATALOG_SECRETS, "{}")).get(self.pin.catalog, {})
        return CatalogConfig(name=self.pin.catalog, properties=self.properties, secrets=secrets)


@dataclass(frozen=True)
class Restored:
    """The checkpoint to go on from."""

    step: int
    folder: Path


@dataclass(frozen=True, kw_only=True)
class TrainerContext:
    """
    What a trainer needs to know, and how it hands over what it made.

    :param params: the operator's `params`.
    :param restored: the checkpoint to go on from, or None: start at the beginning.
    :param kept: where this node has copies of checkpoints that are in the store, or None.
    """

    params: Mapping[str, Any]
    inputs: Mapping[str, Input]
    rank: int
    world_size: int
    run: Mapping[str, Any]
    restored: Restored | None
    workspace: Workspace
    kept: Path | None = None

    @property
    def model_dir(self) -> Path:
        """Files left here are published as the model when the trainer exits with 0."""
        return self.workspace.model

    def checkpoint_folder(self, step: int) -> Path:
        """
        An empty folder for this rank's part of the checkpoint of `step`. Write all files, then call `ready(step)`.

        A restored checkpoint has the files of all ranks in one folder; of files that several ranks saved under the same
        name, each rank finds its own. When the disk has not room for one more checkpoint, local copies of those that
        are in the store make room.
        """
        with self._stall():
            folder = self.workspace.checkpoint(step)
            folder.mkdir(parents=True, exist_ok=True)
            self._make_room()
        return folder

    def ready(self, step: int, *, ranks: Literal["all", "self"] = "all", pin: bool = False, **metrics: float) -> None:
        """
        This rank's part of the checkpoint of `step` is complete. Returns at once, uploads while training goes on.

        A rank is a node (a pod). With several, the checkpoint exists once every rank has called `ready(step)`, in the
        same order of steps; one that some rank leaves out is dropped, and said. Where rank 0 has everything (plain data
        parallelism), rank 0 alone calls `ready(step, ranks="self")`. Under torchrun call it in one process per node,
        after a barrier. Where the files are one rank's, a checkpoint that has waited for over 5 s behind another's
        upload gives way to a newer one.

        :param ranks: whose files make up the checkpoint: every rank's, or this rank's (rank 0 only).
        :param pin: keep it for ever. Rank 0's word counts.
        :param metrics: numbers to keep with it, e.g. `loss=0.12`; NaN and infinity are kept as text. Rank 0's count.
        :raises SpecError: nothing was written for that step, a metric is no number, or another rank than 0 says "self".
        """
        with self._stall():
            values, alone = announcement(
                step, metrics, ranks=ranks, pin=pin, rank=self.rank, world_size=self.world_size
            )
            if not any(self.workspace.checkpoint(step).glob("*")):
                raise SpecError(f"ready({step}): write files into checkpoint_folder({step}) first")
            self.workspace.mark_ready(step, values, alone=alone)

    def _make_room(self) -> None:
        """For as much as the last checkpoint took, and a tenth."""
        size = self.workspace.size() * 11 // 10
        if not size or shutil.disk_usage(self.workspace.root).free >= size:
            return
        from airflow_gpu_burst.checkpoint.space import Kept

        try:
            Kept(self.kept or self.workspace.root / "kept").make_room(size, self.workspace.root)
        except StoreFull as error:
            # It is an estimate: this one may be smaller, and the system has the last word.
            sys.stderr.write(f"gpu-burst: {error}\n")

    @contextmanager
    def _stall(self) -> Iterator[None]:
        """What training waits for is counted, and told in the run's result."""
        began = time.perf_counter()
        yield
        self.workspace.note_stall(time.perf_counter() - began)

    def result(self, values: Mapping[str, Any]) -> None:
        """Hand over the run's result, a JSON-safe dict: the operator returns it. The last call counts."""
        try:
            write_json(self.workspace.result_file, dict(values))
        except (TypeError, ValueError) as error:
            raise SpecError(f"result must be JSON-safe, without NaN: {error}") from error


def context() -> TrainerContext:
    """
    The context of this run, in the trainer or a process that it started.

    :raises ContractError: not inside a run; says how to start one.
    """
    root = os.environ.get(ENV_WORKSPACE)
    if not root:
        raise ContractError(
            "this process was not started by a run. Start it through GpuJobOperator; for a laptop give that a "
            "gpu_cluster connection with the route local"
        )
    workspace = Workspace(Path(root))
    data = json.loads(workspace.trainer_file.read_text(encoding="utf-8"))
    rank, world_size = int(data["rank"]), int(data["world_size"])
    inputs = {
        name: Input(
            pin=(pin := TablePin.from_dict(values)),
            properties=data["catalogs"].get(pin.catalog, {}),
            rank=rank,
            world_size=world_size,
        )
        for name, values in data["inputs"].items()
    }
    step = data["restored_step"]
    return TrainerContext(
        params=data["params"],
        inputs=inputs,
        rank=rank,
        world_size=world_size,
        run=data["run"],
        restored=None if step is None else Restored(int(step), workspace.restored),
        workspace=workspace,
        kept=Path(data["kept"]) if data["kept"] else None,
    )
