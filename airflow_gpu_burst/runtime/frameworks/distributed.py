"""
`torch.distributed.checkpoint`: each process writes its shards to its node's disk, and each node uploads its own.

    dist.init_process_group("cpu:gloo,cuda:nccl")          # async saving needs a CPU backend
    ctx, state = context(), {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    step = load(ctx, state) or 0                           # in place, for any number of processes
    ...
    pending = save_async(ctx, step, state, loss=loss)      # returns once the state is copied
    ...
    pending.result()                                       # before the next one, and before the end

Every process calls these functions, as with the functions they wrap. A checkpoint has the files of all nodes, and each
node gets all of them back, so that another number of nodes can restore it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from airflow_gpu_burst.runtime.trainer import TrainerContext

_DCP = "torch.distributed.checkpoint"


def save(ctx: TrainerContext, step: int, state: dict[str, Any], *, pin: bool = False, **metrics: float) -> None:
    """
    Write this process's shards, wait for those of the others, say that it is ready (one process of each node does).

    :param pin: see `TrainerContext.ready`, as for `metrics`.
    """
    import_module(_DCP).save(state, checkpoint_id=ctx.checkpoint_folder(step))
    _ready(ctx, step, pin, metrics)


def save_async(ctx: TrainerContext, step: int, state: dict[str, Any], *, pin: bool = False, **metrics: float) -> Any:
    """
    As `save`, while training goes on; returns torch's future. Its `result()` raises what went wrong.

    It is ready when the future is done: torch then has collected the word of all processes that they have written.
    """
    pending = import_module(_DCP).async_save(state, checkpoint_id=ctx.checkpoint_folder(step))

    def done(future: Any) -> None:
        if future.exception() is None:  # else whoever waits for it is told
            _ready(ctx, step, pin, metrics)

    pending.add_done_callback(done)
    return pending


def load(ctx: TrainerContext, state: dict[str, Any]) -> int | None:
    """Fill `state` in place from the checkpoint to go on from. Its step; None: start at the beginning."""
    if ctx.restored is None:
        return None
    import_module(_DCP).load(state, checkpoint_id=ctx.restored.folder)
    return ctx.restored.step


def _ready(ctx: TrainerContext, step: int, pin: bool, metrics: dict[str, Any]) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        ctx.ready(step, pin=pin, **metrics)
