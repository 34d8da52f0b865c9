"""
A manifest of your own: the Job in `05_job.yaml` (a template), with the same care as a generated one. A retry finds it
instead of making a second; its lines come into the task's log; marking the task failed ends it.

Its containers need not have the runtime; success is what the cluster says.
"""

from __future__ import annotations

from airflow.sdk import dag

from airflow_gpu_burst.operators.gpu_job import GpuJobOperator


@dag(schedule=None, catchup=False, params={"words": "hello from a manifest"}, tags=["gpu", "example", "cluster"])
def own_manifest_example() -> None:
    GpuJobOperator(task_id="train", manifest="05_job.yaml", gpu_conn_id="gpu_cluster_lab", retries=2)


own_manifest_example_dag = own_manifest_example()
