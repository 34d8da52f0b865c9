"""Submit, collect, fail, cancel. Create-or-adopt throughout: any of them may be repeated by any worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu_burst import contract
from airflow_gpu_burst.checkpoint.tree import read_manifest
from airflow_gpu_burst.contract import PodContext, PodResult
from airflow_gpu_burst.errors import (
    NEVER_RETRIED,
    ChecksumMismatch,
    ObjectMissing,
    RunFailed,
    RunTimeout,
    SpecError,
)
from airflow_gpu_burst.routes import Job, Route
from airflow_gpu_burst.runlog import (
    Adopt,
    Collect,
    History,
    Open,
    RunLog,
    close_generation,
    settle_generation,
)
from airflow_gpu_burst.runs.output import last_lines
from airflow_gpu_burst.runtime.publication import publish
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from airflow_gpu_burst.store import Store, StoreConfig

log = logging.getLogger(__name__)

RESULT_LIMIT = 48 * 1024
"""Largest result, in bytes of JSON, that is returned inline; a larger one stays in the store."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """
    Where a run goes and what it is given there.

    :param connection: connection id of the cluster.
    :param store_connection: connection id of the store.
    :param catalogs: catalog → properties without secrets.
    :param catalog_secrets: catalog → secret properties.
    :param console_url: where people browse the store, up to its keys; empty: nowhere.
    """

    route: Route
    store: Store
    store_config: StoreConfig
    connection: str
    store_connection: str
    catalogs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    catalog_secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    console_url: str = ""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """
    What a finished run made.

    :param result: the trainer's own result; None when it gave none or it is larger than RESULT_LIMIT.
    :param result_key: where the result lies in the store.
    :param model_key: the model version's record in the store, or empty.
    """

    run_key: RunKey
    generation: int
    seconds: float
    result: Any
    result_key: str
    model_key: str
    model_name: str
    model_version: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, as it travels through XCom."""
        return {**self.__dict__, "run_key": self.run_key.to_dict()}


def submit(site: Site, *, spec: RunSpec, run_key: RunKey, max_tries: int, try_number: int) -> Handle:
    """
    Submit the request of a run key, or find the run that an earlier try submitted.

    :param max_tries: Airflow's `max_tries` of the task instance: a clear raises it, a retry does not.
    :param try_number: Airflow's, which always rises.
    :raises SpecError: another request is running under this run key.
    """
    runlog = RunLog(site.store, run_key.prefix)
    _remember_spec(site.store, run_key, spec)
    for _ in range(5):
        match _settle(site.store, runlog, spec, run_key, max_tries, try_number):
            case Collect(generation=generation):
                log.info("%s: generation %d has finished already; collecting it", run_key, generation)
                return _handle(site, run_key, generation)
            case Adopt(generation=generation):
                if generation > 1:
                    # Whoever closed the one before may have died before it could end the object.
                    _end(site, _handle(site, run_key, generation - 1))
                handle = _create(site, spec, run_key, generation)
                observation = site.route.observe(handle)
                if not observation.terminal or _finished(runlog.read(), generation):
                    return handle
                # An earlier try died before it could say so. Say it now, and go on with a new generation.
                log.info("%s: generation %d had ended: %s", run_key, generation, observation.message)
                close_generation(runlog, generation, _verdict(observation), observation.reason)
    raise RunFailed(f"{run_key}: five submissions in a row ended at once; see the last one's output", reason="Flapping")


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
    if not _finished(runlog.read(), handle.generation):
        ended = observation or Observation(phase=Phase.LOST, reason="NoResult", message="no result in the run log")
        verdict = "cancelled" if timeout else _verdict(ended)
        try:
            close = close_generation(runlog, handle.generation, verdict, ended.reason or "RunTimeout")
        finally:
            _end(site, handle)
        if close.verdict != "succeeded":
            raise _failure(site, handle, ended, timeout)
    finish = runlog.read().finishes[handle.generation]
    pod = PodResult.from_dict(finish.result)
    model_key = publish(site.store, handle.run_key, handle.generation, pod) or ""
    result, result_key = _result(site.store, pod)
    close_generation(runlog, handle.generation, "succeeded", "finished")
    _end(site, handle)
    return RunResult(
        run_key=handle.run_key,
        generation=handle.generation,
        seconds=pod.seconds,
        result=result,
        result_key=result_key,
        model_key=model_key,
        model_name=pod.model_name,
        model_version=pod.model_version,
    )


def cancel(site: Site, handle: Handle, reason: str) -> None:
    """End a run: first in the log, so that it can write no more, then on the cluster. May be repeated."""
    try:
        close_generation(RunLog(site.store, handle.run_key.prefix), handle.generation, "cancelled", reason)
    finally:
        _end(site, handle)  # also when the log cannot be written: GPUs must not go on for nobody


def finished(site: Site, handle: Handle) -> bool:
    """Whether the run log holds the result of this run."""
    return _finished(RunLog(site.store, handle.run_key.prefix).read(), handle.generation)


