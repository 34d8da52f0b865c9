"""Operators: what a DAG imports. Each has a hook and calls the layers below; none holds logic of its own."""

from airflow_gpu_burst.compat import require_airflow

require_airflow()
