"""What is killed when, in a round: drawn from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

from tests.kill.gate import Phase, When

Kind = Literal["agent", "trainer", "runtime", "pod", "restart", "node", "power", "sigterm", "ghost"]
Wake = Literal["start", "commit", "finish"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MEANING: dict[Kind, str] = {
    "agent": "the process that moves the bytes",
    "trainer": "the trainer (of all ranks: their collectives break); the next generation goes on",
    "runtime": "the runtime alone; its container starts again",
    "pod": "all processes of the pod; another pod comes on the same node",
    "restart": "all processes of the container; it starts again in the same pod",
    "node": "the pod, and its node's NVMe is gone; another pod comes on a new node",
    "power": "the pod by a power cut: files on NVMe torn, shortened, lost; another pod comes on the same node",
    "sigterm": "SIGTERM, and SIGKILL after a grace shorter than the upload",
    "ghost": "nothing: all pods of the run stand still, a successor takes over, they wake up",
}
PHASES: tuple[Phase, ...] = ("save", "restore", "commit", "start", "retire", "finish", "any")
_TURNS: tuple[Phase, ...] = (
    "save",
    "restore",
    "commit",
    "save",
    "any",
    "start",
    "restore",
    "save",
    "retire",
    "any",
    "finish",
)
"""Most kills come in a save or a restore. No common divisor with the number of kinds: 99 rounds have all pairs."""
STEPS = 5
_WHEN: tuple[When, ...] = ("before", "during", "after", "after")
_NTH: dict[Phase, int] = {"save": 50, "restore": 6, "commit": 4, "start": 1, "retire": 2, "finish": 1, "any": 100}
"""The highest n for the n-th request of a phase: what a pod left alone asks in this run."""
WAKE: tuple[Wake, ...] = ("start", "commit", "commit", "finish")
_NOT_THERE: dict[Kind, tuple[Phase, ...]] = {"trainer": ("restore", "start", "finish", "any"), "agent": ("start",)}
"""Phases in which there is no such process."""
DELAY_S = (0.3, 2.5)
LAG_S = 0.3
"""Between requests there is work as well: checksums, copies, renames."""


@dataclass(frozen=True)
class Moment:
    """
    When to kill.

    :param phase: which requests are counted; None: by the clock, `delay_s` seconds after the last blow.
    :param lag_s: so long after the answer of that request; 0: at once.
    """

    phase: Phase | None
    nth: int = 1
    when: When = "before"
    delay_s: float = 0.0
    lag_s: float = 0.0

    def __str__(self) -> str:
        if self.phase is None:
            return f"after {self.delay_s:.1f} s"
        lag = f"{self.lag_s:.2f} s " if self.lag_s else ""
        return f"{lag}{self.when} request {self.nth} of {self.phase}"


@dataclass(frozen=True)
class Kill:
    """
    One blow.

    :param rank: whose pod.
    :param grace_s: of sigterm: seconds until SIGKILL.
    :param wake: of ghost: when the successor has come so far.
    """

    kind: Kind
    moment: Moment
    rank: int = 0
    grace_s: float = 0.0
    wake: Wake = "commit"

    def __str__(self) -> str:
        return f"{self.kind} (rank {self.rank}) {self.moment}"


@dataclass(frozen=True)
class Round:
    """
    One run of a job that is killed some times, and then left alone.

    :param keep: commits that stay restorable; all of them are restored in the end.
    :param directory: over a directory instead of an S3 server.
    :param rough: some requests are cut, refused or slow, see `weather.rough`.
    """

    number: int
    seed: int
    world_size: int
    kills: tuple[Kill, ...]
    keep: int = 2
    directory: bool = False
    rough: bool = False

    def __str__(self) -> str:
        kills = ", then ".join(map(str, self.kills))
        where = "a directory" if self.directory else "rough weather" if self.rough else "fair weather"
        return f"round {self.number} of seed {self.seed}, {self.world_size} rank(s), {where}: {kills}"


def draw(seed: int, number: int) -> Round:
    """
    The n-th round of a seed. Kinds and phases take turns, what else there is to choose is chosen at random.
    """
    rng = random.Random(f"{seed}/{number}")
    world_size = 2 if rng.random() < 0.4 else 1
    directory = number % 10 == 9
    rough = not directory and rng.random() < 0.25
    kind = KINDS[(number + seed) % len(KINDS)]
    phase = None if directory or rng.random() < 0.15 else _TURNS[(number + seed) % len(_TURNS)]
    if phase in _NOT_THERE.get(kind, ()):
        phase = "save"
    kills = [_kill(rng, kind, phase, world_size)]
    if phase == "restore":
        kills.insert(0, _before_restore(rng))
    elif kind != "agent" and phase not in (None, "start") and rng.random() < 0.5:
        # Costs no start of a pod, and leaves a save half done.
        kills.insert(0, _kill(rng, "agent", "save", world_size, most=20))
    elif rng.random() < 0.3:
        also = None if directory else rng.choice([other for other in _TURNS if other != "restore"])
        kinds = [other for other in KINDS if other != "ghost" or kind != "ghost"]
        kills.append(_kill(rng, rng.choice(kinds), also, world_size))
    keep = 2 if any(kill.moment.phase == "retire" for kill in kills) else rng.choice((2, STEPS + 1))
    return Round(number, seed, world_size, tuple(kills), keep=keep, directory=directory, rough=rough)


def _kill(rng: random.Random, kind: Kind, phase: Phase | None, world_size: int, most: int = 100) -> Kill:
    # Only rank 0 writes to the log.
    rank = rng.randrange(world_size) if phase in (None, "save", "restore", "any") else 0
    if kind == "trainer":
        most = 40  # later it has ended
    nth = 1 if phase is None else rng.randint(1, min(_NTH[phase], most))
    when = rng.choice(_WHEN)
    lag_s = rng.uniform(0.0, LAG_S) if when == "after" and rng.random() < 0.5 else 0.0
    moment = Moment(phase, nth, when, rng.uniform(*DELAY_S), lag_s)
    wake = rng.choice(WAKE)
    return Kill(kind=kind, moment=moment, rank=rank, grace_s=rng.uniform(0.0, 1.0), wake=wake)


def _before_restore(rng: random.Random) -> Kill:
    """What leaves all ranks with something to restore."""
    kinds: tuple[Kind, ...] = ("pod", "restart", "node", "node", "power")
    return Kill(kind=rng.choice(kinds), moment=Moment("commit", rng.randint(1, 3), "after"))
