"""
The same step on a GPU cluster: another connection, an image, nothing else.

Connection `gpu_cluster_lab` (see tests/lab/README.md for one that `make lab-up` prints): extra with `kubeconfig`,
`platform`, `queue`, `image`. Three lines to change: command, gpus, gpu_conn_id.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import dag

from airflow_gpu_burst.operators.gpu_job import GpuJobOperator

TRAIN = """
from airflow_gpu_burst.runtime import context
ctx = context()
start = ctx.restored.step if ctx.restored else 0
for step in range(start + 1, 4):
    (ctx.checkpoint_folder(step) / "state").write_text(str(step))
    ctx.ready(step)
    print(f"step {step}", flush=True)
ctx.result({"steps": 3})
"""


@dag(schedule=None, catchup=False, tags=["gpu", "example", "cluster"])
def cluster_example() -> None:
    GpuJobOperator(
        task_id="train",
        command=["python3", "-c", TRAIN],
        gpus=1,
        gpu_conn_id="gpu_cluster_lab",
        queue_timeout=timedelta(hours=12),
        start_timeout=timedelta(minutes=20),
        run_timeout=timedelta(hours=4),
        retries=2,
    )


cluster_example_dag = cluster_example()
