"""A whole run over a store, a clock or a disk that fails: it ends right, or it ends with words and without damage."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst.errors import ExitCode
from airflow_gpu_burst.runlog.records import Commit, Start
from airflow_gpu_burst.store import StoreConfig
from tests.kill.gate import Asked, Spoilt, Weather
from tests.kill.play import Play
from tests.kill.rounds import Kill, Moment, Round
from tests.kill.weather import clock, empty_listing, error, flipped, once, wrong_checksum

RESTORES = (Kill("pod", Moment("commit", 3, "after")),)
"""A pod that is killed after its third commit, so that there is a restore as well."""

pytestmark = pytest.mark.lab_full  # 22 stories of 10 to 30 s each


@pytest.fixture
def run(place: StoreConfig, tmp_path: Path) -> Callable[..., Play]:
    """Play a run in such weather."""

    def play(weather: Weather | None, kills: tuple[Kill, ...] = RESTORES) -> Play:
        config = dataclasses.replace(place, uri=f"{place.uri}/{uuid.uuid4().hex}")
        game = Play(Round(0, 1, 1, kills), config, tmp_path, weather=weather)
        game.run()
        return game

    return play


def story(game: Play) -> str:
    return "\n".join([*game.outcome.wrong, game.logs()])


def commits(game: Play) -> list[int]:
    return [record.step for record in game.cluster.facts.records() if isinstance(record, Commit)]


def is_data(asked: Asked) -> bool:
    return "/data/" in asked.target


def is_part(asked: Asked) -> bool:
    return "partNumber=" in asked.target


def completes(asked: Asked) -> bool:
    return asked.method == "POST" and "uploadId=" in asked.target


def is_large(asked: Asked) -> bool:
    return asked.of("restore") and "manifest" not in asked.target


def lists(asked: Asked) -> bool:
    return asked.method == "GET" and "list-type=2" in asked.target


def cuts(share: float) -> Weather:
    """Of all requests for data such a share is cut somewhere."""
    rng = random.Random(1)
    places = [Spoilt(cut="before"), Spoilt(cut="during"), Spoilt(cut="after")]
    return lambda asked: rng.choice(places) if is_data(asked) and rng.random() < share else None


def always(matches: Callable[[Asked], bool], spoilt: Spoilt) -> Weather:
    return lambda asked: spoilt if matches(asked) else None


SLOW_DOWN = Spoilt(answer=error("503 Slow Down", "SlowDown", "Retry-After: 1"))
NO_UPLOAD = Spoilt(answer=error("404 Not Found", "NoSuchUpload"))
LIES = Spoilt(change=wrong_checksum)
LOST = Spoilt(cut="after")
OVERCOME: dict[str, Weather] = {
    "slow": always(is_data, Spoilt(rate=15e6)),
    "cuts connections": cuts(0.1),
    "throttles": once(is_data, SLOW_DOWN, times=4),
    "fails for a while": once(is_data, Spoilt(answer=error("500 Internal Server Error", "InternalError")), times=4),
    "200 with an error inside": once(completes, Spoilt(answer=error("200 OK", "InternalError"))),
    "forgets an upload at a part": once(is_part, NO_UPLOAD),
    "forgets an upload at its end": once(completes, NO_UPLOAD),
    "loses the answer to an upload's end": once(completes, LOST, times=2),
    "lies once about a checksum": once(completes, LIES),
    "a bit flips on the way back": once(is_large, Spoilt(change=flipped)),
    "lists late": lambda asked: Spoilt(answer=empty_listing(asked)) if lists(asked) else None,
    "loses the answer to commits": once(lambda asked: asked.of("commit"), LOST, times=3),
    "loses the answer to the start": once(lambda asked: asked.of("start"), LOST),
    "loses the answer to the finish": once(lambda asked: asked.of("finish"), LOST),
}


@pytest.mark.parametrize("name", OVERCOME)
def test_a_store_that_fails_is_overcome(run: Callable[..., Play], name: str) -> None:
    game = run(OVERCOME[name])
    assert not game.outcome.wrong, story(game)
    assert game.outcome.restored >= 1, story(game)
    assert "could not be saved" not in game.logs(), "overcome only by saving all of it once more"


def test_a_store_that_always_lies_about_checksums_holds_no_checkpoint(run: Callable[..., Play]) -> None:
    game = run(always(lambda asked: is_data(asked) and asked.method in ("POST", "PUT", "HEAD"), LIES), ())
    assert commits(game) == [], story(game)
    assert game.cluster.pods[0].code not in (0, None), story(game)
    assert game.cluster.pods[0].word["reason"] == "ChecksumMismatch", story(game)


def test_a_checkpoint_that_rots_in_the_store_is_left_out(run: Callable[..., Play]) -> None:
    """Every answer for one object has a bit wrong: the run goes on from the commit before."""
    rotten: list[str] = []

    def weather(asked: Asked) -> Spoilt | None:
        if is_large(asked) and not rotten:
            rotten.append(asked.target)
        return Spoilt(change=flipped) if asked.method == "GET" and asked.target in rotten else None

    game = run(weather, (Kill("node", Moment("commit", 3, "after")),))
    records = game.cluster.facts.records()
    last = [record for record in records if isinstance(record, Start)][-1]
    assert [commit.step for commit in records if commit.seq in last.damaged and isinstance(commit, Commit)] == [3]
    assert any(commit.seq == last.restore_from for commit in records if isinstance(commit, Commit)), story(game)
    assert game.cluster.pods[0].code == ExitCode.OK, story(game)


def moved(asked: Asked) -> bool:
    """What the agent asks; the runtime's own requests are for log and result."""
    return is_data(asked) and "/result/" not in asked.target


CLOCKS: dict[str, Weather] = {
    "ahead": clock(3 * 3600, moved),
    "behind": clock(-3 * 3600, moved),
    "jumps back": clock(0, moved, jump_s=-3600, after=30),
    "jumps ahead and is set right": clock(0, jump_s=3600, after=60, until=66),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks_that_differ_and_jump(run: Callable[..., Play], name: str) -> None:
    game = run(CLOCKS[name])
    assert not game.outcome.wrong, story(game)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A small file system as the first node's NVMe."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        if os.getuid() != 0:
            pytest.skip("NOT TESTED: a full disk needs root, to mount a small file system")
        at = tmp_path / "node-1"
        at.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"NOT TESTED: a full disk needs a small file system: {done.stderr}")
        mounted.append(at)
        return at

    yield mount
    for at in mounted:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_a_disk_with_room_for_few_checkpoints_is_enough(run: Callable[..., Play], disk: Callable[[int], Path]) -> None:
    """Kept copies go, oldest first, before the trainer meets a full disk."""
    disk(34 << 20)
    game = run(None)
    assert not game.outcome.wrong, story(game)
    assert game.outcome.restored >= 1


def test_a_disk_too_small_for_one_checkpoint_fails_with_words_and_commits_nothing(
    run: Callable[..., Play], disk: Callable[[int], Path]
) -> None:
    disk(2 << 20)
    game = run(None, ())
    assert commits(game) == [], story(game)
    assert game.cluster.pods[0].code == ExitCode.TRAINER_FAILED, story(game)
    assert "No space left" in game.logs()
