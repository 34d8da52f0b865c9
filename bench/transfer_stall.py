"""
How long a trainer stands still for a save.

`python bench/transfer_stall.py ours|peer FOLDER BYTES SAVES` prints `RESULT {"stalls_s": [...]}`: what each save took
beyond the trainer's own write. Ours: `checkpoint_folder` and `ready`, while an agent uploads the checkpoint before to
the sink of GPU_BURST_S3_ENDPOINT. The peer: `torch.distributed.checkpoint.async_save` to the same disk, less a bare
copy of the same tensors, which is the least that whoever goes on training must wait for.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
MIB = 1 << 20
TENSORS = 64


def ours(folder: Path, size: int, saves: int) -> list[float]:
    """Each save's `checkpoint_folder` and `ready`; the file itself is the trainer's own."""
    from airflow_gpu_burst.runtime.agent_process import Agent
    from airflow_gpu_burst.runtime.trainer import TrainerContext
    from airflow_gpu_burst.runtime.workspace import Workspace

    workspace = Workspace(folder)
    workspace.prepare()
    context = TrainerContext(params={}, inputs={}, rank=0, world_size=1, run={}, restored=None, workspace=workspace)
    agent, block, stalls = Agent(os.environ), os.urandom(MIB), []
    upload: threading.Thread | None = None
    for step in range(saves):
        began = time.perf_counter()
        target = context.checkpoint_folder(step)
        stall = time.perf_counter() - began
        with (target / "state.pt").open("wb") as file:
            for _ in range(size // MIB):
                file.write(block)
        began = time.perf_counter()
        context.ready(step, loss=0.1)
        stalls.append(stall + time.perf_counter() - began)
        if upload is not None:
            upload.join()
        ready = workspace.ready()[-1].folder
        upload = threading.Thread(target=_upload, args=(agent, ready, workspace.uploads / str(step)))
        upload.start()
    if upload is not None:
        upload.join()
    agent.close()
    return stalls


def _upload(agent: Any, ready: Path, state: Path) -> None:
    agent.save(ready, f"data/stall/{ready.name}", state, progress=lambda *_: None, check=lambda: None)
    shutil.rmtree(ready)


def peer(folder: Path, size: int, saves: int) -> list[float]:
    """`async_save` of one process's state, as many tensors as a small model has."""
    torch, dist = import_module("torch"), import_module("torch.distributed")
    dcp = import_module("torch.distributed.checkpoint")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.FileStore(str(folder / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = {f"layer.{n}": torch.randn(size // TENSORS // 4) for n in range(TENSORS)}
    stalls = []
    for step in range(saves):
        copied = _seconds(lambda: [tensor.clone() for tensor in state.values()])
        began = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=str(folder / str(step)))
        stalls.append(time.perf_counter() - began - copied)
        getattr(future, "upload_completion", future).result()
        shutil.rmtree(folder / str(step))
    dist.destroy_process_group()
    return stalls


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> int:
    """One side."""
    which, folder, size, saves = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    stalls = {"ours": ours, "peer": peer}[which](folder, size, saves)
    print("RESULT", json.dumps({"stalls_s": stalls}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
