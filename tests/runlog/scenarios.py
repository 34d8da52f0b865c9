"""Small casts whose every order of events is tried, and what must hold at each end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from tests.runlog.actors import airflow, ghost_of_a_deleted_run, pod, reader
from tests.runlog.judge import Violation, records, require
from tests.runlog.world import Actor, Env, Op, State, World, run_alone

Objects = dict[str, bytes]


@dataclass(frozen=True)
class Scenario:
    """
    :param before: bodies that run undisturbed, one after the other (in a tuple: together), to make what the
        cast finds.
    :param never: (actor, outcome) that must not be.
    :param budgets: (faults, crashes) of each search; `large` ones only when more time is given.
    """

    name: str
    cast: tuple[Actor, ...] | Callable[[ModuleType], tuple[Actor, ...]]
    before: tuple[Callable[[Env], str] | tuple[Callable[[Env], str], ...], ...] = (airflow(),)
    ranks: int = 1
    budgets: tuple[tuple[int, int], ...] = ((0, 0),)
    large: tuple[tuple[int, int], ...] = ()
    spoil: Callable[[Objects], Objects] | None = None
    eager: Callable[[Op, Objects], bool] | None = None
    never: tuple[tuple[str, str], ...] = ()
    oracles: bool = True
    groups: tuple[tuple[int, ...], ...] = ()

    def world(self, runlog: ModuleType) -> World:
        cast = self.cast(runlog) if callable(self.cast) else self.cast
        eager = self.eager or (_alone if self.ranks == 1 else _together)
        return World(runlog, list(cast), eager=eager, oracles=self.oracles, groups=self.groups, private=_between_ranks)

    def objects(self, runlog: ModuleType) -> Objects:
        found: Objects = {}
        for number, stage in enumerate(self.before):
            bodies = stage if isinstance(stage, tuple) else (stage,)
            world = World(runlog, [Actor(f"before{number}{i}", body) for i, body in enumerate(bodies)])
            found = run_alone(world, found, list(range(len(bodies))))[0].objects
        return self.spoil(found) if self.spoil else found

    def at_end(self, runlog: ModuleType) -> Callable[[World, State], None]:
        progress = Progress(runlog, self.ranks)

        def look(world: World, state: State) -> None:
            for index, actor in enumerate(world.actors):
                outcome = world.outcome(state, index)
                require((actor.name, outcome) not in self.never, f"{actor.name} ended as {outcome!r}")
            progress(world, state)

        return look


def _alone(op: Op, objects: Objects) -> bool:
    """With one rank: records that are there never change, join records and data of one's own interest nobody."""
    if op.verb == "get":
        return ("/log/" in op.key and op.key in objects) or "/join/" in op.key
    return op.verb == "put" and "/log/" not in op.key


def _together(op: Op, objects: Objects) -> bool:
    """With two ranks, manifests and join records are messages."""
    if op.verb == "get":
        return "/log/" in op.key and op.key in objects
    return op.verb == "put" and op.key.endswith("/shard")


def _one_pod_per_rank(op: Op, objects: Objects) -> bool:
    """
    With two ranks and no two pods for one: a join record is read by rank 0 only, and only of the others.

    Nothing is deleted and nothing under a data key or a log key changes, so what is there may be read at any
    time. Listings count for nothing when none is stale.
    """
    if op.verb == "put":
        return op.key.endswith("/shard") or "/00000-" in op.key or op.key.endswith("/0")
    return op.verb == "list" or (op.verb == "get" and op.key in objects and "/join/" not in op.key)


def _between_ranks(op: Op) -> bool:
    """Join records and manifests are messages between the ranks of one owner."""
    return "/log/" not in op.key


class Progress:
    """Wherever all have ended, a new owner, or a new boot of the last one's pods, brings the run to its result."""

    def __init__(self, runlog: ModuleType, ranks: int) -> None:
        self._runlog = runlog
        self._ranks = ranks
        self._seen: set[int] = set()

    def __call__(self, world: World, state: State) -> None:
        log = records(state.objects)
        generation = sum(r["kind"] == "open" for r in log)
        closed = any(r["kind"] == "close" and r["generation"] == generation for r in log)
        done = any(r["kind"] == "finish" and r["generation"] == generation for r in log)
        starts = [r for r in log if r["kind"] == "start" and r["generation"] == generation]
        if starts and not closed:
            writer = starts[-1]["id"].partition(".")[0]
            ends = {actor.name: world.outcome(state, i) for i, actor in enumerate(world.actors)}
            require(ends.get(writer) != "Fenced", f"{writer} wrote the newest start, and was fenced")
        if closed or not generation or state.mark in self._seen:
            return
        self._seen.add(state.mark)
        word = "already finished" if done else "finished"
        self._must_finish(state.objects, "Z", [f"Z{rank}" for rank in range(self._ranks)], generation, word)
        if starts:
            pods = [uid for uid, _ in starts[-1]["members"]]
            self._must_finish(state.objects, starts[-1]["owner"], pods, generation, word)

    def _must_finish(self, objects: Objects, owner: str, pods: list[str], generation: int, word: str) -> None:
        cast = [
            Actor(
                f"late{rank}",
                pod(owner, rank=rank, uid=uid, nonce="late", world=len(pods), generation=generation, damage=True),
            )
            for rank, uid in enumerate(pods)
        ]
        world = World(self._runlog, cast)
        _, ends = run_alone(world, objects, list(reversed(range(len(pods)))))
        if ends[-1] != word:
            raise Violation(f"no progress: owner {owner} alone in generation {generation} ends with {ends}")


