"""Hooks: an Airflow connection becomes a config or a client of the layers below. No logic of their own."""

from airflow_gpu_burst.compat import require_airflow

require_airflow()
