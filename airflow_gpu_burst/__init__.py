"""Run the GPU steps of Airflow workflows in another Kubernetes cluster."""

__version__ = "0.1.0"
