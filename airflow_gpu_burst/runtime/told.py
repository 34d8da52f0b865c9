"""What a trainer is told: its environment, and the file that `context()` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import airflow_gpu_burst
from airflow_gpu_burst import contract
from airflow_gpu_burst.runlog import Epoch
from airflow_gpu_burst.runtime.start import Pod
from airflow_gpu_burst.runtime.workspace import ENV_WORKSPACE, write_json

MASTER_PORT = "29500"
"""torch's own default."""


def environment(pod: Pod, step: int | None) -> dict[str, str]:
    """
    All of a trainer's environment. A trainer that is no Python finds everything here; `context()` has more.

    Ranks are nodes: RANK and WORLD_SIZE are for a trainer of one process per node; torchrun reads the PET_ variables
    and gives its workers ranks of their own.

    :param step: the restored step, or None.
    """
    base = {**pod.env, **pod.context.env}
    return {**base, **_rendezvous(pod, base), **_runtime(base), **_variables(pod, step)}


def _rendezvous(pod: Pod, base: Mapping[str, str]) -> dict[str, str]:
    rank, world_size = str(pod.identity.rank), str(pod.context.world_size)
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "PET_NNODES": world_size, "PET_NODE_RANK": rank}
    # With several nodes only the route knows the address of rank 0's pod.
    address = base.get("MASTER_ADDR") or ("127.0.0.1" if world_size == "1" else "")
    port = base.get("MASTER_PORT") or MASTER_PORT
    if address:
        variables |= {"MASTER_ADDR": address, "PET_MASTER_ADDR": address}
    return variables | {"MASTER_PORT": port, "PET_MASTER_PORT": port}


def _runtime(base: Mapping[str, str]) -> dict[str, str]:
    """
    Lets the trainer import this package, and nothing else of a runtime that was brought into its image.

    The package's dependencies follow at the end of the trainer's own path, see `airflow_gpu_burst.runtime`.
    """
    site = base.get(contract.ENV_SITE)
    package = Path(airflow_gpu_burst.__file__).parent
    if not site or not package.is_relative_to(site):
        return {}  # the image has the package itself
    entries = [entry for entry in (base.get("PYTHONPATH"), str(Path(site).parent / "trainer")) if entry]
    return {"PYTHONPATH": os.pathsep.join(entries)}


def _variables(pod: Pod, step: int | None) -> dict[str, str]:
    variables = {
        ENV_WORKSPACE: str(pod.workspace.root),
        "GPU_BURST_CHECKPOINT_DIR": str(pod.workspace.checkpoints),
        "GPU_BURST_MODEL_DIR": str(pod.workspace.model),
        "GPU_BURST_RESULT_FILE": str(pod.workspace.result_file),
        "GPU_BURST_PARAMS": json.dumps(dict(pod.context.params)),
    }
    if step is not None:
        variables |= {"GPU_BURST_RESTORED_DIR": str(pod.workspace.restored), "GPU_BURST_RESTORED_STEP": str(step)}
    for name, pin in pod.context.inputs.items():
        variables |= {
            f"GPU_BURST_INPUT_{name.upper()}_TABLE": pin.table,
            f"GPU_BURST_INPUT_{name.upper()}_SNAPSHOT_ID": pin.snapshot_id,
        }
    return variables


def write_trainer_file(pod: Pod, epoch: Epoch, step: int | None) -> None:
    """Write what `context()` reads."""
    context = pod.context
    write_json(
        pod.workspace.trainer_file,
        {
            "params": dict(context.params),
            "inputs": {name: pin.to_dict() for name, pin in context.inputs.items()},
            "catalogs": {name: dict(values) for name, values in context.catalogs.items()},
            "rank": pod.identity.rank,
            "world_size": context.world_size,
            "restored_step": step,
            "kept": None if pod.kept is None else str(pod.kept),
            "run": {**context.run_key.to_dict(), "generation": context.generation, "epoch": epoch.number},
        },
    )
