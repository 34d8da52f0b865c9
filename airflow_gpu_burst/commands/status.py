"""`gpu-burst status`: a table of all runs of a namespace, or all about one of them."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from airflow_gpu_burst import runs
from airflow_gpu_burst.commands.connect import site_of
from airflow_gpu_burst.commands.find import Run, find
from airflow_gpu_burst.commands.follow import POLL_S, Aside, steps
from airflow_gpu_burst.commands.listing import listed
from airflow_gpu_burst.commands.logs import UNLIMITED
from airflow_gpu_burst.commands.words import ago, clock, path_of, seconds_of, table
from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.runs import RunStatus, Site
from airflow_gpu_burst.state import Observation

HEADER = ("NAME", "PHASE", "AGE", "GPUS", "CHECKPOINT", "RUN")


def execute(arguments: Namespace) -> int:
    """The table, or the details of one run."""
    site = site_of(arguments)
    if not arguments.run:
        _table(arguments, site)
        return 0
    run = find(site, arguments.run)
    seen = run.look(site)
    if arguments.watch and not seen.terminal:
        _watch(arguments, site, run)
    else:
        _details(arguments, site, run, seen)
    return 0


def _table(arguments: Namespace, site: Site) -> None:
    rows = listed(site)
    if arguments.output == "json" and not arguments.watch:
        print(json.dumps([row.plain() for row in rows], ensure_ascii=False))
        return
    if not rows and not arguments.watch:
        print(f"no runs at connection {site.connection!r}; a finished one is known by its path, DAG/TASK/RUN_ID")
        return
    now = time.time()
    lines = table([HEADER, *(row.cells(now) for row in rows)])
    if arguments.output == "text":
        print(*lines, sep="\n", flush=True)
    known = {row.name: row.state for row in rows}
    while arguments.watch:
        time.sleep(max(arguments.every or 0.0, 0.1))
        for row in listed(site):
            if known.get(row.name) != row.state:
                known[row.name] = row.state
                found = row.plain()
                text = "  ".join((clock(time.time()), *row.cells(time.time())))
                print(json.dumps(found, ensure_ascii=False) if arguments.output == "json" else text, flush=True)


def _watch(arguments: Namespace, site: Site, run: Run) -> None:
    """A line for each change of phase or reason, until the run is over."""

    def follower(wake: Callable[[], None]) -> runs.Follower:
        return runs.Follower(
            store=Aside(site.store),
            route=site.route,
            handle=run.handle,
            timeouts=UNLIMITED,
            submitted_at=run.status.submitted_at if run.status else 0.0,
            wake=wake,
            logs="none",
            poll_s=POLL_S,
        )

    for step in steps(follower):
        if not step.moved:
            continue
        seen = step.observation
        if arguments.output == "json":
            found = {"at": clock(time.time()), "name": run.handle.name, "phase": seen.phase, "reason": seen.reason}
            print(json.dumps({**found, "message": seen.message}, ensure_ascii=False), flush=True)
        else:
            print(clock(time.time()), run.handle.name, _phase(seen), sep="  ", flush=True)


def _details(arguments: Namespace, site: Site, run: Run, seen: Observation) -> None:
    now = time.time()
    status = _status(site, run, seen, now)
    report = site.route.report(run.handle)
    links = {**_links(site, run), **(status.urls if status else {})}
    if arguments.output == "json":
        found = {**_basics(run, seen), **(json.loads(status.to_json()) if status else {})}
        if status:
            found["durations"] = {
                phase: round(took, 3) for phase, took in status.durations(_until(status, now)).items()
            }
        found |= {"open": run.verdict is None, "store": f"{site.store.uri}/{run.handle.run_key.prefix}/"}
        print(json.dumps({**found, "code": seen.code, "urls": links, "report": report}, ensure_ascii=False))
        return
    rows = [(f"{name}:", value) for name, value in _facts(site, run, seen, status, now, links) if value]
    print(*table(rows), sep="\n")
    if report:
        print(f"\n{report}")


def _basics(run: Run, seen: Observation) -> dict[str, Any]:
    handle = run.handle
    return {
        "run_key": handle.run_key.to_dict(),
        "generation": handle.generation,
        "name": handle.name,
        "phase": seen.phase,
        "reason": seen.reason,
        "message": seen.message,
    }


def _facts(
    site: Site, run: Run, seen: Observation, status: RunStatus | None, now: float, links: dict[str, str]
) -> list[tuple[str, str]]:
    handle = run.handle
    place = f"{handle.kind} in namespace {handle.namespace}" if handle.namespace else handle.kind
    generation = f"{handle.generation} of {run.history.generation}, {'open' if run.verdict is None else 'over'}"
    return [
        ("name", handle.name),
        ("run", path_of(handle.run_key)),
        ("generation", generation),
        ("cluster", f"{(status.cluster if status else '') or site.connection}, {place}"),
        ("phase", _phase(seen, now)),
        ("message", seen.message),
        *(_noted(status, now) if status else []),
        *((f"link to {name}", address) for name, address in sorted(links.items())),
        ("store", f"{site.store.uri}/{handle.run_key.prefix}/"),
    ]


def _noted(status: RunStatus, now: float) -> list[tuple[str, str]]:
    phases = [f"{phase} {ago(took)}" for phase, took in status.durations(_until(status, now)).items()]
    nodes = f"{status.nodes} node{'' if status.nodes == 1 else 's'}"
    size = [f"{status.gpus} on {nodes}", f"platform {status.platform}", status.queue and f"queue {status.queue}"]
    last = status.last_checkpoint
    return [
        ("phases", ", ".join(phases)),
        ("submitted", clock(status.submitted_at)),
        ("gpus", ", ".join(part for part in size if part)),
        ("image", status.image),
        *(
            (f"input {name}", f"{i.catalog} {i.table} at {i.snapshot_id}, tag {i.ref}")
            for name, i in status.inputs.items()
        ),
        ("checkpoint", f"step {last.step}, {ago(now - seconds_of(last.at))} ago" if last else "none"),
    ]


def _status(site: Site, run: Run, seen: Observation, now: float) -> RunStatus | None:
    """What is noted, brought up to what was seen just now; made from the request when nothing is noted."""
    status = run.status
    if status is None and run.spec is not None:
        opened = seconds_of(run.history.opens[run.handle.generation].at)
        nodes = site.route.ranks_of(run.spec)
        status = RunStatus.begin(run.handle, run.spec, nodes=nodes, submitted_at=opened)
    return status.moved(seen, now).with_history(run.history) if status else None


def _links(site: Site, run: Run) -> dict[str, str]:
    from airflow_gpu_burst.operators.links import PLACEHOLDERS, fill, store_address

    values = {name: getattr(run.handle, name) for name in PLACEHOLDERS}
    found = {"store": store_address(site.console_url, f"{run.handle.run_key.prefix}/")}
    for name, template in (("job", site.dashboard_url), ("logs", site.logs_url)):
        try:
            found[name] = fill(template, values)
        except GpuBurstError:
            continue  # the test button of the connection says what is wrong with it
    return {name: address for name, address in found.items() if address}


def _until(status: RunStatus, now: float) -> float:
    return now if status.ended_at is None else status.ended_at


def _phase(seen: Observation, now: float | None = None) -> str:
    code = "" if seen.code is None else f", exit code {seen.code}"
    since = f" for {ago(now - seen.since)}" if now is not None and seen.since else ""
    return f"{seen.phase}{since}{f' ({seen.reason}{code})' if seen.reason else ''}"
