"""Seconds in each phase of a run, and what its checkpoints cost, as Airflow's own metrics and as XCom."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk.observability import stats

from airflow_gpu_burst.state import Phase

log = logging.getLogger(__name__)

PHASE_SECONDS_KEY = "gpu_burst_phase_seconds"
"""XCom key: phase → seconds."""

TAGS = ("dag_id", "task_id", "cluster", "queue")
"""Tags that metrics may carry. A run id, object name or snapshot would make one time series per run."""

_CHECKPOINT = "gpu_burst.checkpoint"
_TIMERS = {"seconds": "seconds", "stall": "stall_s", "restore": "restore_s"}
_COUNTERS = ("committed", "bytes", "retries", "skipped", "failed", "restored_bytes")


def record_phases(durations: Mapping[Phase, float], tags: Mapping[str, str]) -> None:
    """
    Emit the timer `gpu_burst.phase.<phase>` for each phase, by whatever backend Airflow is set up with (StatsD,
    Datadog, OpenTelemetry; none by default). Never raises.

    To be called where the task ends, on the worker: in a triggerer's process (3.3.2) the metrics of the task SDK are
    not set up, and go nowhere.

    :param durations: seconds.
    :param tags: only those of TAGS are sent, and none that is empty.
    """
    sent = {name: tags[name] for name in TAGS if tags.get(name)}
    for phase, seconds in durations.items():
        try:
            stats.timing(f"gpu_burst.phase.{phase.lower()}", timedelta(seconds=max(0.0, seconds)), tags=sent)
        except Exception as error:  # a metrics backend out of order is no reason to lose a result
            log.debug("the metric of phase %s was not sent: %s", phase, error)


def record_checkpoints(numbers: Mapping[str, float] | None, tags: Mapping[str, str]) -> None:
    """
    Emit what checkpoints cost, at the end of a task. Never raises; see `record_phases` for where it goes.

    Timers `gpu_burst.checkpoint.seconds`, `.stall` and `.restore`, counters `.committed`, `.bytes`, `.retries`,
    `.skipped`, `.failed` and `.restored_bytes`, gauge `.rate` (bytes per second).

    :param numbers: `PodResult.checkpoints`; None: there was none.
    :param tags: as in `record_phases`.
    """
    if not numbers:
        return
    sent = {name: tags[name] for name in TAGS if tags.get(name)}
    try:
        for name, key in _TIMERS.items():
            stats.timing(f"{_CHECKPOINT}.{name}", timedelta(seconds=float(numbers.get(key, 0.0))), tags=sent)
        for name in _COUNTERS:
            stats.incr(f"{_CHECKPOINT}.{name}", int(numbers.get(name, 0)), tags=sent)
        stats.gauge(f"{_CHECKPOINT}.rate", float(numbers.get("rate", 0.0)), tags=sent)
    except Exception as error:
        log.debug("the metrics of checkpoints were not sent: %s", error)


def report_phases(
    ti: Any,
    durations: Mapping[Phase, float],
    *,
    cluster: str,
    queue: str,
    checkpoints: Mapping[str, float] | None = None,
) -> None:
    """
    At the end of a task, well or not: push the seconds as XCom, and emit them as metrics, and what checkpoints cost.

    :param ti: Airflow's task instance.
    :param durations: seconds.
    :param cluster: connection id, or name, of the cluster.
    :param checkpoints: `PodResult.checkpoints`, if there is a result.
    """
    rounded = {str(phase): round(seconds, 3) for phase, seconds in durations.items()}
    try:
        ti.xcom_push(key=PHASE_SECONDS_KEY, value=rounded)
    except Exception as error:
        log.warning("the seconds of the phases were not pushed as XCom: %s", error)
    tags = {"dag_id": ti.dag_id, "task_id": ti.task_id, "cluster": cluster, "queue": queue}
    record_phases(durations, tags)
    record_checkpoints(checkpoints, tags)
