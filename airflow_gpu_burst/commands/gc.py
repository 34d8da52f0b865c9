"""
`gpu-burst gc`: ends the runs that nobody waits for.

A triggerer that was down when a person marked its task never hears of it, and a worker may die between closing a
generation and ending its object. Only what is certain is ended; the rest is named and left alone.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, replace

from airflow_gpu_burst import runs
from airflow_gpu_burst.commands import tasks
from airflow_gpu_burst.commands.connect import site_of
from airflow_gpu_burst.commands.words import ago, path_of, table
from airflow_gpu_burst.errors import ExitCode, GpuBurstError
from airflow_gpu_burst.routes import Found
from airflow_gpu_burst.runlog import History, RunLog
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.state import Handle

END, CANCEL, LEAVE, OVER, FOREIGN, FAILED = "end", "cancel", "leave", "over", "foreign", "failed"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """
    What to do with one object.

    :param action: `end`: the log has its verdict; `cancel`: nobody waits for it; `leave`; `over`: nothing runs;
        `foreign`: of another store; `failed`: it could not be ended.
    """

    action: str
    reason: str


def execute(arguments: Namespace) -> int:
    """Look at every object of ours in the connection's namespace."""
    site = site_of(arguments)
    judged: list[tuple[Found, Verdict]] = []
    for found in site.route.find():
        verdict = _judge(site, found, arguments.older_than)
        if not arguments.dry_run:
            verdict = _do(site, found.handle, verdict)
        judged.append((found, verdict))
    if arguments.output == "json":
        print(json.dumps([_plain(found, verdict, arguments.dry_run) for found, verdict in judged], ensure_ascii=False))
    else:
        _tell(site, judged, arguments.dry_run)
    failed = any(verdict.action == FAILED for _, verdict in judged)
    return ExitCode.RETRY_MAY_HELP if failed else ExitCode.OK


def settled(history: History, generation: int) -> str:
    """Why the log says that this generation is over; empty: it does not. Pure."""
    close = history.closes.get(generation)
    if close is None:
        return ""  # then it is the newest: another is opened only after a close
    newer = f", and generation {history.generation} took over" if generation < history.generation else ""
    return f"the log closed it: {close.verdict} ({close.reason}){newer}"


def _judge(site: Site, found: Found, older_than: float | None) -> Verdict:
    if found.store_uri != site.store.uri:
        return Verdict(action=FOREIGN, reason=f"of store {found.store_uri or 'unknown'}")
    now = time.time()
    if older_than is not None and (found.created is None or now - found.created < older_than):
        return Verdict(action=LEAVE, reason=f"not known to be older than {ago(older_than)}")
    try:
        return _judge_own(site, found.handle, now)
    except GpuBurstError as error:
        return Verdict(action=LEAVE, reason=f"cannot tell: {error}")


def _judge_own(site: Site, handle: Handle, now: float) -> Verdict:
    history = RunLog(site.store, handle.run_key.prefix).read()
    if handle.generation not in history.opens:
        return Verdict(action=LEAVE, reason="the store has no log of it")
    seen = site.route.observe(handle)
    if why := settled(history, handle.generation):
        return Verdict(action=OVER if seen.terminal else END, reason=why)
    if seen.terminal:
        return Verdict(action=OVER, reason=f"{seen.phase}; the next try takes its result")
    if handle.generation in history.finishes:
        return Verdict(action=LEAVE, reason="has its result, and ends by itself")
    alone, why = tasks.nobody_waits(tasks.ask(handle.run_key, now))
    return Verdict(action=CANCEL if alone else LEAVE, reason=why)


def _do(site: Site, handle: Handle, verdict: Verdict) -> Verdict:
    try:
        if verdict.action == CANCEL:
            runs.cancel(site, handle, f"gpu-burst gc: {verdict.reason}")
        elif verdict.action == END:
            site.route.cancel(handle)
            site.route.salvage(handle, site.store)
    except GpuBurstError as error:
        return replace(verdict, action=FAILED, reason=str(error))
    return verdict


def _plain(found: Found, verdict: Verdict, dry_run: bool) -> dict[str, object]:
    handle = found.handle
    return {
        "name": handle.name,
        "run": path_of(handle.run_key),
        "generation": handle.generation,
        "store": found.store_uri,
        "action": verdict.action,
        "reason": verdict.reason,
        "done": not dry_run and verdict.action in (END, CANCEL),
    }


def _tell(site: Site, judged: list[tuple[Found, Verdict]], dry_run: bool) -> None:
    ended = "would end" if dry_run else "ended"
    words = {END: ended, CANCEL: ended, LEAVE: "left alone", FAILED: "NOT ended"}
    rows = [
        (words[verdict.action], found.handle.name, path_of(found.handle.run_key), verdict.reason)
        for found, verdict in judged
        if verdict.action in words
    ]
    if rows:
        print(*table(rows), sep="\n")
    counts = Counter(verdict.action for _, verdict in judged)
    print(
        f"{len(judged)} of ours at connection {site.connection!r}: {counts[END] + counts[CANCEL]} {ended}, "
        f"{counts[LEAVE]} left alone, {counts[OVER]} over already, {counts[FOREIGN]} of another store, left alone"
        + (f", {counts[FAILED]} could not be ended: run it again" if counts[FAILED] else "")
    )
