"""
Checkpoints: which ones stay, and how much of the network they may take. The result says what they have cost.

Two newest, every hundredth step and the one with the smallest loss stay restorable; the uploads of a node take at most
200 MB/s. Kill the run half way, as a preemption would: the next try goes on from the last committed one.
"""

from __future__ import annotations

from airflow.sdk import dag

from airflow_gpu_burst.operators.gpu_job import GpuJobOperator

TRAIN = """
import json, time
from airflow_gpu_burst.runtime import context

ctx = context()
state = {"weight": 0.0}
first = 0
if ctx.restored:
    first = ctx.restored.step
    state = json.loads((ctx.restored.folder / "state.json").read_text())
for step in range(first + 1, 301):
    loss = (state["weight"] - 3.0) ** 2
    state["weight"] -= 0.02 * (state["weight"] - 3.0)
    if step % 50 == 0:
        folder = ctx.checkpoint_folder(step)
        (folder / "state.json").write_text(json.dumps(state))
        ctx.ready(step, loss=loss, pin=step == 300)
    time.sleep(0.01)
ctx.result({"weight": round(state["weight"], 3)})
"""


@dag(schedule=None, catchup=False, tags=["gpu", "example"])
def checkpoints_example() -> None:
    GpuJobOperator(
        task_id="train",
        command=["python", "-c", TRAIN],
        checkpoints={"keep": 2, "keep_every": 100, "best": "loss", "bandwidth": "200MB/s"},
        retries=2,
    )


checkpoints_example_dag = checkpoints_example()
