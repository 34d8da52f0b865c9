"""Triggers: wait in the triggerer, in threads of a pool of their own; nothing blocks the loop."""

from airflow_gpu_burst.compat import require_airflow

require_airflow()
