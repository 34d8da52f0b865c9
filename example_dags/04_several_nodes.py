"""
Several nodes: more GPUs than one node has, whole nodes. Every node runs the command once, with RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT set (and what `torchrun` reads), so that `torchrun train.py` is all there is to it.

A node that is lost is replaced; the others start again from the last checkpoint with it.
"""

from __future__ import annotations

from airflow.sdk import dag

from airflow_gpu_burst.operators.gpu_job import GpuJobOperator

TRAIN = """
import os
from airflow_gpu_burst.runtime import context
ctx = context()
print(f"rank {ctx.rank} of {ctx.world_size}, first node at {os.environ['MASTER_ADDR']}", flush=True)
if ctx.rank == 0:
    ctx.result({"nodes": ctx.world_size})
"""


@dag(schedule=None, catchup=False, params={"gpus": 16}, tags=["gpu", "example", "cluster"])
def several_nodes_example() -> None:
    GpuJobOperator(
        task_id="train",
        command=["python3", "-c", TRAIN],
        gpus="{{ params.gpus }}",
        gpu_conn_id="gpu_cluster_lab",
        logs="all",
        retries=2,
    )


several_nodes_example_dag = several_nodes_example()
