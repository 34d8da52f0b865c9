"""
`python -m tests.kill.campaign --rounds N --seed S RESULTS`: plays rounds, some at a time, and notes what came of them.

A line of JSON about the whole, then one for each round, as it ends. The same again goes on with what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from airflow_gpu_burst.store import StoreConfig, open_store
from airflow_gpu_burst.transfer import open_mover
from tests.kill.play import Outcome, Play
from tests.kill.rounds import Round, draw
from tests.kill.server import serving

JOBS = 4
"""Rounds at a time: most of a round waits."""
Told = Callable[[Outcome, str], None]


def play(round: Round, store: StoreConfig, home: Path) -> tuple[Outcome, str]:
    """
    Play one round in a place of its own. What came of it, and what there is to read if it went wrong; its folder stays
    then.

    :param store: where such places are.
    """
    home.mkdir(parents=True)
    if round.directory:
        config = StoreConfig(uri=f"file://{home}/store")
        (home / "store").mkdir()
    else:
        config = dataclasses.replace(store, uri=f"{store.uri}/{uuid.uuid4().hex}")
    game = Play(round, config, home)
    outcome = game.run()
    if not outcome.wrong:
        _clear(config)
        shutil.rmtree(home)
        return outcome, ""
    blows = [f"  {blow.kill}: at {blow.at}, {'hit' if blow.hit else 'hit nothing'}" for blow in outcome.blows]
    return outcome, "\n".join([str(round), *outcome.wrong, *blows, f"in {home}", game.logs()])


def _clear(config: StoreConfig) -> None:
    """Hundreds of rounds would not fit into a server that keeps its objects in memory."""
    mover = open_mover(config)
    keys = [entry.key for entry in open_store(config).list("")]
    for key in keys:
        if key.endswith(".upload"):
            mover.abandon(key.removesuffix(".upload"))
    mover.delete(keys)
    mover.close()


def play_many(
    rounds: Iterable[Round],
    store: StoreConfig,
    home: Path,
    *,
    jobs: int = JOBS,
    told: Told | None = None,
) -> list[str]:
    """
    Play rounds; the stories of those that went wrong.

    :param told: of each, as it ends.
    """
    stories: list[str] = []

    def one(round: Round) -> None:
        outcome, story = play(round, store, home / f"round-{round.number}")
        if story:
            stories.append(story)
        if told:
            told(outcome, story)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, rounds))
    return stories


def campaign(
    seed: int, rounds: int, store: StoreConfig, results: Path, home: Path, *, about: str, jobs: int
) -> list[str]:
    """
    Play the first rounds of a seed and write them down; the stories of those that went wrong.

    :param about: what the store is, for people.
    """
    date = time.strftime("%Y-%m-%d", time.gmtime())
    head = {"date": date, "seed": seed, "store": about, "jobs": jobs, "cores": os.cpu_count()}
    lock = threading.Lock()

    def note(line: dict[str, Any]) -> None:
        with lock, results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def told(outcome: Outcome, story: str) -> None:
        note(dataclasses.asdict(outcome))
        sys.stderr.write(f"{story}\n{outcome.round}: {outcome.seconds:.1f} s\n".lstrip())

    if not results.exists():
        note(head)
    first, *lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    if first["seed"] != seed:
        raise SystemExit(f"{results} holds rounds of seed {first['seed']}: name another file")
    there = {line["round"]["number"] for line in lines}
    missing = [draw(seed, number) for number in range(rounds) if number not in there]
    return play_many(missing, store, home, jobs=jobs, told=told)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1: something went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill.campaign")
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=JOBS)
    given = parser.parse_args(argv)
    home = Path(tempfile.mkdtemp(prefix="kill-"))
    with serving() as store:
        stories = campaign(
            given.seed,
            given.rounds,
            store,
            given.results,
            home,
            about="the S3 server of tests/faulty_s3.py",
            jobs=given.jobs,
        )
    if not stories:
        shutil.rmtree(home)
    return 1 if stories else 0


if __name__ == "__main__":
    sys.exit(main())
