"""From what a person types to a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from airflow_gpu_burst.commands.words import keys_of, seconds_of
from airflow_gpu_burst.errors import GpuBurstError, ObjectMissing, SpecError
from airflow_gpu_burst.routes import Found
from airflow_gpu_burst.runlog import History, Open, RunLog
from airflow_gpu_burst.runs import RunStatus, Site, recall
from airflow_gpu_burst.runs import status as statuses
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from airflow_gpu_burst.store import Store

VERDICTS = {
    "succeeded": Phase.SUCCEEDED,
    "failed": Phase.FAILED,
    "cancelled": Phase.CANCELLED,
    "lost": Phase.LOST,
}
_NAME = re.compile(r"gpu(?P<head>-[a-z0-9-]+)?-[0-9a-f]{12}-g(?P<generation>[0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """
    One generation of a run, as log, store and cluster know it.

    :param here: its object was seen at this connection.
    :param status: as noted for exactly this generation, if it was.
    :param spec: what was asked for, if that can still be read.
    """

    handle: Handle
    history: History
    here: bool
    status: RunStatus | None = None
    spec: RunSpec | None = None

    @property
    def closed(self) -> bool:
        """The run log says that it is over, and whoever waited for it has taken its output."""
        return self.handle.generation in self.history.closes

    @property
    def verdict(self) -> Observation | None:
        """How it ended, by the run log; None: the log does not say that it has."""
        generation = self.handle.generation
        if generation in self.history.finishes:
            finish = self.history.finishes[generation]
            return Observation(phase=Phase.SUCCEEDED, since=seconds_of(finish.at))
        close = self.history.closes.get(generation)
        if close is None:
            return None
        phase, since, message = VERDICTS[close.verdict], seconds_of(close.at), ""
        if self.status is not None and self.status.phase is phase:
            since, message = self.status.since, self.status.message  # the log has a word, the status the sentence
        return Observation(phase=phase, reason=close.reason, message=message, since=since)

    def look(self, site: Site) -> Observation:
        """
        How it is now: the log's word, else the cluster's.

        :raises SpecError: it goes on somewhere else.
        """
        if self.verdict is not None:
            return self.verdict
        elsewhere = self.status.connection if self.status and not self.here else ""
        if elsewhere and elsewhere != site.connection and _seen(site, self.handle.name)[0] is None:
            # The same cluster may have another connection id in a shell: then its object is there.
            raise SpecError(
                f"{self.handle.name} is not at connection {site.connection!r}: it was submitted through "
                f"{elsewhere!r}. Add --conn {elsewhere}"
            )
        return site.route.observe(self.handle)


def find(site: Site, text: str) -> Run:
    """
    The run of that name or path (see `words.keys_of`). A path means its newest generation.

    :raises SpecError: there is none, or its log is in another store.
    """
    return _by_path(site, text) if "/" in text else _by_name(site, text)


def spec_of(store: Store, run_key: RunKey, opened: Open) -> RunSpec | None:
    """What was asked for; None when it is not there, or of a release that this one cannot read."""
    try:
        return RunSpec.from_dict(recall(store, run_key, opened))
    except (ValueError, KeyError, TypeError):
        return None


def _by_path(site: Site, text: str) -> Run:
    for run_key in keys_of(text):
        history = RunLog(site.store, run_key.prefix).read()
        if history.generation:
            return _run(site, run_key, history.generation, history)
    raise _unknown(site, text)


def _by_name(site: Site, text: str) -> Run:
    found, trouble = _seen(site, text)
    if found is None:
        named = next(_noted(site, text), None)
        if named is None:
            raise trouble or _unknown(site, text)
        return _run(site, *named)
    if found.store_uri != site.store.uri:
        raise SpecError(
            f"the log of {text} is in store {found.store_uri or 'unknown'}, and connection "
            f"{site.store_connection!r} is {site.store.uri}. Name the right one with --store-conn"
        )
    run = _run(site, found.handle.run_key, found.handle.generation)
    return replace(run, handle=replace(found.handle, store_connection=site.store_connection), here=True)


def _seen(site: Site, name: str) -> tuple[Found | None, GpuBurstError | None]:
    """What the cluster has of that name. One that is out of reach is no reason not to look into the store."""
    try:
        return next((found for found in site.route.find() if found.handle.name == name), None), None
    except GpuBurstError as error:
        return None, error


def _noted(site: Site, name: str) -> Iterator[tuple[RunKey, int]]:
    """Runs of that name whose object is gone: their status has it."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return
    head, generation = (parts["head"] or "").removeprefix("-"), int(parts["generation"])
    for entry in site.store.list("status/"):
        # The head is dag and task, cut off at some length: of a thousand runs few are read.
        folders = "-".join(entry.key.split("/")[1:3])
        if not folders.startswith(head):
            continue
        try:
            status = RunStatus.from_json(site.store.get(entry.key))
        except (ObjectMissing, ValueError):
            continue
        if status.run_key.object_name(generation, salt=site.store.uri) == name:
            yield status.run_key, generation


def _run(site: Site, run_key: RunKey, generation: int, history: History | None = None) -> Run:
    history = history or RunLog(site.store, run_key.prefix).read()
    if generation not in history.opens:
        raise SpecError(
            f"the run log knows no generation {generation} of {run_key} (it is at {history.generation}): it was "
            "deleted, or the store is another of the same name. Look there before you delete the object"
        )
    noted = statuses.read(site.store, run_key)
    status = noted if noted is not None and noted.generation == generation else None
    spec = spec_of(site.store, run_key, history.opens[generation])
    return Run(
        handle=_handle(site, run_key, generation, status, spec), history=history, here=False, status=status, spec=spec
    )


def _handle(site: Site, run_key: RunKey, generation: int, status: RunStatus | None, spec: RunSpec | None) -> Handle:
    kind = status.kind if status else site.route.kind_of(spec) if spec else ""
    return Handle(
        connection=site.connection,
        route=site.route.name,
        kind=kind or "Job",
        namespace=status.namespace if status else site.route.namespace,
        name=status.name if status else run_key.object_name(generation, salt=site.store.uri),
        uid=status.uid if status else "",
        run_key=run_key,
        generation=generation,
        store_connection=site.store_connection,
    )


def _unknown(site: Site, text: str) -> SpecError:
    return SpecError(
        f"there is no run {text!r} at connection {site.connection!r} with store {site.store.uri}. `gpu-burst status` "
        "lists the names there; a path is DAG/TASK/RUN_ID; --conn and --store-conn name another place"
    )