def spoil_newest(objects: Objects) -> Objects:
    """One shard of the last commit is not what its manifest says."""
    commit = [r for r in records(objects) if r["kind"] == "commit"][-1]
    manifest = sorted(commit["manifests"])[-1]
    shard = next(iter(json.loads(objects[manifest])["files"]))
    return {**objects, shard: b'{"epoch": 0}'}


def ghost_registers(objects: Objects) -> Objects:
    """The first pod of rank 1, superseded long ago, writes its join record over its successor's."""
    members = [r["members"] for r in records(objects) if r["kind"] == "start"]
    assert members[0][1] != members[-1][1]
    uid, nonce = members[0][1]
    return {**objects, "run/join/A/1": json.dumps({"pod_uid": uid, "nonce": nonce, "after": 0, "damaged": []}).encode()}


def successor(env: Env) -> str:
    """Airflow gives generation 1 up, opens the next, and its pod runs."""
    end = airflow(close="failed")(env)
    if end in ("succeeded", "Fenced", "StoreUnavailable", "StoreForbidden"):
        return end
    end = airflow(try_number=2)(env)
    return pod("B", generation=2)(env) if end == "submitted 2" else end


def two_by_two(looks_of_a: int, looks_of_b: int) -> tuple[Actor, ...]:
    """Two owners of two ranks each. Who looks only once registers, and gives up, or finds all in place."""
    return tuple(
        Actor(f"{owner.lower()}{rank}", pod(owner, rank=rank, world=2, looks=looks))
        for owner, looks in (("A", looks_of_a), ("B", looks_of_b))
        for rank in (0, 1)
    )


def second_life(runlog: ModuleType) -> tuple[Actor, ...]:
    """The run key was deleted and runs again, while a pod of its first life still writes data."""
    world = World(runlog, [Actor("first life", airflow())])
    started = run_alone(world, {}, [0])[0].objects
    return (Actor("ghost", ghost_of_a_deleted_run(started)), Actor("a", A), Actor("b", B))


A = pod("A")
A2 = pod("A", uid="A9", nonce="n2")
B = pod("B")