def closed(site: Site, handle: Handle) -> bool:
    """Whether the run log says that this run is over."""
    return handle.generation in RunLog(site.store, handle.run_key.prefix).read().closes


def _failure(site: Site, handle: Handle, observation: Observation, timeout: str) -> RunFailed:
    tail = "\n".join(f"  {line}" for line in last_lines(site.store, handle.run_key.prefix, handle.generation))
    said = f"\nits last lines:\n{tail}" if tail else ""
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


def _end(site: Site, handle: Handle) -> None:
    """End the object, keep what it said, leave nothing of it on the machine."""
    site.route.cancel(handle)
    site.route.salvage(handle, site.store)


def _settle(
    store: Store, runlog: RunLog, spec: RunSpec, run_key: RunKey, max_tries: int, try_number: int
) -> Adopt | Collect:
    try:
        return settle_generation(
            runlog,
            spec_digest=spec.digest,
            max_tries=max_tries,
            try_number=try_number,
            goes_on=lambda previous: _same_inputs(store, spec, run_key, previous),
        )
    except SpecError as error:
        history = runlog.read()
        running = _recall_spec(store, run_key, history.opens[history.generation])
        changes = "; ".join(spec.differences(running)) if running else "unknown"
        raise SpecError(f"{error} What differs: {changes}") from error


def _same_inputs(store: Store, spec: RunSpec, run_key: RunKey, previous: Open) -> bool:
    """
    Whether the checkpoints of an earlier request may be gone on from.

    Over other data that would give a model that nobody asked for. With another image or other parameters it is how
    a trainer is mended after ten days.
    """
    before = _recall_spec(store, run_key, previous)
    inputs = json.loads(json.dumps(spec.to_dict()["inputs"]))
    same = not before or before.get("inputs") == inputs
    if not same:
        log.warning("%s: the inputs have changed, training starts from the beginning", run_key)
    return same


def _create(site: Site, spec: RunSpec, run_key: RunKey, generation: int) -> Handle:
    context = PodContext.of(spec, run_key=run_key, generation=generation, catalogs=site.catalogs)
    data = context.to_bytes()
    sha256 = contract.sha256_hex(data)
    key = f"{run_key.prefix}/context/{sha256}.json"
    site.store.put(key, data)
    secrets = {name: dict(values) for name, values in site.catalog_secrets.items() if values}
    job = Job(
        name=run_key.object_name(generation),
        run_key=run_key,
        generation=generation,
        spec=spec,
        env={
            **site.store_config.to_env(),
            contract.ENV_CONTEXT: key,
            contract.ENV_CONTEXT_SHA256: sha256,
            contract.ENV_CATALOG_SECRETS: json.dumps(secrets),
        },
        secret_env=frozenset({contract.ENV_CATALOG_SECRETS, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}),
    )
    uid = site.route.submit(job)
    return _handle(site, run_key, generation, uid)


def _handle(site: Site, run_key: RunKey, generation: int, uid: str = "") -> Handle:
    return Handle(
        connection=site.connection,
        route=site.route.name,
        kind=site.route.kind,
        namespace=site.route.namespace,
        name=run_key.object_name(generation),
        uid=uid,
        run_key=run_key,
        generation=generation,
        store_connection=site.store_connection,
    )


def _remember_spec(store: Store, run_key: RunKey, spec: RunSpec) -> None:
    store.put(_spec_key(run_key, spec.digest), json.dumps(spec.to_dict(), ensure_ascii=False).encode())


def _recall_spec(store: Store, run_key: RunKey, opened: Open) -> Mapping[str, Any]:
    try:
        spec: Mapping[str, Any] = json.loads(store.get(_spec_key(run_key, opened.spec_digest)))
    except (ObjectMissing, ValueError):
        return {}  # only for saying what differs
    return spec


def _spec_key(run_key: RunKey, digest: str) -> str:
    return f"{run_key.prefix}/spec/{digest}.json"


def _finished(history: History, generation: int) -> bool:
    return generation in history.finishes


def _verdict(observation: Observation) -> str:
    return {Phase.LOST: "lost", Phase.CANCELLED: "cancelled"}.get(observation.phase, "failed")


def _result(store: Store, pod: PodResult) -> tuple[Any, str]:
    if pod.result is None:
        return None, ""
    (entry,) = read_manifest(store, pod.result.key, pod.result.sha256)
    data = store.get(entry["key"])
    if contract.sha256_hex(data) != entry["sha256"]:
        raise ChecksumMismatch(
            f"{entry['key']} is not the result that the run log names; clear the task to run it again"
        )
    return (json.loads(data) if len(data) <= RESULT_LIMIT else None), str(entry["key"])


def _advice(site: Site, handle: Handle, observation: Observation) -> str:
    if observation.code in NEVER_RETRIED:
        return ""
    history = RunLog(site.store, handle.run_key.prefix).read()
    last = history.newest_checkpoint(handle.generation)
    where = f"goes on from checkpoint {last.step}" if last else "starts from the beginning: there is no checkpoint"
    return f" The next try, or clearing the task, {where}."
