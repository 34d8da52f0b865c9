"""`gpu-burst cancel`: end a run, or say that it is over."""

from __future__ import annotations

import json
from argparse import Namespace

from airflow_gpu_burst import runs
from airflow_gpu_burst.commands.connect import site_of
from airflow_gpu_burst.commands.find import find
from airflow_gpu_burst.commands.words import clock, path_of


def execute(arguments: Namespace) -> int:
    """First in the log, then on the cluster; may be repeated."""
    site = site_of(arguments)
    run = find(site, arguments.run)
    seen, handle = run.look(site), run.handle
    if seen.terminal:
        # A closed generation whose object lives on: whoever closed it died before it could end it.
        site.route.cancel(handle)
        why = ", ".join(part for part in dict.fromkeys((seen.reason, seen.message)) if part)
        since = f" since {clock(seen.since)}" if seen.since else ""
        said = f"{handle.name} is over{since}: {seen.phase}{f' ({why})' if why else ''}. Nothing to cancel"
    else:
        runs.cancel(site, handle, "cancelled from a shell")
        said = f"{handle.name} ended; it was {seen.phase}. Its log, checkpoints and output stay in the store"
    if arguments.output == "json":
        found = {
            "name": handle.name,
            "run": path_of(handle.run_key),
            "cancelled": not seen.terminal,
            "phase": seen.phase,
        }
        print(json.dumps({**found, "reason": seen.reason}, ensure_ascii=False))
    else:
        print(said)
    return 0
