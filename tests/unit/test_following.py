"""Which timeout has passed: separate clocks for queue, start and run."""

import pytest

from airflow_gpu_burst.runs.following import overdue
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Observation, Phase

LIMITS = Timeouts(queue_s=100, start_s=10, run_s=1000)


@pytest.mark.parametrize(
    ("phase", "since", "now", "says"),
    [
        (Phase.QUEUED, None, 99, ""),
        (Phase.QUEUED, None, 101, "queue_timeout is 100 s"),
        (Phase.PREEMPTED, None, 101, "queue_timeout"),
        (Phase.STARTING, None, 11, "start_timeout is 10 s"),
        (Phase.STARTING, 95.0, 101, ""),
        (Phase.RUNNING, 50.0, 1049, ""),
        (Phase.RUNNING, 50.0, 1051, "run_timeout is 1000 s"),
        (Phase.RESTARTING, 50.0, 1051, "run_timeout"),
        (Phase.RUNNING, None, 99999, ""),
        (Phase.SUCCEEDED, 50.0, 99999, ""),
        (Phase.FAILED, 50.0, 99999, ""),
    ],
)
def test_overdue(phase: Phase, since: float | None, now: float, says: str) -> None:
    found = overdue(LIMITS, 0.0, Observation(phase=phase, since=since), now)
    assert (says in found) and bool(found) is bool(says)


@pytest.mark.parametrize("phase", list(Phase))
def test_no_limit_means_no_timeout(phase: Phase) -> None:
    limits = Timeouts(queue_s=None, start_s=None, run_s=None)
    assert overdue(limits, 0.0, Observation(phase=phase), 1e9) == ""
