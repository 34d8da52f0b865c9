"""The status of a run: phases in order, seconds that add up, a published form, and writers that come late."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst import runs
from airflow_gpu_burst.errors import StoreForbidden, StoreUnavailable
from airflow_gpu_burst.runlog import RunLog
from airflow_gpu_burst.runlog.history import History
from airflow_gpu_burst.runlog.records import Commit, Open, Start
from airflow_gpu_burst.runs import status as statuses
from airflow_gpu_burst.runs.status import MAX_PHASES, MAX_TEXT, Input, LastCheckpoint, RunStatus, status_key
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from airflow_gpu_burst.store import Store, StoreConfig, open_store
from tests.unit.test_spec import FULL

KEY = RunKey(dag_id="däg", task_id="train", run_id="manual 2026 ☃", map_index=3)
HANDLE = Handle(
    connection="gpu", route="direct", kind="Job", namespace="ml", name="gpu-x-g2", uid="u-1", run_key=KEY, generation=2,
    store_connection="store",
)  # fmt: skip
T0 = 1_790_000_000.0
BEGUN = RunStatus.begin(HANDLE, FULL, nodes=1, submitted_at=T0)
SCHEMA = json.loads(resources.files(runs).joinpath("run_status.schema.json").read_text())

LOOKS = st.lists(
    st.tuples(
        st.builds(
            Observation,
            phase=st.sampled_from(Phase),
            reason=st.text(max_size=5),
            message=st.text(max_size=5),
            since=st.none() | st.floats(T0 - 4000, T0 + 9000),
        ),
        st.floats(0, 500),
    ),
    max_size=2 * MAX_PHASES,
)
WAITING = LOOKS.map(lambda looks: [(o, after) for o, after in looks if not o.terminal])


def follow(looks: list[tuple[Observation, float]], status: RunStatus = BEGUN) -> tuple[RunStatus, float]:
    now = status.updated_at
    for observation, after in looks:
        now += after
        status = status.moved(observation, now)
    return status, now


def look(phase: Phase, since: float | None = None, **values: Any) -> Observation:
    return Observation(phase=phase, since=since, **values)


def test_a_run_from_submission_to_its_end() -> None:
    steps = [
        (look(Phase.QUEUED, T0 + 1, reason="Suspended"), 2),
        (look(Phase.QUEUED, T0 + 1, reason="Inadmissible", message="no quota"), 98),
        (look(Phase.RUNNING, T0 + 200, cluster="east"), 200),
        (look(Phase.SUCCEEDED, T0 + 500), 300),
    ]
    status, now = follow(steps)
    assert [(e.phase, e.since - T0) for e in status.phases] == [
        ("SUBMITTED", 0), ("QUEUED", 1), ("RUNNING", 200), ("SUCCEEDED", 500),
    ]  # fmt: skip
    assert status.durations(now + 1e6) == {"SUBMITTED": 1, "QUEUED": 199, "RUNNING": 300}
    assert (status.phase, status.ended_at, status.cluster) == (Phase.SUCCEEDED, T0 + 500, "east")
    assert status.updated_at == T0 + 600


def test_the_same_phase_again_only_changes_what_is_said_of_it() -> None:
    first = BEGUN.moved(look(Phase.QUEUED, T0 + 1), T0 + 2)
    again = first.moved(look(Phase.QUEUED, T0 + 1), T0 + 9)
    assert again.same_as(first) and again.updated_at == T0 + 9
    other = first.moved(look(Phase.QUEUED, T0 + 1, message="third in the queue"), T0 + 9)
    assert not other.same_as(first) and other.phases == first.phases
    assert not first.same_as(None)


@pytest.mark.parametrize(
    ("since", "expected"),
    [(None, 30), (20.0, 20), (5.0, 10), (3600.0, 30)],
    ids=["unknown: now", "known", "before the phase before it", "in the future"],
)
def test_when_a_phase_began(since: float | None, expected: float) -> None:
    queued = BEGUN.moved(look(Phase.QUEUED, T0 + 10), T0 + 11)
    status = queued.moved(look(Phase.RUNNING, None if since is None else T0 + since), T0 + 30)
    assert status.since == T0 + expected


def test_an_end_stays_and_only_another_end_corrects_it() -> None:
    lost, _ = follow([(look(Phase.RUNNING, T0 + 1), 1), (look(Phase.LOST, T0 + 5, reason="Deleted"), 9)])
    assert lost.moved(look(Phase.RUNNING, T0 + 20), T0 + 30) is lost
    won = lost.moved(look(Phase.SUCCEEDED, T0 + 40), T0 + 41)
    assert (won.phase, won.since, won.reason, len(won.phases)) == (Phase.SUCCEEDED, T0 + 5, "", 3)


@given(WAITING)
def test_seconds_add_up_and_times_rise(looks: list[tuple[Observation, float]]) -> None:
    status, now = follow(looks)
    assert status.moved(look(Phase.RUNNING), T0 - 60).updated_at == status.updated_at  # a clock that was set back
    times = [entry.since for entry in status.phases]
    assert times == sorted(times)
    assert sum(status.durations(now + 1).values()) == pytest.approx(now + 1 - T0, abs=0.1)


@given(LOOKS)
def test_what_is_written_fits_the_schema_and_comes_back(looks: list[tuple[Observation, float]]) -> None:
    status = replace(follow(looks)[0], urls={"job": "https://x"}, last_checkpoint=LastCheckpoint(step=7, at="t"))
    data = json.loads(status.to_json())
    jsonschema.validate(data, SCHEMA)
    assert set(data) == set(SCHEMA["properties"]) == set(SCHEMA["required"])
    assert RunStatus.from_json(status.to_json()) == status


def test_a_run_that_flaps_for_days_stays_small_and_loses_no_second() -> None:
    flapping = [(look(phase), 10.0) for _ in range(500) for phase in (Phase.RUNNING, Phase.PREEMPTED)]
    status, now = follow(flapping)
    assert len(status.phases) == MAX_PHASES and len(status.to_json()) < 10_000
    assert status.durations(now) == {"SUBMITTED": 10, "RUNNING": 5000, "PREEMPTED": 4990}
    assert status.submitted_at == T0


def test_long_texts_are_cut() -> None:
    status = BEGUN.moved(look(Phase.QUEUED, reason="r" * 9999, message="m" * 9999), T0)
    assert (len(status.reason), len(status.message)) == (MAX_TEXT, MAX_TEXT)


def test_what_pages_show_of_the_request() -> None:
    data = json.loads(BEGUN.to_json())
    assert (data["gpus"], data["nodes"], data["platform"], data["queue"], data["image"]) == (8, 1, "b300", "q", "img")
    assert data["inputs"]["wafers"] == {
        "catalog": "lake", "table": "fab.wafers", "snapshot_id": "4007696190872148070", "ref": "pin-1",
    }  # fmt: skip
    assert data["cluster"] == {"connection": "gpu", "name": ""}
    assert data["since"] == data["submitted_at"] == "2026-09-21T14:13:20.000+00:00"


def history(*checkpoints: tuple[int, int]) -> History:
    """Of one run; (generation, step) of its checkpoints."""
    common: dict[str, Any] = {"id": "i", "owner": "o"}
    records: list[Any] = []
    for generation, step in checkpoints:
        if not any(isinstance(r, Open) and r.generation == generation for r in records):
            records.append(
                Open(seq=len(records) + 1, generation=generation, at="", spec_digest="d", max_tries=generation,
                     try_number=generation, restore_since=generation, **{**common, "owner": "airflow"})
            )  # fmt: skip
            records.append(
                Start(seq=len(records) + 1, generation=generation, at="", members=(("p", f"n{generation}"),),
                      world_size=1, restore_from=None, **common)
            )  # fmt: skip
            epoch = len(records)
        records.append(
            Commit(seq=len(records) + 1, generation=generation, at=f"at-{step}", epoch=epoch, step=step,
                   manifests={"k": "0"}, **common)
        )  # fmt: skip
    return History.of(records)


def test_the_last_checkpoint_is_the_one_that_a_restart_would_restore() -> None:
    assert BEGUN.with_history(History()).last_checkpoint is None
    known = replace(BEGUN, generation=1).with_history(history((1, 10), (1, 20)))
    assert known.last_checkpoint == LastCheckpoint(step=20, at="at-20")
    assert known.with_history(History()).last_checkpoint is None


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(StoreConfig(uri=f"file://{tmp_path}"))


def test_written_and_read_back(store: Store) -> None:
    assert statuses.read(store, KEY) is None
    assert statuses.write(store, BEGUN)
    assert statuses.read(store, KEY) == BEGUN
    assert BEGUN.inputs["wafers"] == Input(
        catalog="lake", table="fab.wafers", snapshot_id="4007696190872148070", ref="pin-1"
    )


ENDED = BEGUN.moved(look(Phase.FAILED, T0 + 9), T0 + 9)


@pytest.mark.parametrize(
    ("there", "new", "written"),
    [
        (BEGUN, ENDED, True),
        (ENDED, BEGUN, False),
        (ENDED, ENDED.moved(look(Phase.SUCCEEDED), T0 + 10), True),
        (replace(BEGUN, generation=3), ENDED, False),
        (ENDED, replace(BEGUN, generation=3), True),
    ],
    ids=["ended", "late look", "corrected", "late generation", "next generation"],
)
def test_a_late_writer_changes_nothing(store: Store, there: RunStatus, new: RunStatus, written: bool) -> None:
    statuses.write(store, there)
    assert statuses.write(store, new) is written
    assert statuses.read(store, KEY) == (new if written else there)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', "null", '{"version": 1, "phases": []}'])
def test_what_is_no_status_reads_as_none_and_is_replaced(store: Store, text: str) -> None:
    store.put(status_key(KEY), text.encode())
    assert statuses.read(store, KEY) is None
    assert list(statuses.listed(store, "däg")) == []
    assert statuses.write(store, BEGUN) and statuses.read(store, KEY) == BEGUN


def test_no_phase_at_all_is_no_status() -> None:
    with pytest.raises(ValueError, match="next try"):
        RunStatus.from_json(json.dumps({**json.loads(BEGUN.to_json()), "phases": []}))


class Refusing:
    """A store of which one verb fails."""

    def __init__(self, inner: Store, verb: str, error: Exception) -> None:
        self._inner, self._verb, self._error = inner, verb, error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == self._verb:
            raise self._error
        found: Callable[..., Any] = getattr(self._inner, name)
        return found


@pytest.mark.parametrize("error", [StoreForbidden("403"), StoreUnavailable("503")])
@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_store_that_refuses_never_fails_the_run(store: Store, verb: str, error: Exception) -> None:
    refusing: Any = Refusing(store, verb, error)
    assert statuses.write(refusing, BEGUN) is False
    assert statuses.read(store, KEY) is None
    if verb == "get":
        with pytest.raises(type(error)):  # "cannot tell" is not "nothing there"
            statuses.read(refusing, KEY)


def test_runs_are_listed_by_dag_and_task_whatever_their_names_look_like(store: Store) -> None:
    keys = [
        RunKey(dag_id=dag, task_id=task, run_id=run)
        for dag in ("a_b", "a-b", "a") for task in ("t_2", "t-2", "t") for run in ("r 1", "r_1")
    ]  # fmt: skip
    for key in keys:
        statuses.write(store, replace(BEGUN, run_key=key))
        RunLog(store, key.prefix)
        store.put(f"{key.prefix}/log/000000000001.json", b"not a status")
    assert {s.run_key for s in statuses.listed(store, "a_b")} == {k for k in keys if k.dag_id == "a_b"}
    assert {s.run_key for s in statuses.listed(store, "a", "t_2")} == {
        k for k in keys if (k.dag_id, k.task_id) == ("a", "t_2")
    }
    assert list(statuses.listed(store, "never")) == []


def test_what_runs_again_is_counted_from_when_it_did() -> None:
    """A restarted run says since when it first ran, for its timeout; the seconds of its phases are not to follow."""
    moments = [
        (Phase.RUNNING, 10.0, 10.5),
        (Phase.RESTARTING, 10.0, 30.0),
        (Phase.RUNNING, 10.0, 40.0),
        (Phase.RESTARTING, 10.0, 60.0),
        (Phase.SUCCEEDED, 61.0, 61.0),
    ]
    status = RunStatus.begin(HANDLE, FULL, nodes=1, submitted_at=0.0)
    for phase, since, now in moments:
        status = status.moved(Observation(phase=phase, since=since), now)
    assert status.durations(99.0) == {Phase.SUBMITTED: 10.0, Phase.RUNNING: 40.0, Phase.RESTARTING: 11.0}
