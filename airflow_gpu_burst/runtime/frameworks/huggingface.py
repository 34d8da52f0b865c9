"""
Hugging Face `Trainer`: each `checkpoint-N` that it saves becomes a checkpoint of the run.

    ctx = context()
    trainer = Trainer(model, TrainingArguments("out", save_steps=500, save_total_limit=1), ...,
                      callbacks=[callback(ctx)])
    trainer.train(resume_from_checkpoint=resume_from(ctx))

Let `output_dir` lie on the same file system as the run's workspace (a relative path does, unless a working directory is
set): then files are linked rather than copied.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from airflow_gpu_burst.runtime.trainer import TrainerContext


def callback(ctx: TrainerContext, *, ranks: Literal["all", "self"] = "all") -> Any:
    """
    A `TrainerCallback`. The last logged loss is kept with each checkpoint.

    `checkpoint-N` stays where it is, for the Trainer's own rotation and `load_best_model_at_end`.

    :param ranks: with several nodes the Trainer writes something on each (random states at least), unless
        `save_only_model` is set: then say "self".
    """

    class GpuBurstCallback(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            distributed = import_module("torch.distributed")
            if distributed.is_available() and distributed.is_initialized():
                distributed.barrier()  # other processes of this node may still be writing
            if not state.is_local_process_zero or (ranks == "self" and ctx.rank != 0):
                return
            step = int(state.global_step)
            _link(Path(args.output_dir) / f"checkpoint-{step}", ctx.checkpoint_folder(step))
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
            ctx.ready(step, ranks=ranks, **({"loss": losses[-1]} if losses else {}))

    return GpuBurstCallback()


def resume_from(ctx: TrainerContext) -> str | None:
    """For `Trainer.train(resume_from_checkpoint=...)`; None: start at the beginning."""
    return None if ctx.restored is None else str(ctx.restored.folder)


def _link(source: Path, target: Path) -> None:
    """The Trainer writes a new folder each time and never into an old one, so both names may share the bytes."""

    def link_or_copy(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:  # another file system, or one without links
            shutil.copy2(file, to)

    shutil.copytree(source, target, copy_function=link_or_copy, dirs_exist_ok=True)
