"""
The status of a run, for pages and people: one small JSON object per run key, beside the runs rather than within.

`status/<dag>/<task>/<run>-<hash>.json`: a listing of `status/<dag>/` meets one object per run, where `runs/<dag>/`
holds every checkpoint file and chunk of output of each; and a job's own credentials need not reach it.
`run_status.schema.json` beside this file is the published form. A hint throughout: the run log is what is true.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from airflow_gpu_burst.errors import GpuBurstError, ObjectMissing
from airflow_gpu_burst.runlog import History
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from airflow_gpu_burst.store import Store

log = logging.getLogger(__name__)

STATUS_VERSION = 1
"""Raised when a field changes its meaning; new fields do not raise it, and readers ignore what they do not know."""

MAX_PHASES = 100
"""Phases kept one by one. Of a run that flaps for days the older ones are kept as sums only: about 6 KB in all."""

MAX_TEXT = 2000
"""Longest reason or message, in characters: some controllers put a whole stack trace there."""


@dataclass(frozen=True, kw_only=True)
class PhaseEntry:
    """
    A phase that the run came to.

    :param since: seconds since the epoch, to the millisecond.
    """

    phase: Phase
    since: float


@dataclass(frozen=True, kw_only=True)
class Input:
    """What the run reads: a table at a snapshot, held by a tag."""

    catalog: str
    table: str
    snapshot_id: str
    ref: str


@dataclass(frozen=True, kw_only=True)
class LastCheckpoint:
    """
    The newest checkpoint that the run log names and a restart would restore.

    :param at: when it was committed, ISO 8601 UTC.
    """

    step: int
    at: str


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """
    Where a run is, and how it came there. Times are seconds since the epoch here, ISO 8601 UTC in JSON.

    :param connection: connection id of the cluster.
    :param cluster: the cluster's own name, where one is known.
    :param phases: in order, at least one; `phase` and `since` are those of the last.
    :param earlier_seconds: seconds in phases that are not in `phases` any more (see MAX_PHASES).
    :param urls: name → address, e.g. `job`, `logs`, `report`.
    """

    run_key: RunKey
    generation: int
    connection: str
    kind: str
    namespace: str
    name: str
    uid: str
    submitted_at: float
    updated_at: float
    phases: tuple[PhaseEntry, ...]
    cluster: str = ""
    reason: str = ""
    message: str = ""
    gpus: int = 0
    nodes: int = 1
    platform: str = ""
    queue: str = ""
    image: str = ""
    inputs: Mapping[str, Input] = field(default_factory=dict)
    last_checkpoint: LastCheckpoint | None = None
    urls: Mapping[str, str] = field(default_factory=dict)
    earlier_seconds: Mapping[Phase, float] = field(default_factory=dict)

    @classmethod
    def begin(cls, handle: Handle, spec: RunSpec, *, nodes: int, submitted_at: float, cluster: str = "") -> Self:
        """
        The status of a run that has just been submitted.

        :param nodes: machines that it takes.
        :param submitted_at: when the object was created, seconds since the epoch.
        """
        at = round(submitted_at, 3)
        return cls(
            run_key=handle.run_key,
            generation=handle.generation,
            connection=handle.connection,
            kind=handle.kind,
            namespace=handle.namespace,
            name=handle.name,
            uid=handle.uid,
            submitted_at=at,
            updated_at=at,
            phases=(PhaseEntry(phase=Phase.SUBMITTED, since=at),),
            cluster=cluster,
            gpus=spec.gpus,
            nodes=nodes,
            platform=spec.platform,
            queue=spec.queue,
            image=spec.image,
            inputs={
                name: Input(catalog=pin.catalog, table=pin.table, snapshot_id=pin.snapshot_id, ref=pin.ref)
                for name, pin in spec.inputs.items()
            },
        )

    @property
    def phase(self) -> Phase:
        """Where it is now."""
        return self.phases[-1].phase

    @property
    def since(self) -> float:
        """Since when."""
        return self.phases[-1].since

    @property
    def ended_at(self) -> float | None:
        """When it ended; None: it has not."""
        return self.since if self.phase.terminal else None

    def moved(self, observation: Observation, now: float) -> Self:
        """
        With one more look at the run.

        A run that has ended stays so: only another end may correct the one that is noted, e.g. a result in the run
        log of a job that was found deleted.

        :param now: seconds since the epoch.
        """
        if self.phase.terminal and not observation.terminal:
            return self
        phases, sums = self.phases, self.earlier_seconds
        if self.phase.terminal:
            phases = (*phases[:-1], replace(phases[-1], phase=observation.phase))
        elif observation.phase is not self.phase:
            # What runs again says when it first ran: that is what its run timeout counts from.
            again = observation.phase is Phase.RESTARTING or any(e.phase is observation.phase for e in phases)
            since = None if again else observation.since
            # Not before the phase before it: a later look may know an earlier time than the one that was guessed.
            began = max(min(now if since is None else since, now), self.since)
            phases = (*phases, PhaseEntry(phase=observation.phase, since=round(began, 3)))
            phases, sums = _folded(phases, sums)
        return replace(
            self,
            phases=phases,
            earlier_seconds=sums,
            reason=observation.reason[:MAX_TEXT],
            message=observation.message[:MAX_TEXT],
            cluster=observation.cluster or self.cluster,
            updated_at=max(round(now, 3), self.updated_at),
        )

    def with_history(self, history: History) -> Self:
        """With the newest checkpoint of the run log."""
        commit = history.newest_checkpoint(self.generation) if self.generation in history.opens else None
        found = None if commit is None else LastCheckpoint(step=commit.step, at=commit.at)
        return replace(self, last_checkpoint=found)

    def same_as(self, other: RunStatus | None) -> bool:
        """Whether both say the same of the run, whenever they were written: then there is nothing to write."""
        return other is not None and replace(self, updated_at=other.updated_at) == other

    def durations(self, now: float) -> dict[Phase, float]:
        """Seconds in each phase that is not an end; the present one counts up to `now`."""
        sums = dict(self.earlier_seconds)
        ends = [*(entry.since for entry in self.phases[1:]), now]
        for entry, end in zip(self.phases, ends, strict=True):
            if not entry.phase.terminal:
                sums[entry.phase] = sums.get(entry.phase, 0.0) + max(0.0, end - entry.since)
        return sums

    def to_json(self) -> str:
        """As in the store."""
        plain = ("reason", "message", "kind", "namespace", "name", "uid", "generation")
        request = ("gpus", "nodes", "platform", "queue", "image")
        data = {
            "version": STATUS_VERSION,
            "run_key": self.run_key.to_dict(),
            **{name: getattr(self, name) for name in (*plain, *request)},
            "phase": self.phase,
            "cluster": {"connection": self.connection, "name": self.cluster},
            "since": _iso(self.since),
            "submitted_at": _iso(self.submitted_at),
            "updated_at": _iso(self.updated_at),
            "phases": [{"phase": entry.phase, "since": _iso(entry.since)} for entry in self.phases],
            "earlier_seconds": dict(self.earlier_seconds),
            "inputs": {name: dict(vars(found)) for name, found in self.inputs.items()},
            "last_checkpoint": None if self.last_checkpoint is None else dict(vars(self.last_checkpoint)),
            "urls": dict(self.urls),
        }
        return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """
        Back from `to_json`.

        :raises ValueError: not a status, or one of a version that this release does not know.
        """
        try:
            data = json.loads(text)
            if data["version"] != STATUS_VERSION:
                raise ValueError(f"version {data['version']!r} of a status; update airflow-gpu-burst to read it")
            return cls(**_fields(data))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the status of a run ({error!r}); it is written anew by the next try") from error


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    same = ("generation", "kind", "namespace", "name", "uid", "reason", "message", "gpus", "nodes", "platform", "queue")
    phases = tuple(PhaseEntry(phase=Phase(entry["phase"]), since=_seconds(entry["since"])) for entry in data["phases"])
    if not phases:
        raise KeyError("phases")
    last, known = data["last_checkpoint"], ("catalog", "table", "snapshot_id", "ref")
    return {
        **{name: data[name] for name in (*same, "image")},
        "run_key": RunKey.from_dict(data["run_key"]),
        "connection": data["cluster"]["connection"],
        "cluster": data["cluster"]["name"],
        "submitted_at": _seconds(data["submitted_at"]),
        "updated_at": _seconds(data["updated_at"]),
        "phases": phases,
        "earlier_seconds": {Phase(name): seconds for name, seconds in data["earlier_seconds"].items()},
        "inputs": {name: Input(**{key: found[key] for key in known}) for name, found in data["inputs"].items()},
        "last_checkpoint": None if last is None else LastCheckpoint(step=last["step"], at=last["at"]),
        "urls": dict(data["urls"]),
    }


def _folded(
    phases: tuple[PhaseEntry, ...], sums: Mapping[Phase, float]
) -> tuple[tuple[PhaseEntry, ...], Mapping[Phase, float]]:
    """The last MAX_PHASES of them; what came before as sums."""
    extra = max(0, len(phases) - MAX_PHASES)
    folded = dict(sums)
    for entry, following in zip(phases[:extra], phases[1 : extra + 1], strict=True):
        folded[entry.phase] = round(folded.get(entry.phase, 0.0) + following.since - entry.since, 3)
    return phases[extra:], folded


def status_key(run_key: RunKey) -> str:
    """Where the status of a run lies in the store."""
    return f"status/{run_key.prefix.removeprefix('runs/')}.json"


def write(store: Store, status: RunStatus) -> bool:
    """
    Note it, unless what is there is of a newer generation or says that this one has ended: a triggerer that was cut
    off may come back late. Best effort: a store that refuses costs the page a line, never the run.

    :returns: whether it was written.
    """
    try:
        there = read(store, status.run_key)
        if there is not None and _outdated(status, there):
            return False
        store.put(status_key(status.run_key), status.to_json().encode())
    except GpuBurstError as error:
        log.debug("the status of %s was not written: %s", status.run_key, error)
        return False
    return True


def _outdated(status: RunStatus, there: RunStatus) -> bool:
    ended = there.generation == status.generation and there.phase.terminal and not status.phase.terminal
    return there.generation > status.generation or ended


def read(store: Store, run_key: RunKey) -> RunStatus | None:
    """
    The status of a run; None when there is none that this release can read.

    :raises StoreError: the store did not say whether there is one.
    """
    return _read(store, status_key(run_key))


def listed(store: Store, dag_id: str, task_id: str = "") -> Iterator[RunStatus]:
    """
    The status of every run of a DAG, or of one of its tasks; one small read each, in no order that means anything.

    :raises StoreError: the store did not answer.
    """
    dag, task = RunKey(dag_id=dag_id, task_id=task_id, run_id="").prefix.split("/")[1:3]
    # Different ids may be alike as folder names: what was read decides.
    for entry in store.list(f"status/{dag}/{task}/" if task_id else f"status/{dag}/"):
        status = _read(store, entry.key)
        if status is None or status.run_key.dag_id != dag_id:
            continue
        if not task_id or status.run_key.task_id == task_id:
            yield status


def _read(store: Store, key: str) -> RunStatus | None:
    try:
        return RunStatus.from_json(store.get(key))
    except ObjectMissing:
        return None
    except ValueError as error:
        log.debug("%s: %s", key, error)
        return None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