SCENARIOS = (
    Scenario(
        "two owners, one of which dies and comes back",
        (Actor("a", A, mortal=True), Actor("a2", A2, after="a"), Actor("b", B)),
        budgets=((1, 0), (0, 1)),
        large=((1, 1), (2, 0)),
    ),
    Scenario(
        "two ranks, one of which dies and comes back",
        (
            Actor("a0", pod("A", world=2)),
            Actor("a1", pod("A", rank=1, world=2), mortal=True),
            Actor("a1b", pod("A", rank=1, world=2, nonce="n2"), after="a1"),
        ),
        ranks=2,
        budgets=((0, 1),),
        large=((1, 1),),
    ),
    Scenario(
        "two owners with two ranks",
        two_by_two(2, 2),
        ranks=2,
        eager=_one_pod_per_rank,
        oracles=False,
        groups=((0, 1), (2, 3)),
        budgets=(),
        large=((0, 0),),
    ),
    Scenario(
        "an owner with two ranks, and half of another",
        two_by_two(2, 1),
        ranks=2,
        eager=_one_pod_per_rank,
        oracles=False,
        groups=((0, 1), (2, 3)),
        budgets=((0, 0),),
    ),
    Scenario(
        "a pod, its replacement, and the replacement's next boot",
        (
            Actor("p", pod("A", uid="P", steps=0)),
            Actor("q", pod("A", uid="Q"), mortal=True),
            Actor("q2", pod("A", uid="Q", nonce="n2"), after="q"),
        ),
        budgets=((0, 1),),
        large=((1, 1),),
    ),
    Scenario(
        "two boots of one pod",
        (Actor("p", pod("A", again=True)), Actor("q", pod("A", nonce="n2"))),
        budgets=((0, 0),),
        large=((1, 0),),
    ),
    Scenario(
        "a rank and its ghost, that registers last",
        (
            Actor("a0", pod("A", world=2, nonce="n3")),
            Actor("a1", pod("A", rank=1, uid="G", nonce="n3", world=2)),
        ),
        before=(
            airflow(),
            (pod("A", rank=1, world=2, finish=False), pod("A", world=2, finish=False)),
            (pod("A", rank=1, uid="G", world=2, finish=False), pod("A", world=2, nonce="n2", finish=False)),
        ),
        spoil=ghost_registers,
        ranks=2,
        never=(("a0", "Fenced"),),
        budgets=((0, 0),),
        large=((1, 0),),
    ),
    Scenario(
        "two pods for one rank",
        (
            Actor("a0", pod("A", world=2)),
            Actor("a1", pod("A", rank=1, world=2)),
            Actor("g", pod("A", rank=1, uid="G", world=2)),
        ),
        ranks=2,
        never=(("a0", "Fenced"),),
        budgets=(),
        large=((0, 0),),
    ),
    Scenario(
        "retention while another owner restores",
        (Actor("a", pod("A", nonce="n2", steps=2, collect=True, finish=False)), Actor("b", B)),
        before=(airflow(), pod("A", steps=3, finish=False)),
        budgets=((0, 0),),
        large=((1, 0),),
    ),
    Scenario(
        "three tries at once, of which one gives up",
        (
            Actor("first", airflow(close="failed"), mortal=True),
            Actor("zombie", airflow()),
            Actor("second", airflow(try_number=2)),
        ),
        before=(),
        never=(("first", "Fenced"), ("zombie", "Fenced"), ("second", "Fenced")),
        budgets=((1, 1),),
        large=((2, 1),),
    ),
    Scenario(
        "a try that gives up, a zombie of it, and a pod",
        (
            Actor("gives up", airflow(close="failed")),
            Actor("zombie", airflow()),
            Actor("a", A),
        ),
        budgets=((1, 0),),
        large=((2, 0),),
    ),
    Scenario(
        "a clear, the try before it, and a pod",
        (
            Actor("cleared", airflow(max_tries=1, try_number=2)),
            Actor("zombie", airflow(close="failed")),
            Actor("a", pod("A", steps=0)),
        ),
        budgets=((0, 0),),
        large=((1, 0),),
    ),
    Scenario(
        "a reader and a writer",
        (Actor("reader", reader), Actor("a", pod("A", steps=2))),
        budgets=((1, 0),),
        large=((2, 0),),
    ),
    Scenario(
        "a ghost of a closed generation",
        (Actor("ghost", pod("A", nonce="n2")), Actor("next", successor)),
        before=(airflow(), pod("A", finish=False)),
        budgets=((0, 0),),
        large=((1, 0), (2, 0)),
    ),
    Scenario(
        "a step back, and another owner",
        (Actor("a", pod("A", nonce="n3")), Actor("b", B)),
        before=(airflow(), pod("A", steps=3, finish=False), pod("A", nonce="n2", rewind=2, finish=False)),
        budgets=((0, 0),),
        large=((1, 0),),
    ),
    Scenario(
        "a ghost of a deleted run",
        second_life,
        eager=lambda op, objects: op.verb == "get" and op.key in objects,
    ),
    Scenario(
        "a damaged checkpoint, found by two ranks",
        (
            Actor("a0", pod("A", world=2, nonce="n2", damage=True)),
            Actor("a1", pod("A", rank=1, world=2, nonce="n2", damage=True)),
        ),
        before=(airflow(), pod("A", steps=2, finish=False)),
        spoil=spoil_newest,
        ranks=2,
        budgets=((0, 0),),
        large=((1, 0),),
    ),
)


def restarted_rank(runlog: ModuleType) -> None:
    """Rank 1 dies in the middle of an epoch; its next boot is named, and the run comes to its end."""
    cast = [
        Actor("a0", pod("A", world=2)),
        Actor("a1", pod("A", rank=1, world=2), mortal=True),
        Actor("a1b", pod("A", rank=1, world=2, nonce="n2"), after="a1"),
    ]
    world = World(runlog, cast, eager=_together)
    objects = run_alone(World(runlog, [Actor("airflow", airflow())]), {}, [0])[0].objects
    state = world.start(objects, crashes=1)
    while not any("/data/" in key for key in state.objects):
        state = world.apply(state, ("do", min((0, 1), key=lambda i: world.time(state, i))))
    state = world.apply(state, ("crash", 1))
    while busy := [i for i in (0, 2) if not world.outcome(state, i)]:
        state = world.apply(state, ("do", min(busy, key=lambda i: world.time(state, i))))
    ends = [world.outcome(state, i) for i in (0, 2)]
    require(ends == ["finished", "trained"], f"a rank that restarted: {ends}")
