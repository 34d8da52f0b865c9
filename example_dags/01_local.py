"""The smallest GPU step: one command, its result. Three lines to change: command, gpus, gpu_conn_id."""

from __future__ import annotations

from airflow.sdk import dag

from airflow_gpu_burst.operators.gpu_job import GpuJobOperator


@dag(schedule=None, catchup=False, tags=["gpu", "example"])
def local_example() -> None:
    GpuJobOperator(
        task_id="train",
        command=["python", "-c", "from airflow_gpu_burst.runtime import context; context().result({'hello': 'gpu'})"],
        gpus=1,
        gpu_conn_id="gpu_cluster_default",
        retries=2,
    )


local_example_dag = local_example()
