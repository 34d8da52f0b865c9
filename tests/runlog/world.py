"""
A simulated store and actors that run the production code one store operation at a time.

An actor is an ordinary function that calls the production code. It is deterministic but for what the store
answers, so its state *is* the list of answers so far: to learn its next operation, it is run from the start,
fed these answers, and cut off at the first question that has none. No threads, no copies of the protocol;
states can be compared, and every order of events can be tried.

The store may lose an answer (the write lands now, later, or never), refuse one read, answer a listing with
an old state; an actor may die at any operation, also between a write and its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from airflow_gpu_burst.errors import ObjectExists, ObjectMissing, StoreForbidden, StoreUnavailable
from airflow_gpu_burst.store import Entry
from tests.runlog.judge import Judge, Violation

ERRORS = {
    "missing": ObjectMissing,
    "exists": ObjectExists,
    "unavailable": StoreUnavailable,
    "forbidden": StoreForbidden,
}

JUMP = 1e6  # seconds by which a clock jumps


@dataclass(frozen=True, slots=True)
class Op:
    """One question of an actor to the store (or, `oracle`, to the judge)."""

    verb: str
    key: str
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.verb} {self.key} {self.data.decode()}".strip()


class _Cut(BaseException):
    """Ends an actor's run at its first unanswered question."""

    def __init__(self, op: Op) -> None:
        self.op = op


