"""
Pods, processes and nodes are killed at drawn moments of a save and of a restore, as docs/kill-test.md tells.

The seed is of the day, the same in all processes of a test run; KILL_SEED names another. A failure says its round:
`KILL_SEED=20260101 pytest tests/kill -k 'rounds and 12'`.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
import uuid
from pathlib import Path

import pytest

from airflow_gpu_burst.store import StoreConfig
from tests.kill.campaign import campaign, play_many
from tests.kill.gate import Asked
from tests.kill.play import Play
from tests.kill.rounds import STEPS, Kill, Moment, Round, draw
from tests.lab_fixtures import Stack

SEED = int(os.environ.get("KILL_SEED") or f"{datetime.datetime.now(datetime.UTC):%Y%m%d}")
AT_ONCE = 3
LAB_ROUNDS = 300


@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", range(0, 30, AT_ONCE))
def test_rounds(first: int, place: StoreConfig, tmp_path: Path) -> None:
    rounds = [draw(SEED, number) for number in range(first, first + AT_ONCE)]
    stories = play_many(rounds, place, tmp_path, jobs=AT_ONCE)
    assert not stories, "\n\n".join(stories)


def test_what_a_trainer_without_a_runtime_still_saves_belongs_to_no_epoch(place: StoreConfig, tmp_path: Path) -> None:
    """Its checkpoints would be committed by the next start, as that epoch's own; found by a round of this test."""

    def slow_to_start(asked: Asked) -> None:
        time.sleep(2.0 if asked.of("start") else 0.0)

    kills = (Kill("runtime", Moment("commit", 1, "after")),)
    config = dataclasses.replace(place, uri=f"{place.uri}/{uuid.uuid4().hex}")
    game = Play(Round(0, 1, 1, kills, keep=STEPS + 1), config, tmp_path, weather=slow_to_start)
    outcome = game.run()
    assert outcome.blows[0].hit and outcome.restored == 1, game.logs()
    assert not outcome.wrong, "\n".join([*outcome.wrong, game.logs()])


@pytest.mark.lab_full
@pytest.mark.timeout(3 * 3600)
def test_rounds_against_a_real_server(stack: Stack, tmp_path: Path) -> None:
    results = Path(os.environ.get("KILL_RESULTS") or tmp_path / "results.jsonl")
    home = tmp_path / "rounds"
    stories = campaign(SEED, LAB_ROUNDS, stack.store(), results, home, about="the lab's S3 server", jobs=4)
    assert not stories, "\n\n".join(stories)


def test_the_rounds_of_a_seed_kill_everything_in_every_phase() -> None:
    """Draws only: with what CI plays, each kind in most phases; in a lab's rounds all of them."""
    kinds = {kill.kind for number in range(30) for kill in draw(SEED, number).kills}
    assert len(kinds) == 9
    pairs = {(kill.kind, kill.moment.phase) for number in range(LAB_ROUNDS) for kill in draw(SEED, number).kills}
    assert len(pairs) >= 60
