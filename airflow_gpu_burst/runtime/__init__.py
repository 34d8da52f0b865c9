"""
What runs in the pod: `gpu-burst run -- CMD`, and the Python API of the trainer.

    from airflow_gpu_burst.runtime import context

    ctx = context()
    wafers = ctx.inputs["wafers"].table()
    if ctx.restored: model.load(ctx.restored.folder / "model.bin")
    ...
    (ctx.checkpoint_folder(step) / "model.bin").write_bytes(...); ctx.ready(step)
    ctx.result({"auc": 0.93})

Neither Airflow nor Kubernetes is imported here, and what is heavy (boto3, pyiceberg) only when it is used:
every GPU pod pays for this import.
"""

from airflow_gpu_burst.runtime.trainer import Input, Restored, TrainerContext, context

__all__ = ["Input", "Restored", "TrainerContext", "context"]