class Env:
    """What an actor sees: a store, a clock, ids, and the run log package (perhaps a mutant of it)."""

    def __init__(self, runlog: ModuleType, name: str, answers: list[tuple[str, Any, bool]]) -> None:
        self.runlog = runlog
        self.name = name
        self._answers = iter(answers)
        self._time = 0.0
        self._ids = 0
        self.uri = "sim://"

    def ask(self, verb: str, key: str, data: bytes = b"") -> Any:
        answer = next(self._answers, None)
        if answer is None:
            raise _Cut(Op(verb, key, data))
        outcome, value, jumped = answer
        if jumped:
            self._time += JUMP
        if outcome in ERRORS:
            raise ERRORS[outcome](f"{verb} {key}")
        return value

    def log(self, prefix: str = "run") -> Any:
        return self.runlog.RunLog(
            self,
            prefix,
            clock=self.clock,
            sleep=self.sleep,
            now=lambda: "2026-01-01T00:00:00+00:00",
            new_id=self.new_id,
            patience_s=5.0,
        )

    def clock(self) -> float:
        return self._time

    def sleep(self, seconds: float) -> None:
        self._time += seconds

    def new_id(self) -> str:
        self._ids += 1
        return f"{self.name}.{self._ids}"

    def get(self, key: str) -> bytes:
        return self.ask("get", key)

    def put(self, key: str, data: bytes) -> None:
        self.ask("put", key, data)

    def create(self, key: str, data: bytes) -> None:
        self.ask("create", key, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter([Entry(key, 1) for key in self.ask("list", prefix)])

    def delete(self, key: str) -> None:
        self.ask("delete", key)

    def oracle(self, question: str) -> Any:
        """What the judge knows at this moment; no actor could ask that."""
        return self.ask("oracle", question)


@dataclass(frozen=True)
class Actor:
    """
    :param after: the actor that must be dead before this one comes to be.
    :param mortal: may be killed at any operation.
    """

    name: str
    body: Callable[[Env], str]
    after: str = ""
    mortal: bool = False


class State(NamedTuple):
    """
    Everything that there is.

    :param mark: a hash of `objects`, kept up to date with every change.
    """

    objects: dict[str, bytes]
    mark: int
    nodes: tuple[int, ...]
    flight: tuple[Op, ...] = ()
    dead: frozenset[int] = frozenset()
    faults: int = 0
    crashes: int = 0


Label = tuple[str, int]


@dataclass
class World:
    """
    The rules by which states follow each other.

    :param eager: operations of which it cannot matter when they happen, since nobody else can see them or
        nobody can change what they see. They are done at once, which keeps the number of orders small.
    :param groups: actors (by their places) with messages that none outside of the group reads or writes: as
        long as all that its members are about to do is `private`, the others may wait. Not with faults.
    :param kinds: of faults that may happen, as often as a state's `faults` says.
    :param oracles: whether actors may ask the judge. What they hear tells states apart that are the same to
        the production code; without, more can be searched.
    """

    runlog: ModuleType
    actors: list[Actor]
    eager: Callable[[Op, dict[str, bytes]], bool] = lambda op, objects: False
    kinds: frozenset[str] = frozenset({"lose", "deny", "break", "stale", "fail"})
    judge: Judge = field(default_factory=Judge)
    oracles: bool = True
    groups: tuple[tuple[int, ...], ...] = ()
    private: Callable[[Op], bool] = lambda op: False

    def __post_init__(self) -> None:
        self._steps: dict[tuple[int, int], Op | str] = {}
        self._times: dict[tuple[int, int], float] = {}
        self._parents: list[tuple[int, tuple[str, Any, bool]]] = [(0, ("", None, False))]
        self._children: dict[tuple[int, tuple[str, Any, bool]], int] = {}

    def start(self, objects: dict[str, bytes] | None = None, *, faults: int = 0, crashes: int = 0) -> State:
        objects = objects or {}
        mark = 0
        for item in objects.items():
            mark ^= hash(item)
        state = State(objects, mark, (0,) * len(self.actors), faults=faults, crashes=crashes)
        return self._settled(state, range(len(self.actors)))

    def step(self, index: int, node: int) -> Op | str:
        """The next operation of an actor after some answers, or how it ended."""
        known = self._steps.get((index, node))
        if known is not None:
            return known
        answers = []
        at = node
        while at:
            at, answer = self._parents[at]
            answers.append(answer)
        answers.reverse()
        actor = self.actors[index]
        env = Env(self.runlog, actor.name, answers)
        found: Op | str
        try:
            found = "end: " + actor.body(env)
        except _Cut as cut:
            found = cut.op
        self._steps[index, node] = found
        self._times[index, node] = env.clock()
        return found

    def time(self, state: State, index: int) -> float:
        """What an actor's clock shows."""
        self.step(index, state.nodes[index])
        return self._times[index, state.nodes[index]]

    def outcome(self, state: State, index: int) -> str:
        """How an actor ended: its word, `dead`, or empty while it runs."""
        if index in state.dead:
            return "dead"
        if not self._born(state, index):
            return "unborn"
        found = self.step(index, state.nodes[index])
        return found.removeprefix("end: ") if isinstance(found, str) else ""

    def key(self, state: State) -> int:
        """
        Equal for states with the same future. Of an actor that has ended only its word counts.

        A 64-bit hash: among 10^6 states one pair is taken for equal by chance once in 10^7 searches.
        """
        minds = tuple(
            "" if i in state.dead else end if type(end := self._steps.get((i, node), node)) is str else node
            for i, node in enumerate(state.nodes)
        )
        return hash((state.mark, minds, state.flight, state.faults, state.crashes))

    def _born(self, state: State, index: int) -> bool:
        after = self.actors[index].after
        return not after or any(self.actors[i].name == after for i in state.dead)

    def labels(self, state: State) -> list[Label]:
        """All that can happen next."""
        labels: list[Label] = []
        for index in self._group(state):
            if self.outcome(state, index):
                continue
            _, op = self._asked(state, index)
            labels.append(("do", index))
            labels.extend((kind, index) for kind in self._faults_of(op, state) if kind in self.kinds)
            if state.crashes and self.actors[index].mortal:
                labels.append(("crash", index))
                if op.verb == "create":
                    labels.append(("crash-sent", index))
        labels.extend(("land", position) for position in range(len(state.flight)))
        return labels

    def _group(self, state: State) -> Iterable[int]:
        """Some actors that need not be interleaved with the rest now; or all."""
        if not (state.faults or state.crashes or state.flight):
            for group in self.groups:
                busy = [index for index in group if not self.outcome(state, index)]
                if busy and all(self.private(self._asked(state, index)[1]) for index in busy):
                    return busy
        return range(len(state.nodes))

    def _faults_of(self, op: Op, state: State) -> list[str]:
        if not state.faults:
            return []
        return {"create": ["lose", "fail"], "get": ["deny", "break"], "list": ["stale"]}.get(op.verb, [])

    def apply(self, state: State, label: Label, *, jump: bool = False) -> State:
        """The state after something has happened. Raises Violation when it must not."""
        after = self._apply(state, label, jump)
        kind, index = label
        touched = range(len(after.nodes)) if kind.startswith("crash") else () if kind == "land" else (index,)
        return self._settled(after, touched)

    def _asked(self, state: State, index: int) -> tuple[State, Op]:
        """An actor's next operation. What it asks the judge before is answered in the same moment."""
        op = self.step(index, state.nodes[index])
        while isinstance(op, Op) and op.verb == "oracle":
            state = self._do(state, index, op, jump=False)
            op = self.step(index, state.nodes[index])
        assert isinstance(op, Op)
        return state, op

    def _settled(self, state: State, touched: Iterable[int]) -> State:
        """Do at once what need not wait."""
        for index in touched:
            while not self.outcome(state, index):
                op = self.step(index, state.nodes[index])
                assert isinstance(op, Op)
                if op.verb == "oracle" or not self.eager(op, state.objects):
                    break
                state = self._do(state, index, op, jump=False)
        return state

    def _apply(self, state: State, label: Label, jump: bool) -> State:
        kind, index = label
        if kind == "land":
            op = state.flight[index]
            landed = state._replace(flight=state.flight[:index] + state.flight[index + 1 :])
            return landed if op.key in state.objects else self._stored(landed, op)
        state, op = self._asked(state, index)
        if kind == "crash":
            return state._replace(dead=state.dead | {index}, crashes=state.crashes - 1)
        if kind == "crash-sent":
            return state._replace(dead=state.dead | {index}, crashes=state.crashes - 1, flight=(*state.flight, op))
        if kind == "do":
            return self._do(state, index, op, jump)
        fault = state._replace(faults=state.faults - 1)
        if kind == "lose":  # the answer; the write itself may land at any time, or never
            return self._answer(fault._replace(flight=(*fault.flight, op)), index, ("unavailable", None, jump))
        if kind == "stale":
            return self._answer(fault, index, ("ok", (), jump))
        return self._answer(fault, index, ("forbidden" if kind == "deny" else "unavailable", None, jump))

    def _do(self, state: State, index: int, op: Op, jump: bool) -> State:
        value: Any = None
        outcome = "ok"
        match op.verb:
            case "get":
                value = state.objects.get(op.key)
                outcome = "missing" if value is None else "ok"
            case "list":
                value = tuple(sorted(key for key in state.objects if key.startswith(op.key)))
            case "create" if op.key in state.objects:
                outcome = "exists"
            case "create" | "put":
                state = self._stored(state, op)
            case "delete":
                self.judge.deleted(op.key, state.objects)
                state = _without(state, op.key)
            case "oracle":
                value = self.judge.answer(op.key, state.objects) if self.oracles else None
        return self._answer(state, index, (outcome, value, jump))

    def _stored(self, state: State, op: Op) -> State:
        self.judge.written(op.key, op.data, state.objects)
        state = _without(state, op.key)
        return state._replace(objects={**state.objects, op.key: op.data}, mark=state.mark ^ hash((op.key, op.data)))

    def _answer(self, state: State, index: int, answer: tuple[str, Any, bool]) -> State:
        edge = (state.nodes[index], answer)
        node = self._children.get(edge)
        if node is None:
            node = self._children[edge] = len(self._parents)
            self._parents.append(edge)
        return state._replace(nodes=(*state.nodes[:index], node, *state.nodes[index + 1 :]))

    def describe(self, state: State, label: Label) -> str:
        """One line of a counterexample."""
        kind, index = label
        if kind == "land":
            return f"late write lands: {state.flight[index]}"
        return f"{self.actors[index].name}: {kind} {self.step(index, state.nodes[index])}"


def _without(state: State, key: str) -> State:
    if key not in state.objects:
        return state
    objects = {k: v for k, v in state.objects.items() if k != key}
    return state._replace(objects=objects, mark=state.mark ^ hash((key, state.objects[key])))


def run_alone(world: World, objects: dict[str, bytes], indices: list[int]) -> tuple[State, list[str]]:
    """Let some actors run to their ends without faults, in the order of their clocks."""
    state = world.start(objects)
    for _ in range(10_000):
        busy = [i for i in indices if not world.outcome(state, i)]
        if not busy:
            return state, [world.outcome(state, i) for i in indices]
        state = world.apply(state, ("do", min(busy, key=lambda i: world.time(state, i))))
    raise Violation("actors that run alone do not come to an end")
