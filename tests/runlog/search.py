"""Every order of events, up to a scope: depth first over states, each visited once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.runlog.judge import Violation
from tests.runlog.world import Label, State, World


@dataclass
class Report:
    """What a search has covered."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    complete: bool = False
    seconds: float = 0.0
    outcomes: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def __str__(self) -> str:
        whole = "complete" if self.complete else "NOT complete"
        return f"{self.states} states, {self.transitions} transitions, {self.ends} ends, {self.seconds:.1f} s, {whole}"


def search(
    world: World,
    first: State,
    at_end: Callable[[World, State], None] | None = None,
    *,
    limit: int = 2_000_000,
) -> Report:
    """Visit all states that can be reached. Raises Violation with the steps that lead to it."""
    began = time.monotonic()
    report = Report()
    came_from: dict[int, tuple[int, Label] | None] = {world.key(first): None}
    todo = [first]
    while todo and report.states < limit:
        state = todo.pop()
        report.states += 1
        here = world.key(state)
        label: Label | None = None
        try:
            labels = world.labels(state)
            if not labels:
                report.ends += 1
                report.outcomes[tuple(world.outcome(state, i) for i in range(len(state.nodes)))] += 1
                if at_end:
                    at_end(world, state)
            for label in labels:
                report.transitions += 1
                after = world.apply(state, label)
                key = world.key(after)
                if key not in came_from:
                    came_from[key] = (here, label)
                    todo.append(after)
            label = None
        except Violation as violation:
            raise Violation(f"{violation}\n{_story(world, first, _path(came_from, here), label)}") from violation
    report.complete = not todo
    report.seconds = time.monotonic() - began
    return report


def _path(came_from: dict[int, tuple[int, Label] | None], key: int) -> list[Label]:
    labels = []
    while (step := came_from[key]) is not None:
        key, label = step
        labels.append(label)
    return labels[::-1]


def _story(world: World, state: State, path: list[Label], last: Label | None) -> str:
    lines = []
    for label in path:
        lines.append(world.describe(state, label))
        state = world.apply(state, label)
    if last:
        lines.append(world.describe(state, last))
    return "\n".join(f"  {number}. {line}" for number, line in enumerate(lines, 1))
