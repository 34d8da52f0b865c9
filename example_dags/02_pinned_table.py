"""
Pin a table, count its rows at the pin: every retry counts the same rows, whatever was appended meanwhile.

`demo_fab.wafers` is what the DAG yield_rca makes; put the name of a table of yours. In a SQL catalog a table belongs
to a catalog's name, which is the connection's id unless its extra has `catalog_name`.
"""

from __future__ import annotations

from airflow.sdk import dag

from airflow_gpu_burst.operators.gpu_job import GpuJobOperator
from airflow_gpu_burst.operators.pin import PinSnapshotOperator

COUNT = """
from airflow_gpu_burst.runtime import context
ctx = context()
ctx.result({"rows": sum(batch.num_rows for batch in ctx.inputs["wafers"].batches())})
"""


@dag(schedule=None, catchup=False, tags=["gpu", "example"])
def pinned_table_example() -> None:
    pin = PinSnapshotOperator(task_id="pin", table="demo_fab.wafers")
    GpuJobOperator(task_id="count", command=["python", "-c", COUNT], inputs={"wafers": pin.output}, retries=2)


pinned_table_example_dag = pinned_table_example()
