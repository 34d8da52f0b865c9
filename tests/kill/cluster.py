"""What kubelets, a Job controller and Airflow do about pods: start them, start them again, or let them be."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ExitCode
from airflow_gpu_burst.runlog import RunLog, close_generation, open_generation
from airflow_gpu_burst.runlog.records import Record, Start
from airflow_gpu_burst.spec import Checkpointing, RunSpec
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.kill.gate import Gate, Weather
from tests.kill.judge import Facts
from tests.kill.pods import Node, Pod, pod_environment

KEY = RunKey(dag_id="dag", task_id="train", run_id="killed")
REPLACED = ("pod", "restart", "node", "power", "runtime", "sigterm")
"""Kinds of kill after which the kubelet, or the Job, starts another one."""
AGENT_S = 5.0
"""In which a moving process must be gone after its runtime."""


def _code_of(struck: str) -> ExitCode:
    """How a pod ends that was struck before it could see that it is superseded."""
    return ExitCode.TRAINER_FAILED if struck == "trainer" else ExitCode.FENCED


class Cluster:
    """
    One run of a job, on nodes of its own.

    :param config: an empty place in a store.
    :param home: a folder, for nodes and logs.
    :param params: of the trainer.
    :param weather: what the store is like, see `Gate`.
    :param started: told of each pod that starts.
    :param wrong: told of what must not be.
    """

    def __init__(
        self,
        config: StoreConfig,
        home: Path,
        *,
        world_size: int,
        keep: int,
        params: dict[str, Any],
        weather: Weather,
        rng: random.Random,
        started: Callable[[Pod], None],
        wrong: Callable[[str], None],
    ) -> None:
        self._config, self._home, self._weather, self._rng = config, home, weather, rng
        self._started, self._wrong = started, wrong
        self._world_size = world_size
        self._store = open_store(config)
        self._log = RunLog(self._store, KEY.prefix)
        self._spec = RunSpec(command=("trainer",), params=params, checkpoint=Checkpointing(keep=keep))
        self.facts = Facts(config, self._store, KEY.prefix, params["seed"], world_size)
        self._generation = self._owners = self._nodes = self._cut_at = 0
        self._owner = ""
        self.pods: dict[int, Pod] = {}
        self.ghosts: list[Pod] = []
        self.all: list[Pod] = []
        self.failed = False

    def submit(self) -> None:
        """As Airflow does: the first generation, or the next one after a failure."""
        if self._generation:
            close_generation(self._log, self._generation, "failed", "killed")
        self._generation += 1
        open_generation(
            self._log, self._generation, spec_digest="d", max_tries=0, try_number=self._generation, restore_since=1
        )
        self._create()

    def cut_off(self) -> None:
        """The cluster that has the pods is out of reach: the same object is made on another one."""
        self.ghosts = list(self.pods.values())
        self._cut_at = len(self.facts.records())
        self._create()

    @property
    def is_over(self) -> bool:
        """All that is to be done is done."""
        ended = all(pod.code == ExitCode.OK for pod in self.pods.values())
        return ended and all(ghost.code is not None for ghost in self.ghosts)

    def tend(self) -> None:
        """See to the pods that have ended."""
        for pod in [*self.pods.values(), *self.ghosts]:
            if pod.code is None and (code := pod.process.poll()) is not None:
                pod.code = code
                self._look_who_is_the_ghost()
                self._ended(pod, code)

    def end(self) -> None:
        """Nothing is left of any pod."""
        for pod in self.all:
            pod.end()

    def _create(self) -> None:
        """One object: a pod for each rank, each on a node of its own."""
        self._owners += 1
        self._owner = f"owner-{self._owners}"
        for rank in range(self._world_size):
            before = self.pods.get(rank)
            self._start(rank, before.node if before and before not in self.ghosts else self._new_node())

    def _new_node(self) -> Node:
        self._nodes += 1
        return Node(self._home / f"node-{self._nodes}")

    def _start(self, rank: int, node: Node, uid: str = "") -> None:
        context = PodContext.of(
            self._spec, run_key=KEY, generation=self._generation, catalogs={}, world_size=self._world_size
        ).to_bytes()
        key = f"context-{self._generation}.json"
        self._store.put(key, context)
        gate = None
        if not self._config.directory:
            at = urlsplit(self._config.endpoint_url)
            gate = Gate(at.hostname or "", at.port or 80, self._weather)
        pod = Pod(
            uid=uid or f"pod-{len(self.all)}",
            rank=rank,
            owner=self._owner,
            node=node,
            home=self._home,
            gate=gate,
            env=pod_environment(self._config, gate, key, context),
        )
        self.pods[rank] = pod
        self.all.append(pod)
        self._started(pod)

    def _ended(self, pod: Pod, code: int) -> None:
        if pod in self.ghosts or code == ExitCode.FENCED:
            self._superseded(pod, code)
        elif code == ExitCode.OK:
            pod.end()
        elif code == ExitCode.TRAINER_FAILED and pod.struck == "trainer":
            for each in self.pods.values():
                each.end()
                each.code = each.process.returncode
            self.submit()
        elif pod.struck in REPLACED and code in (-9, -15, 4):
            self._replace(pod)
        elif code == ExitCode.RETRY_MAY_HELP:
            pod.end()
            self._start(pod.rank, pod.node)
        else:
            self._wrong(f"{pod.uid} ended with {code}: {pod.word}")
            self.failed = True

    def _replace(self, pod: Pod) -> None:
        if pod.struck == "runtime":
            self._await_agents_end(pod)
        else:
            pod.end()
        if pod.struck == "power":
            pod.node.tear(self._rng)
        if pod.struck == "node":
            shutil.rmtree(pod.node.scratch)
        same = pod.struck in ("runtime", "restart")
        self._start(pod.rank, self._new_node() if pod.struck == "node" else pod.node, pod.uid if same else "")

    def _await_agents_end(self, pod: Pod) -> None:
        deadline = time.monotonic() + AGENT_S
        while any(member.role == "agent" for member in pod.members()):
            if time.monotonic() > deadline:
                self._wrong(f"the agent of {pod.uid} lives {AGENT_S:.0f} s after its runtime")
                return
            time.sleep(0.02)

    def _superseded(self, pod: Pod, code: int) -> None:
        """Only who is not named any more may be fenced, and nobody else may go on."""
        pod.end()
        newest = self._newest()
        named = newest is not None and newest.owner == pod.owner
        if code == ExitCode.FENCED and named and not self._log.read().closes:
            self._wrong(f"{pod.uid} was fenced, and its owner is the newest")
            self.failed = True
        elif code == ExitCode.OK and not named and pod.rank == 0 and pod.word.get("reason") != "Finished":
            # Another rank that only waits for the run's result has it, whoever made it.
            self._wrong(f"{pod.uid} ended well, and another owner has taken over: {newest}")
        elif code not in (ExitCode.FENCED, ExitCode.OK, _code_of(pod.struck)):
            self._wrong(f"{pod.uid} was superseded and ended with {code}: {pod.word}")

    def _look_who_is_the_ghost(self) -> None:
        """The late first start of a ghost can take over, once: then it is the run, and its successor the ghost."""
        newest = self._newest() if self.ghosts else None
        if newest is not None and newest.seq > self._cut_at and newest.owner == self.ghosts[0].owner:
            ghosts = self.ghosts
            self.ghosts = list(self.pods.values())
            self.pods = {pod.rank: pod for pod in ghosts}
            self._owner = newest.owner

    def _newest(self) -> Start | None:
        records: list[Record] = self.facts.records()
        return next((record for record in reversed(records) if isinstance(record, Start)), None)
