"""Every order of events at small scope. `RUNLOG_SEARCH=large` adds an hour of rarer ones."""

from __future__ import annotations

import logging
import os

import pytest

from airflow_gpu_burst import runlog
from tests.runlog.judge import Judge, Violation, records
from tests.runlog.scenarios import SCENARIOS, Scenario, restarted_rank
from tests.runlog.search import search

log = logging.getLogger(__name__)

LARGE = os.environ.get("RUNLOG_SEARCH") == "large"

RUNS = [
    pytest.param(
        scenario,
        budget,
        id=f"{scenario.name} ({budget[0]} faults, {budget[1]} crashes)",
        marks=[pytest.mark.timeout(0)] if LARGE else [],
    )
    for scenario in SCENARIOS
    for budget in (*scenario.budgets, *(scenario.large if LARGE else ()))
]


@pytest.mark.parametrize(("scenario", "budget"), RUNS)
def test_every_order_of_events(scenario: Scenario, budget: tuple[int, int]) -> None:
    faults, crashes = budget
    world = scenario.world(runlog)
    first = world.start(scenario.objects(runlog), faults=faults, crashes=crashes)
    report = search(world, first, scenario.at_end(runlog), limit=6_000_000 if LARGE else 500_000)
    log.info("%s", report)
    if budget in scenario.large and not report.complete:
        pytest.skip(f"nothing wrong, but too large to finish: {report}")
    assert report.complete
    assert any("finished" in ends or "submitted" in " ".join(ends) for ends in report.outcomes)


def test_a_rank_that_restarts_is_named_anew() -> None:
    restarted_rank(runlog)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"seq": 9}, id="a place that is not its own"),
        pytest.param({"kind": "close", "verdict": "succeeded", "reason": ""}, id="success without a result"),
        pytest.param({"kind": "open"}, id="a generation before the last is closed"),
        pytest.param({"owner": "B"}, id="another owner in an epoch"),
        pytest.param({"epoch": 1}, id="an epoch that is not the newest"),
    ],
)
def test_the_judge_is_awake(change: dict[str, object]) -> None:
    """A judge that lets everything pass would make every search a success."""
    scenario = next(s for s in SCENARIOS if s.name.startswith("a step back"))
    objects = scenario.objects(runlog)
    log = records(objects)
    commit = next(r for r in reversed(log) if r["kind"] == "commit")
    forged = {**commit, "id": "forged", "seq": len(log) + 1, **change}
    data = runlog.records.dumps(forged)
    with pytest.raises(Violation):
        Judge().written(f"run/log/{len(log) + 1:012d}.json", data, objects)
