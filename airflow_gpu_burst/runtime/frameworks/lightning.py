"""
Lightning: a callback that saves every so many optimizer steps.

    ctx = context()
    trainer = Trainer(max_steps=10_000, enable_checkpointing=False, callbacks=[callback(ctx, every_n_steps=500)])
    trainer.fit(module, loader, ckpt_path=resume_from(ctx))
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

from airflow_gpu_burst.runtime.trainer import TrainerContext

FILE = "state.ckpt"


def callback(
    ctx: TrainerContext, *, every_n_steps: int, ranks: Literal["all", "self"] = "self", package: str = "lightning"
) -> Any:
    """
    A `Callback`. The metric `loss`, if the module logs one, is kept with each checkpoint.

    :param every_n_steps: optimizer steps between two checkpoints.
    :param ranks: "self" where global rank 0 writes everything (one device, DDP); "all" with sharded strategies, which
        write on every node.
    :param package: `lightning`, or `pytorch_lightning` where that is what is installed.
    """

    class GpuBurstCallback(import_module(f"{package}.pytorch" if package == "lightning" else package).Callback):  # type: ignore[misc]
        _saved = ctx.restored.step if ctx.restored else 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            step = int(trainer.global_step)
            # With accumulated gradients several batches end at the same step.
            if step == self._saved or step % every_n_steps:
                return
            self._saved = step
            trainer.save_checkpoint(ctx.checkpoint_folder(step) / FILE)  # every process takes part
            trainer.strategy.barrier()
            if trainer.local_rank == 0 and (ranks == "all" or ctx.rank == 0):
                loss = trainer.callback_metrics.get("loss")
                metrics: dict[str, Any] = {} if loss is None else {"loss": float(loss)}
                ctx.ready(step, ranks=ranks, **metrics)

    return GpuBurstCallback()


def resume_from(ctx: TrainerContext) -> str | None:
    """For `Trainer.fit(ckpt_path=...)`; None: start at the beginning."""
    return None if ctx.restored is None else str(ctx.restored.folder / FILE)
