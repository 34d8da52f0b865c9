"""`gpu-burst`: the command line. `run` is what a pod starts; the others do from a shell what a DAG does."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module

from airflow_gpu_burst.commands.arguments import parser
from airflow_gpu_burst.errors import GpuBurstError, RunFailed

INTERRUPTED = 130
"""As shells give it: 128 and SIGINT."""
PIPE_CLOSED = 141
"""128 and SIGPIPE: `gpu-burst logs NAME | head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns an ExitCode, or what shells use for SIGINT and SIGPIPE."""
    given = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if given[:1] == ["submit"] and "--" in given:
        # argparse would take an option of the trainer for one of ours.
        place = given.index("--")
        given, command = given[:place], given[place + 1 :]
    arguments = parser().parse_args(given)
    if arguments.command == "run":
        return _run(arguments)
    if arguments.command == "submit":
        arguments.trainer = command
    try:
        # Only now: they need Airflow, and take seconds to import.
        code = import_module(f"airflow_gpu_burst.commands.{arguments.command}").execute(arguments)
        sys.stdout.flush()
        return int(code)
    except GpuBurstError as error:
        print(f"gpu-burst: {error}", file=sys.stderr)
        return (isinstance(error, RunFailed) and error.code) or int(error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, so that the interpreter does not complain of it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run(arguments: Namespace) -> int:
    command = arguments.trainer[1:] if arguments.trainer[:1] == ["--"] else arguments.trainer
    if not command:
        arguments.parser.error("no command; e.g. gpu-burst run -- python train.py")
    from airflow_gpu_burst.runtime import pod

    return int(pod.run(command, os.environ))


if __name__ == "__main__":
    sys.exit(main())
