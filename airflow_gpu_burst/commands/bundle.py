"""`gpu-burst bundle`: the runtime as a folder, for an image that an init container copies it from."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.runtime import bundle


def execute(arguments: Namespace) -> int:
    """Build it; neither Airflow nor a connection is needed."""
    folder = Path(arguments.folder)
    try:
        size = bundle.build(folder)
    except OSError as error:
        where = error.filename or folder
        raise SpecError(f"cannot write {where}: {error.strerror}; name a folder of your own") from error
    if arguments.output == "json":
        print(json.dumps({"folder": str(folder), "bytes": size}))
    else:
        print(f"{folder}: {size / 1e6:.0f} MB. Copy it to /opt/gpu-burst of an image, and name that image in the")
        print('cluster\'s connection: {"runtime_image": "registry/gpu-burst-runtime:1"}')
    return 0
