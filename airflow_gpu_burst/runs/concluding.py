"""The end of a run: its result or its failure, and cancelling. May be repeated by any worker."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from datetime import datetime
from typing import Any

from airflow_gpu_burst.checkpoint import read_bytes
from airflow_gpu_burst.contract import PodResult
from airflow_gpu_burst.errors import NEVER_RETRIED, GpuBurstError, RunFailed, RunTimeout
from airflow_gpu_burst.runlog import Finish, Finished, Member, RunLog, begin, close_generation
from airflow_gpu_burst.runs import requests
from airflow_gpu_burst.runs.output import last_lines
from airflow_gpu_burst.runs.progress import Progress
from airflow_gpu_burst.runs.site import RESULT_LIMIT, RunResult, Site
from airflow_gpu_burst.runtime.publication import publish
from airflow_gpu_burst.state import Handle, Observation, Phase
from airflow_gpu_burst.store import Store

SETTLE_S = 10.0
"""How long a cluster may take to see a failure that the runtime has told: 2 to 3 s, in the lab."""


def collect(site: Site, handle: Handle, observation: Observation | None = None, *, timeout: str = "") -> RunResult:
    """
    The result of a run that is over, or the error that ended it. Closes its generation and leaves nothing behind.

    The run log decides: a result that it names counts, whatever the cluster says of the object. Publishes the
    model if the pod did not come to it.

    :param observation: the last look at it; None: the log was seen to hold the result.
    :param timeout: the timeout for which it is ended now, a sentence.
    :raises RunFailed: there is no result; the message has the reason and the last lines.
    :raises ContractError: the pod's release speaks another version.
    """
    runlog = RunLog(site.store, handle.run_key.prefix)
    if (
        not timeout
        and observation is not None
        and observation.success
        and requests.is_raw(site.store, runlog.read(), handle)
    ):
        _finish_raw(runlog, handle, observation)
    if handle.generation not in runlog.read().finishes:
        ended = observation or Observation(phase=Phase.LOST, reason="NoResult", message="no result in the run log")
        verdict = "cancelled" if timeout else verdict_of(ended)
        _let_end(site, handle, ended)
        report = site.route.report(handle)  # before it is ended: afterwards there is less to see
        try:
            close = close_generation(runlog, handle.generation, verdict, ended.reason or "RunTimeout")
        finally:
            # What ended it must not be hidden by a cluster that cannot be reached now.
            left = _end_if_possible(site, handle)
        if close.verdict != "succeeded":
            phase = Phase.CANCELLED if timeout else ended.phase if ended.terminal else Phase.FAILED
            _end_status(site, handle, replace(ended, phase=Phase.FAILED if phase is Phase.SUCCEEDED else phase))
            raise _failure(site, handle, ended, timeout, f"{report}{left}")
    finish = runlog.read().finishes[handle.generation]
    pod = PodResult.from_dict(finish.result)
    model_key = publish(site.store, site.store_config, handle.run_key, handle.generation, pod) or ""
    result, result_key = _result(site.store, pod)
    close_generation(runlog, handle.generation, "succeeded", "finished")
    site.route.settle(handle, site.store)
    seen = observation or Observation(phase=Phase.SUCCEEDED, since=_written(finish))
    _end_status(site, handle, replace(seen, phase=Phase.SUCCEEDED))
    return RunResult(
        run_key=handle.run_key,
        generation=handle.generation,
        seconds=pod.seconds,
        result=result,
        result_key=result_key,
        model_key=model_key,
        model_name=pod.model_name,
        model_version=pod.model_version,
        model_uri=pod.model_uri,
        checkpoints=pod.checkpoints,
    )


def cancel(site: Site, handle: Handle, reason: str) -> None:
    """End a run: first in the log, so that it can write no more, then on the cluster. May be repeated."""
    runlog = RunLog(site.store, handle.run_key.prefix)
    try:
        close = close_generation(runlog, handle.generation, "cancelled", reason)
    finally:
        end(site, handle)  # also when the log cannot be written: GPUs must not go on for nobody
    if close.verdict == "cancelled":
        _end_status(site, handle, Observation(phase=Phase.CANCELLED, reason="Cancelled", message=reason))


def finished(site: Site, handle: Handle) -> bool:
    """Whether the run log holds the result of this run."""
    return handle.generation in RunLog(site.store, handle.run_key.prefix).read().finishes


def closed(site: Site, handle: Handle) -> bool:
    """Whether the run log says that this run is over."""
    return handle.generation in RunLog(site.store, handle.run_key.prefix).read().closes


def end(site: Site, handle: Handle) -> None:
    """End the object, keep what it said, leave nothing of it on the machine."""
    site.route.cancel(handle)
    site.route.salvage(handle, site.store)


def _let_end(site: Site, handle: Handle, ended: Observation) -> None:
    """
    The runtime's word on a failure is some seconds ahead of the cluster's. Without them the failed job would be deleted
    as one that still runs, and nobody could look at it.
    """
    deadline = time.monotonic() + SETTLE_S
    while ended.phase is Phase.FAILED and time.monotonic() < deadline:
        try:
            if site.route.observe(handle).terminal:
                return
        except GpuBurstError:
            return
        time.sleep(0.5)


def _end_if_possible(site: Site, handle: Handle) -> str:
    """What could not be done, as a line for the error; empty: nothing of it runs any more."""
    try:
        end(site, handle)
    except GpuBurstError as error:
        return f"\nit could not be ended ({error}); `gpu-burst gc` or the next try ends what is left of it"
    return ""


def verdict_of(observation: Observation) -> str:
    """What the run log says of such an end."""
    return {Phase.LOST: "lost", Phase.CANCELLED: "cancelled"}.get(observation.phase, "failed")


def _failure(site: Site, handle: Handle, observation: Observation, timeout: str, report: str) -> RunFailed:
    tail = "\n".join(f"  {line}" for line in last_lines(site.store, handle.run_key.prefix, handle.generation))
    said = f"\n{report}" if report else ""
    said += f"\nits last lines:\n{tail}" if tail else ""
    if timeout:
        return RunTimeout(
            f"{handle.name} was cancelled: {timeout}. Raise it, or see what it waits for{said}",
            reason="RunTimeout",
        )
    word = observation.reason or str(observation.phase)
    return RunFailed(
        f"{handle.name} failed ({word}): {observation.message}.{_advice(site, handle, observation)}{said}",
        code=observation.code,
        reason=word,
    )


def _advice(site: Site, handle: Handle, observation: Observation) -> str:
    if observation.code in NEVER_RETRIED:
        return ""
    history = RunLog(site.store, handle.run_key.prefix).read()
    last = history.newest_checkpoint(handle.generation)
    where = f"goes on from checkpoint {last.step}" if last else "starts from the beginning: there is no checkpoint"
    return f" The next try, or clearing the task, {where}."


def _result(store: Store, pod: PodResult) -> tuple[Any, str]:
    if pod.result is None:
        return None, ""
    key, data = read_bytes(store, pod.result.key, pod.result.sha256)
    return (json.loads(data) if len(data) <= RESULT_LIMIT else None), key


def _end_status(site: Site, handle: Handle, observation: Observation) -> None:
    Progress(site.store, handle).note(observation, moved=True, flowing=False)


def _finish_raw(runlog: RunLog, handle: Handle, observation: Observation) -> None:
    """
    The cluster's word is the result of a run whose pods do not write the log: note it in their place.

    If they do (a manifest may call `gpu-burst run`), their result is there already.
    """
    member = Member(owner=handle.uid, rank=0, pod_uid=f"airflow-{handle.uid}", nonce=uuid.uuid4().hex)
    seconds = max(0.0, time.time() - (observation.submitted or time.time()))
    try:
        epoch = begin(runlog, generation=handle.generation, member=member, world_size=1, deadline_s=60.0, restore=False)
        epoch.finish(PodResult(seconds=round(seconds, 3)).to_dict(), None)
    except Finished:
        return


def _written(finish: Finish) -> float | None:
    try:
        return datetime.fromisoformat(finish.at).timestamp()
    except ValueError:
        return None  # the time in a record is for people
