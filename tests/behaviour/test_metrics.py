"""Phase durations as metrics: through Airflow's own OpenTelemetry backend, into a reader in memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk._shared.observability.metrics import stats as backend
from airflow.sdk._shared.observability.metrics.otel_logger import SafeOtelLogger
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from airflow_gpu_burst.operators.metrics import record_checkpoints, record_phases, report_phases
from airflow_gpu_burst.state import Phase

DURATIONS = {Phase.QUEUED: 3600.25, Phase.RUNNING: 5.0}


class Collector:
    """What has arrived: (name, milliseconds, tags)."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)
        backend.initialize(factory=lambda: SafeOtelLogger(self._provider), export_legacy_names=True)

    def all(self) -> list[tuple[str, float, dict[str, str]]]:
        data: Any = self._reader.get_metrics_data()
        if data is None:
            return []
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
        return sorted(
            (m.name, p.sum if hasattr(p, "sum") else p.value, dict(p.attributes))
            for m in metrics
            for p in m.data.data_points
        )

    def close(self) -> None:
        self._provider.shutdown()
        backend.initialize(factory=backend.NoStatsLogger, export_legacy_names=True)


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def test_each_phase_is_a_timer_in_milliseconds_with_few_tags(collector: Collector) -> None:
    record_phases(DURATIONS, {"dag_id": "d", "task_id": "t", "cluster": "gpu", "queue": "", "run_id": "one per run"})
    tags = {"dag_id": "d", "task_id": "t", "cluster": "gpu"}
    assert collector.all() == [
        ("airflow.gpu_burst.phase.queued", 3_600_250.0, tags),
        ("airflow.gpu_burst.phase.running", 5000.0, tags),
    ]


CHECKPOINTS = {
    "committed": 3,
    "bytes": 12e9,
    "seconds": 20.5,
    "rate": 6e8,
    "stall_s": 0.004,
    "retries": 2,
    "skipped": 1,
}


def test_what_checkpoints_cost_is_sent_beside_the_phases(collector: Collector) -> None:
    record_checkpoints(CHECKPOINTS, {"dag_id": "d", "run_id": "one per run"})
    found = {name.removeprefix("airflow.gpu_burst.checkpoint."): value for name, value, _ in collector.all()}
    assert found == {
        "seconds": 20_500.0,
        "stall": 4.0,
        "restore": 0.0,
        "committed": 3,
        "bytes": 12_000_000_000,
        "retries": 2,
        "skipped": 1,
        "failed": 0,
        "restored_bytes": 0,
        "rate": 6e8,
    }
    assert {tuple(tags.items()) for _, _, tags in collector.all()} == {(("dag_id", "d"),)}


def test_a_run_without_checkpoints_sends_nothing_of_them(collector: Collector) -> None:
    report_phases(Task(), {}, cluster="gpu", queue="q", checkpoints=None)
    assert collector.all() == []


def test_the_end_of_a_task_sends_them_with_its_tags(collector: Collector) -> None:
    report_phases(Task(), {}, cluster="gpu", queue="q", checkpoints=CHECKPOINTS)
    assert ("airflow.gpu_burst.checkpoint.committed", 3) in [found[:2] for found in collector.all()]
    assert collector.all()[0][2] == {"dag_id": "d", "task_id": "t", "cluster": "gpu", "queue": "q"}


def test_a_clock_that_was_set_back_gives_no_negative_time(collector: Collector) -> None:
    record_phases({Phase.QUEUED: -3.0}, {})
    assert collector.all() == [("airflow.gpu_burst.phase.queued", 0.0, {})]


class Task:
    """A task instance of which only `xcom_push` is asked."""

    dag_id, task_id = "d", "t"

    def __init__(self, error: Exception | None = None) -> None:
        self.pushed: dict[str, Any] = {}
        self._error = error

    def xcom_push(self, key: str, value: Any) -> None:
        if self._error:
            raise self._error
        self.pushed[key] = value


def test_the_end_of_a_task_pushes_and_sends_them(collector: Collector) -> None:
    task = Task()
    report_phases(task, {Phase.QUEUED: 1.23456}, cluster="gpu", queue="q")
    assert task.pushed == {"gpu_burst_phase_seconds": {"QUEUED": 1.235}}
    assert collector.all()[0][2] == {"dag_id": "d", "task_id": "t", "cluster": "gpu", "queue": "q"}


def test_neither_metrics_nor_xcom_out_of_order_fails_a_task(collector: Collector) -> None:
    report_phases(Task(RuntimeError("no API server")), DURATIONS, cluster="gpu", queue="q")
    assert len(collector.all()) == 2
    backend.initialize(factory=lambda: SimpleNamespace(), export_legacy_names=True)  # type: ignore[arg-type, return-value]
    report_phases(task := Task(), DURATIONS, cluster="gpu", queue="q", checkpoints=CHECKPOINTS)
    assert set(task.pushed["gpu_burst_phase_seconds"]) == {"QUEUED", "RUNNING"}


def test_without_a_backend_nothing_happens() -> None:
    record_phases(DURATIONS, {"dag_id": "d"})
