"""Long random lives: pods of several owners, tries, clears, crashes, lost answers, clock jumps."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from airflow_gpu_burst import runlog
from tests.runlog.actors import airflow, pod
from tests.runlog.judge import records, require
from tests.runlog.scenarios import Progress
from tests.runlog.world import Actor, World, run_alone

CAST_LIMIT = 10  # actors of one example: beyond it, examples get slow and find nothing new
RANKS = 2


class Lives(RuleBasedStateMachine):
    """Hypothesis chooses who comes, who moves, what gets lost; the judge watches every write."""

    @initialize()
    def begin(self) -> None:
        self.world = World(runlog, [Actor("first try", airflow())])
        objects = run_alone(self.world, {}, [0])[0].objects
        self.world = World(runlog, [])
        self.state = self.world.start(objects)
        self.max_tries = 0
        self.tries = 1

    def _spawn(self, actor: Actor) -> None:
        if len(self.world.actors) < CAST_LIMIT:
            self.world.actors.append(actor)
            self.state = self.state._replace(nodes=(*self.state.nodes, 0))

    @rule(
        owner=st.sampled_from("AB"),
        rank=st.integers(0, RANKS - 1),
        replaced=st.booleans(),
        late=st.booleans(),
        steps=st.integers(0, 3),
        collect=st.booleans(),
    )
    def pod_comes(self, owner: str, rank: int, replaced: bool, late: bool, steps: int, collect: bool) -> None:
        number = len(self.world.actors)
        opened = sum(r["kind"] == "open" for r in records(self.state.objects))
        body = pod(
            owner,
            rank=rank,
            uid=f"{owner}{rank}" + (f"x{number}" if replaced else ""),
            nonce=f"n{number}",
            world=RANKS,
            generation=max(1, opened - late),
            steps=steps,
            collect=collect,
        )
        self._spawn(Actor(f"{owner}{rank}-{number}", body))

    @rule(clear=st.booleans(), zombie=st.booleans(), close=st.sampled_from(["", "failed", "lost", "cancelled"]))
    def try_comes(self, clear: bool, zombie: bool, close: str) -> None:
        if zombie:
            body = airflow(max_tries=self.max_tries, try_number=self.tries, close=close)
        else:
            self.tries += 1
            self.max_tries = self.tries if clear else self.max_tries
            body = airflow(max_tries=self.max_tries, try_number=self.tries, close=close)
        self._spawn(Actor(f"try-{len(self.world.actors)}", body))

    @precondition(lambda self: self._busy())
    @rule(data=st.data(), times=st.integers(1, 25), jump=st.booleans())
    def somebody_moves(self, data: st.DataObject, times: int, jump: bool) -> None:
        index = data.draw(st.sampled_from(self._busy()))
        for _ in range(times):
            if self.world.outcome(self.state, index):
                return
            self.state = self.world.apply(self.state, ("do", index), jump=jump)
            jump = False

    @precondition(lambda self: self._busy())
    @rule(data=st.data())
    def something_goes_wrong(self, data: st.DataObject) -> None:
        labels = self.world.labels(self.state._replace(faults=1))
        wrong = [label for label in labels if label[0] != "do"]
        if wrong:
            self.state = self.world.apply(self.state._replace(faults=1), data.draw(st.sampled_from(wrong)))
            self.state = self.state._replace(faults=0)

    @precondition(lambda self: self._busy())
    @rule(data=st.data())
    def somebody_dies(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self._busy()))
        self.state = self.state._replace(dead=self.state.dead | {index})

    def _busy(self) -> list[int]:
        if not hasattr(self, "state"):
            return []
        return [i for i in range(len(self.state.nodes)) if not self.world.outcome(self.state, i)]

    @invariant()
    def one_result_per_generation(self) -> None:
        if hasattr(self, "state"):
            finished = [r["generation"] for r in records(self.state.objects) if r["kind"] == "finish"]
            require(len(finished) == len(set(finished)), f"results of generations {finished}")

    def teardown(self) -> None:
        """Wherever it was left, an owner that lives brings it to its end."""
        if hasattr(self, "state"):
            everybody = frozenset(range(len(self.state.nodes)))
            Progress(runlog, RANKS)(self.world, self.state._replace(dead=everybody))


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same lives on every machine; the search is what covers
    suppress_health_check=[HealthCheck.too_slow],
)
