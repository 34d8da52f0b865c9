"""The search notices every one of these breakages of the production code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.runlog.judge import Violation
from tests.runlog.mutants import MUTANTS, Mutant, load
from tests.runlog.scenarios import SCENARIOS, restarted_rank
from tests.runlog.search import search

log = logging.getLogger(__name__)


def checks_of(mutant: Mutant) -> list[Callable[[ModuleType], None]]:
    if mutant.scenario == "liveness":
        return [restarted_rank]
    found = []
    for scenario in SCENARIOS:
        if scenario.name.startswith(mutant.scenario):
            for faults, crashes in reversed(scenario.budgets):

                def check(runlog: ModuleType, scenario=scenario, faults=faults, crashes=crashes) -> None:
                    world = scenario.world(runlog)
                    first = world.start(scenario.objects(runlog), faults=faults, crashes=crashes)
                    search(world, first, scenario.at_end(runlog), limit=100_000)

                found.append(check)
    assert found, f"no scenario begins with {mutant.scenario!r}"
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_catches(mutant: Mutant, tmp_path: Path) -> None:
    broken = load(mutant, tmp_path)
    caught = None
    for check in checks_of(mutant):
        try:
            check(broken)
        except Violation as violation:
            caught = violation
            log.info("%s: %s", mutant.name, str(violation).partition("\n")[0])
            break
    assert caught is not None, f"{mutant.name}: nothing was noticed"


def test_an_edit_that_does_not_match_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="0 times"):
        load(Mutant("stale", "", (("log", "no such text", ""),)), tmp_path)


def test_without_an_edit_nothing_is_caught(tmp_path: Path) -> None:
    """The loading itself breaks nothing."""
    same = load(Mutant("nothing", "", ()), tmp_path)
    for name in ("a step back", "a reader", "retention", "a ghost of a deleted"):
        for check in checks_of(Mutant("", name, ())):
            check(same)
