"""Submitting: create or adopt, by what the run log says. May be repeated by any worker."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping

from airflow_gpu_burst import contract
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import GpuBurstError, RunFailed, SpecError
from airflow_gpu_burst.routes import Job
from airflow_gpu_burst.runlog import Adopt, Collect, Open, RunLog, close_generation, settle_generation
from airflow_gpu_burst.runs import requests, status
from airflow_gpu_burst.runs.concluding import end, verdict_of
from airflow_gpu_burst.runs.site import Site
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from airflow_gpu_burst.store import Store, assure_conditions

log = logging.getLogger(__name__)

SECRET_ENV = frozenset(
    {contract.ENV_CATALOG_SECRETS, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
)
"""What a pod gets from a Kubernetes Secret. The key's id goes with the key: a pod may have another than the worker."""


def submit(site: Site, *, spec: RunSpec, run_key: RunKey, max_tries: int, try_number: int) -> Handle:
    """
    Submit the request of a run key, or find the run that an earlier try submitted.

    :param max_tries: Airflow's `max_tries` of the task instance: a clear raises it, a retry does not.
    :param try_number: Airflow's, which always rises.
    :raises SpecError: another request is running under this run key.
    """
    if site.route.name != "local":
        # Elsewhere a cut-off cluster's pods may go on beside their successors: only the store can tell them apart.
        assure_conditions(site.store, now=time.time())
    # A request that the route cannot take must not open a generation, which its corrected form would then meet.
    site.route.check(_job(site, spec, run_key, 1, try_number))
    runlog = RunLog(site.store, run_key.prefix)
    requests.remember(site.store, run_key, spec)
    for _ in range(5):
        match _settle(site.store, runlog, spec, run_key, max_tries, try_number):
            case Collect(generation=generation):
                log.info("%s: generation %d has finished already; collecting it", run_key, generation)
                return _handle(site, spec, run_key, generation)
            case Adopt(generation=generation):
                _end_earlier(site, runlog, spec, run_key, generation)
                handle = _create(site, runlog, spec, run_key, generation, try_number)
                observation = site.route.observe(handle)
                raw_success = spec.manifest is not None and observation.success
                if not observation.terminal or raw_success or generation in runlog.read().finishes:
                    _begin_status(site, handle, spec, observation)
                    return handle
                # An earlier try died before it could say so. Say it now, and go on with a new generation.
                log.info("%s: generation %d had ended: %s", run_key, generation, observation.message)
                close_generation(runlog, generation, verdict_of(observation), observation.reason)
    raise RunFailed(f"{run_key}: five submissions in a row ended at once; see the last one's output", reason="Flapping")


def _end_earlier(site: Site, runlog: RunLog, spec: RunSpec, run_key: RunKey, generation: int) -> None:
    """
    Whoever closed an earlier generation may have died, or met no answer, before it could end the object. Each of them,
    as the kind that it was: a clear may come with another request.
    """
    for number, opened in sorted(runlog.read().opens.items()):
        if number < generation:
            before = requests.recall(site.store, run_key, opened)
            end(site, _handle(site, RunSpec.from_dict(before) if before else spec, run_key, number))


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
        running = requests.recall(store, run_key, history.opens[history.generation])
        changes = "; ".join(spec.differences(running)) if running else "unknown"
        raise SpecError(f"{error} What differs: {changes}") from error


def _same_inputs(store: Store, spec: RunSpec, run_key: RunKey, previous: Open) -> bool:
    """
    Whether the checkpoints of an earlier request may be gone on from.

    Over other data that would give a model that nobody asked for. With another image or other parameters it is how
    a trainer is mended after ten days.
    """
    before = requests.recall(store, run_key, previous)
    inputs = json.loads(json.dumps(spec.to_dict()["inputs"]))
    same = not before or before.get("inputs") == inputs
    if not same:
        log.warning("%s: the inputs have changed, training starts from the beginning", run_key)
    return same


def _create(site: Site, runlog: RunLog, spec: RunSpec, run_key: RunKey, generation: int, try_number: int) -> Handle:
    context = PodContext.of(
        spec,
        run_key=run_key,
        generation=generation,
        catalogs=site.catalogs,
        world_size=site.route.ranks_of(spec),
    )
    data = context.to_bytes()
    sha256 = contract.sha256_hex(data)
    key = f"{run_key.prefix}/context/{sha256}.json"
    site.store.put(key, data)
    secrets = {name: dict(values) for name, values in site.catalog_secrets.items() if values}
    own = {
        contract.ENV_CONTEXT: key,
        contract.ENV_CONTEXT_SHA256: sha256,
        contract.ENV_CATALOG_SECRETS: json.dumps(secrets),
    }
    job = _job(site, spec, run_key, generation, try_number, own)
    try:
        return _handle(site, spec, run_key, generation, site.route.submit(job))
    except SpecError as error:
        handle = _handle(site, spec, run_key, generation)
        if site.route.observe(handle).phase is Phase.LOST:
            # The cluster refuses it, and there is nothing of it: its corrected form opens the next generation.
            close_generation(runlog, generation, "failed", f"refused: {error}"[:500])
        raise


def _job(
    site: Site, spec: RunSpec, run_key: RunKey, generation: int, try_number: int, env: Mapping[str, str] | None = None
) -> Job:
    return Job(
        name=_name(site, run_key, generation),
        run_key=run_key,
        generation=generation,
        spec=spec,
        env={**site.store_config.to_env(), **(env or {})},
        secret_env=SECRET_ENV,
        try_number=try_number,
        store_uri=site.store.uri,
    )


def _handle(site: Site, spec: RunSpec, run_key: RunKey, generation: int, uid: str = "") -> Handle:
    return Handle(
        connection=site.connection,
        route=site.route.name,
        kind=site.route.kind_of(spec),
        namespace=site.route.namespace,
        name=_name(site, run_key, generation),
        uid=uid,
        run_key=run_key,
        generation=generation,
        store_connection=site.store_connection,
    )


def _name(site: Site, run_key: RunKey, generation: int) -> str:
    # Two Airflows with equal ids, each with a store of its own, may share a namespace.
    return run_key.object_name(generation, salt=site.store.uri)


def _begin_status(site: Site, handle: Handle, spec: RunSpec, observation: Observation) -> None:
    """A status to keep from here on, unless an earlier try has begun it."""
    try:
        there = status.read(site.store, handle.run_key)
    except GpuBurstError:
        return
    if there is not None and there.generation == handle.generation:
        return
    submitted = observation.submitted if observation.submitted is not None else time.time()
    ranks = site.route.ranks_of(spec)
    begun = status.RunStatus.begin(handle, spec, nodes=ranks, submitted_at=submitted, cluster=observation.cluster)
    status.write(site.store, begun.moved(observation, time.time()))
