"""`gpu-burst checkpoint`: the trainer's context for programs that are no Python. Needs no Airflow."""

from __future__ import annotations

from argparse import Namespace

from airflow_gpu_burst.errors import SpecError

_ARGUMENTS = ("step", "ranks", "pin")


def execute(arguments: Namespace) -> int:
    """One verb of a trainer; or `agent`, the process that the runtime starts."""
    if arguments.verb == "agent":
        from airflow_gpu_burst.checkpoint.agent import main

        return main()
    from airflow_gpu_burst.runtime.trainer import context

    trainer = context()
    if arguments.verb == "folder":
        print(trainer.checkpoint_folder(arguments.step))
        return 0
    metrics = dict(arguments.metric)
    if taken := [name for name in metrics if name in _ARGUMENTS]:
        raise SpecError(f"--metric {taken[0]}=…: that name is taken; choose another one")
    trainer.ready(arguments.step, ranks="self" if arguments.self else "all", pin=arguments.pin, **metrics)
    return 0
