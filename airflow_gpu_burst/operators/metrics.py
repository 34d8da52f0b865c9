"""Seconds in each phase of a run, as Airflow's own metrics and as XCom."""

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


def report_phases(ti: Any, durations: Mapping[Phase, float], *, cluster: str, queue: str) -> None:
    """
    At the end of a task, well or not: push the seconds as XCom, and emit them as metrics.

    :param ti: Airflow's task instance.
    :param durations: seconds.
    :param cluster: connection id, or name, of the cluster.
    """
    rounded = {str(phase): round(seconds, 3) for phase, seconds in durations.items()}
    try:
        ti.xcom_push(key=PHASE_SECONDS_KEY, value=rounded)
    except Exception as error:
        log.warning("the seconds of the phases were not pushed as XCom: %s", error)
    record_phases(durations, {"dag_id": ti.dag_id, "task_id": ti.task_id, "cluster": cluster, "queue": queue})
