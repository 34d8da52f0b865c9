"""
PyTorch without more: one file with whatever `torch.save` takes.

    ctx = context()
    step, state = load_state(ctx) or (0, None)
    if state: model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
    while step < steps:
        step += 1; loss = train_one(...)
        if step % 1000 == 0:
            save_state(ctx, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, loss=loss)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

from airflow_gpu_burst.runtime.trainer import TrainerContext

FILE = "state.pt"


def save_state(
    ctx: TrainerContext,
    step: int,
    state: Any,
    *,
    ranks: Literal["all", "self"] = "all",
    pin: bool = False,
    **metrics: float,
) -> None:
    """
    Write `state` to the node's disk and say that it is ready. Upload goes on in the background.

    Training waits for the write itself, since `state` is of the moment: what `torch.save` has written cannot change any
    more. With plain data parallelism over several nodes call it on rank 0 alone, with `ranks="self"`.

    :param ranks: see `TrainerContext.ready`, as for `pin` and `metrics`.
    """
    import_module("torch").save(state, ctx.checkpoint_folder(step) / FILE)
    ctx.ready(step, ranks=ranks, pin=pin, **metrics)


def load_state(ctx: TrainerContext, *, map_location: Any = "cpu") -> tuple[int, Any] | None:
    """
    Step and state of the checkpoint to go on from; None: start at the beginning.

    Only tensors, containers and numbers are read (`weights_only`), so that a file cannot run code; a state that holds
    other objects is to be read with `torch.load(ctx.restored.folder / "state.pt", weights_only=False)`.

    :param map_location: where tensors go, as in `torch.load`.
    """
    if ctx.restored is None:
        return None
    file = ctx.restored.folder / FILE
    return ctx.restored.step, import_module("torch").load(file, map_location=map_location, weights_only=True)
