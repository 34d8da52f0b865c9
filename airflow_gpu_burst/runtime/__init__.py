"""
What runs in the pod: `gpu-burst run -- CMD`, and the Python API of the trainer.

    from airflow_gpu_burst.runtime import context

    ctx = context()
    wafers = ctx.inputs["wafers"].table()
    if ctx.restored: model.load(ctx.restored.folder / "model.bin")
    ...
    (ctx.checkpoint_folder(step) / "model.bin").write_bytes(...); ctx.ready(step)
    ctx.result({"auc": 0.93})

In an image that has not this package an init container brings it (`bundle`): then its dependencies come last on the
trainer's path, so that the image's own packages win.

Neither Airflow nor Kubernetes is imported here, and what is heavy (boto3, pyiceberg) only when it is used:
every GPU pod pays for this import.
"""

import os
import sys

from airflow_gpu_burst.contract import ENV_SITE
from airflow_gpu_burst.runtime.trainer import Input, Restored, TrainerContext, context

__all__ = ["Input", "Restored", "TrainerContext", "context"]

if (_site := os.environ.get(ENV_SITE)) and _site not in sys.path:
    sys.path.append(_site)
