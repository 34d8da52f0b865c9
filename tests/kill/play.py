"""Plays a round: a run whose pods are killed when the round says so, and which is then left alone and judged."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from airflow_gpu_burst.errors import ExitCode
from airflow_gpu_burst.runlog.records import Commit, Finish, Start
from airflow_gpu_burst.store import StoreConfig
from tests.kill.cluster import Cluster
from tests.kill.gate import Asked, Trap, Weather
from tests.kill.judge import problems
from tests.kill.pods import Pod
from tests.kill.rounds import STEPS, Kill, Round
from tests.kill.weather import fair, rough

DEADLINE_S = 180.0
"""Of a round; one takes 3 to 15 s on two idle cores."""
PAUSE_S = 0.25
"""Of a step of training."""
SIGNALS = {
    "ghost": (signal.SIGSTOP, ""),
    "sigterm": (signal.SIGTERM, "runtime"),
    "trainer": (signal.SIGKILL, "trainer"),
    "runtime": (signal.SIGKILL, "runtime"),
    "agent": (signal.SIGKILL, "agent"),
}
"""What each kind of kill sends to which processes; others SIGKILL to all of the pod."""


@dataclass
class Blow:
    """
    What became of one kill.

    :param at: the request at which it came, or when.
    :param hit: whether there was something to kill.
    """

    kill: Kill
    at: str = ""
    hit: bool = False


@dataclass
class Outcome:
    """
    What became of a round.

    :param wrong: what must not be; empty: all is well.
    :param restored: epochs that restored a checkpoint.
    """

    round: Round
    blows: list[Blow] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    epochs: int = 0
    commits: int = 0
    restored: int = 0
    seconds: float = 0.0


class Play:
    """
    One round.

    :param config: an empty place in a store.
    :param home: a folder, for nodes and logs.
    :param weather: what the store is like, see `Gate`; None: as the round says.
    """

    def __init__(self, round: Round, config: StoreConfig, home: Path, *, weather: Weather | None = None) -> None:
        self.outcome = Outcome(round)
        name = f"{round.seed}/{round.number}"
        self.cluster = Cluster(
            config,
            home,
            world_size=round.world_size,
            keep=round.keep,
            params={"seed": round.seed * 1000 + round.number, "steps": STEPS, "pause_s": PAUSE_S},
            weather=weather or (rough(name) if round.rough else fair),
            rng=random.Random(f"{name}/play"),
            started=self._arm,
            wrong=self.outcome.wrong.append,
        )
        self._kills = list(round.kills)
        self._blow: Blow | None = None
        self._struck = threading.Event()
        self._awake = threading.Event()
        self._since = time.monotonic()
        self._due: list[tuple[float, Pod]] = []
        self._wake: tuple[type[Start | Commit | Finish], int] | None = None
        self._look_at = 0.0

    def run(self) -> Outcome:
        """To the end; nothing of it is left."""
        began = self._since = time.monotonic()
        try:
            self.cluster.submit()
            while not self.cluster.failed and not self.cluster.is_over:
                self._strike_by_the_clock()
                self._follow_up()
                self._wake_ghosts()
                self.cluster.tend()
                if time.monotonic() - began > DEADLINE_S:
                    self.outcome.wrong.append(f"not done after {DEADLINE_S:.0f} s: the run makes no progress")
                    break
                time.sleep(0.02)
        finally:
            self._awake.set()
            self.cluster.end()
        self._conclude()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def logs(self) -> str:
        """What the pods said."""
        pods = self.cluster.all
        return "\n".join(f"--- {pod.log.name} (exit {pod.code})\n{_read(pod)}" for pod in pods)

    def _arm(self, pod: Pod) -> None:
        """Set the next kill's trap on this pod, if it is its victim."""
        if not self._kills or self._blow is not None or self._kills[0].rank != pod.rank or pod.gate is None:
            return
        kill = self._kills[0]
        if kill.moment.phase is not None:
            pod.gate.arm(Trap(kill.moment.phase, kill.moment.nth, kill.moment.when, self._striker(kill, pod)))

    def _striker(self, kill: Kill, pod: Pod) -> Callable[[Asked], None]:
        def at_once(asked: Asked) -> None:
            self._strike(kill, pod, asked)

        def later(asked: Asked) -> None:
            threading.Timer(kill.moment.lag_s, self._strike, (kill, pod, asked, False)).start()

        return later if kill.moment.lag_s else at_once

    def _strike_by_the_clock(self) -> None:
        if not self._kills or self._blow is not None or self._kills[0].moment.phase is not None:
            return
        if time.monotonic() - self._since >= self._kills[0].moment.delay_s:
            self._strike(self._kills[0], self.cluster.pods[self._kills[0].rank], None)

    def _strike(self, kill: Kill, pod: Pod, asked: Asked | None, held: bool = True) -> None:
        """Only signals, and at once: this runs while the request is held."""
        if self.cluster.pods[kill.rank] is not pod or self._blow is not None:
            return  # what a pod that is over had still under way
        self._blow = blow = Blow(kill, str(asked or f"{kill.moment.delay_s:.1f} s"))
        victims = list(self.cluster.pods.values()) if kill.kind in ("ghost", "trainer") else [pod]
        number, role = SIGNALS.get(kill.kind, (signal.SIGKILL, ""))
        for victim in victims:
            before, victim.struck = victim.struck, kill.kind  # before its end can be seen
            hit = victim.signal(number, role)
            blow.hit |= hit
            if not hit or kill.kind in ("agent", "ghost"):
                victim.struck = before
        self._struck.set()
        if kill.kind == "ghost" and blow.hit and asked is not None and held:
            self._awake.wait()  # its packets are as late as it is

    def _follow_up(self) -> None:
        """After a blow: what does not wait for a process's end."""
        if self._blow is None or not self._struck.is_set():
            return
        blow, kill = self._blow, self._blow.kill
        self.outcome.blows.append(blow)
        self._kills.pop(0)
        self._struck.clear()
        self._blow, self._since = None, time.monotonic()
        if kill.kind == "sigterm":
            self._due.append((time.monotonic() + kill.grace_s, self.cluster.pods[kill.rank]))
        if kill.kind == "ghost" and blow.hit:
            record: type[Start | Commit | Finish] = {"start": Start, "commit": Commit, "finish": Finish}[kill.wake]
            self._wake = (record, len(self.cluster.facts.records()))
            self.cluster.cut_off()  # arms what is next
        elif self._kills:
            self._arm(self.cluster.pods[self._kills[0].rank])

    def _wake_ghosts(self) -> None:
        for due, pod in list(self._due):
            if time.monotonic() >= due:
                pod.signal(signal.SIGKILL)
                self._due.remove((due, pod))
        if self._wake is None or self._awake.is_set() or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + 0.2
        record, since = self._wake
        if any(isinstance(found, (record, Finish)) for found in self.cluster.facts.records()[since:]):
            self._awake.set()
            for ghost in self.cluster.ghosts:
                ghost.signal(signal.SIGCONT)

    def _conclude(self) -> None:
        self.outcome.blows += [Blow(kill, "not reached") for kill in self._kills]
        try:
            records = self.cluster.facts.records()
            starts = [record for record in records if isinstance(record, Start)]
            self.outcome.epochs = len(starts)
            self.outcome.restored = sum(start.restore_from is not None for start in starts)
            self.outcome.commits = sum(isinstance(record, Commit) for record in records)
            self.outcome.wrong += problems(self.cluster.facts)
        except Exception as error:
            self.outcome.wrong.append(f"what is left cannot be judged: {type(error).__name__}: {error}")
        for pod in self.cluster.all:
            if pod.code == ExitCode.TRAINER_FAILED and "is not what was saved" in _read(pod):
                self.outcome.wrong.append(f"the trainer of {pod.uid} refused what it was given")


def _read(pod: Pod) -> str:
    return pod.log.read_text(encoding="utf-8", errors="replace")
