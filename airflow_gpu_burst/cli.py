"""`gpu-burst`: the command line. `run` is what a pod starts; the other commands join as they are built."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from airflow_gpu_burst import __version__
from airflow_gpu_burst.errors import ExitCode


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns an ExitCode."""
    parser = argparse.ArgumentParser(
        prog="gpu-burst", description="Run the GPU steps of Airflow workflows in another Kubernetes cluster."
    )
    parser.add_argument("--version", action="version", version=f"gpu-burst {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="in the pod: verify the pins, restore, train, keep checkpoints, publish, write the result",
        description="What a pod starts. The contract comes by environment (GPU_BURST_…), set by whoever submits.",
        epilog="exit codes: " + ", ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode),
    )
    run.add_argument("trainer", nargs=argparse.REMAINDER, metavar="-- CMD", help="the trainer and its arguments")
    arguments = parser.parse_args(argv)
    command = arguments.trainer[1:] if arguments.trainer[:1] == ["--"] else arguments.trainer
    if not command:
        run.error("no command; e.g. gpu-burst run -- python train.py")
    from airflow_gpu_burst.runtime import pod

    return int(pod.run(command, os.environ))


if __name__ == "__main__":
    sys.exit(main())
