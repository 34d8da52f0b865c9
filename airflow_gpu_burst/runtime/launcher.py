"""
Starts the runtime that an init container brought into an image: `python3 run.py run -- CMD`.

Copied by `bundle` as `run.py`, and to be read by any Python 3: what it says about a wrong one is the point.
"""

import json
import os
import runpy
import sys
import sysconfig
import time

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
BUILT_FOR = "@SOABI@"


def refuse(found):  # type: ignore[no-untyped-def]
    """The last word on a Python that cannot load what was brought; exit code 3, a retry does not help."""
    message = (
        "the runtime that was brought into this image is built for " + BUILT_FOR + ", and its python3 is " + str(found)
        + ". Build the runtime's image with the same Python (`gpu-burst bundle FOLDER`), or install airflow-gpu-burst "
        "in this image and drop the init container"
    )  # fmt: skip
    sys.stderr.write("gpu-burst: WrongPython: " + message + "\n")
    path = os.environ.get("GPU_BURST_TERMINATION_FILE")
    if path:
        with open(path, "w") as file:
            json.dump({"code": 3, "reason": "WrongPython", "message": message, "at": time.time()}, file)
    return 3


def main():  # type: ignore[no-untyped-def]
    """Exit code."""
    # Interpreter, minor version, C library and processor in one word, e.g. cpython-311-x86_64-linux-gnu.
    found = sysconfig.get_config_var("SOABI")
    if found != BUILT_FOR:
        return refuse(found)  # type: ignore[no-untyped-call]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(SITE)]
    sys.path.append(SITE)  # last: the image's own packages win
    os.environ["GPU_BURST_SITE"] = SITE
    runpy.run_module("airflow_gpu_burst.cli", run_name="__main__")  # exits
    return 0


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[no-untyped-call]
