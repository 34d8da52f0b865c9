"""`gpu-burst logs`: what a run has written, from the spool; live with `-f`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from airflow_gpu_burst.commands.connect import site_of
from airflow_gpu_burst.commands.find import Run, find
from airflow_gpu_burst.commands.follow import POLL_S, Aside, show, steps
from airflow_gpu_burst.runs import Follower, OutputReader, Site
from airflow_gpu_burst.runs.output import ranks_wanted
from airflow_gpu_burst.spec import Timeouts

UNLIMITED = Timeouts(queue_s=None, start_s=None, run_s=None)
"""Whoever waits for the run keeps its limits; who looks on ends nothing."""


def execute(arguments: Namespace) -> int:
    """Print all of it, or its end; go on with `-f`."""
    ranks_wanted(arguments.ranks)
    site = site_of(arguments)
    run = find(site, arguments.run)
    over = run.closed
    # A run that has its result may still be saying its last words.
    if not over and (site.route.observe(run.handle) if run.verdict else run.look(site)).terminal:
        # Nobody has waited for its end: what a killed pod could not spool may still be had.
        site.route.salvage(run.handle, site.store)
        over = True
    reader = OutputReader(
        site.store,
        run.handle.run_key.prefix,
        run.handle.generation,
        wanted=ranks_wanted(arguments.ranks),
        labelled=_ranks(site, run) > 1,
    )
    if not _spooled(run) and not arguments.follow:
        print("gpu-burst: the containers of a manifest keep no spool unless they call `gpu-burst run`; -f reads them "
              "live", file=sys.stderr)  # fmt: skip
    for line in _last(_lines(reader, over), arguments.tail):
        print(line)
    sys.stdout.flush()
    if arguments.follow and not over:
        _follow(arguments, site, run, reader.cursor)
    return 0


def _follow(arguments: Namespace, site: Site, run: Run, cursor: dict[str, Any]) -> None:
    store = Aside(site.store, cursor)

    def follower(wake: Callable[[], None]) -> Follower:
        return Follower(
            store=store,
            route=site.route,
            handle=run.handle,
            timeouts=UNLIMITED,
            submitted_at=run.status.submitted_at if run.status else 0.0,
            wake=wake,
            ranks=_ranks(site, run),
            logs=arguments.ranks,
            spooled=_spooled(run),
            poll_s=POLL_S,
        )

    for step in steps(follower):
        show(step)


def _lines(reader: OutputReader, over: bool) -> Iterator[str]:
    yield from reader.read(ended=over)
    while not reader.exhausted:
        yield from reader.read(ended=over)


def _last(lines: Iterator[str], count: int | None) -> Iterator[str]:
    return lines if count is None else iter(deque(lines, maxlen=count))


def _ranks(site: Site, run: Run) -> int:
    if run.spec is not None:
        return site.route.ranks_of(run.spec)
    return run.status.nodes if run.status else 1


def _spooled(run: Run) -> bool:
    return run.spec is None or run.spec.manifest is None
