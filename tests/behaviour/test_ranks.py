"""Several ranks, each a `gpu-burst run` of its own: together to the end, or together back to the last checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import contract
from airflow_gpu_burst.checkpoint import read_bytes, read_manifest
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ExitCode
from airflow_gpu_burst.runlog import RunLog, open_generation
from airflow_gpu_burst.runtime.output import stream_prefix
from airflow_gpu_burst.spec import Checkpointing, RunSpec
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.behaviour.conftest import KEY, trainer

COUNTING = """
state = ctx.restored.folder / "state" if ctx.restored else None
start = ctx.restored.step if ctx.restored else 0
print(f"rank {ctx.rank} of {ctx.world_size} from {start}: {state.read_text() if state else None}", flush=True)
for step in range(start + 1, ctx.params["steps"] + 1):
    time.sleep(0.3)
    (ctx.checkpoint_folder(step) / "state").write_text(f"rank {ctx.rank} step {step}")
    (ctx.checkpoint_folder(step) / f"shard-{ctx.rank}").write_text(str(step))
    ctx.ready(step, loss=1 / step)
ctx.result({"steps": ctx.params["steps"], "from": start})
"""


class World:
    """The pods of one object, without a cluster."""

    def __init__(self, home: Path, spec: RunSpec, size: int, join_deadline_s: float = 60.0) -> None:
        self.home, self.size, self.command = home, size, spec.command
        self.config = StoreConfig(uri=f"file://{home}/store")
        (home / "store").mkdir()
        self.store = open_store(self.config)
        context = PodContext.of(spec, run_key=KEY, generation=1, catalogs={}, world_size=size)
        data = replace(context, join_deadline_s=join_deadline_s).to_bytes()
        self.store.put("context.json", data)
        self.env = {
            "PATH": os.environ["PATH"],
            **self.config.to_env(),
            contract.ENV_CONTEXT: "context.json",
            contract.ENV_CONTEXT_SHA256: contract.sha256_hex(data),
            contract.ENV_OWNER: "jobset-uid",
            contract.ENV_SCRATCH: str(home / "nvme"),
            contract.ENV_GRACE: "5",
        }
        self.log = RunLog(self.store, KEY.prefix)
        open_generation(self.log, 1, spec_digest="d", max_tries=0, try_number=1, restore_since=1)
        self.pods: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, pod: str = "", **env: str) -> str:
        """A pod; its UID."""
        pod = pod or f"pod-{rank}"
        own = {
            contract.ENV_RANK: str(rank),
            contract.ENV_POD_UID: pod,
            contract.ENV_TERMINATION_FILE: str(self.home / f"{pod}.word"),
        }
        with (self.home / f"{pod}.log").open("ab") as log:
            self.pods[pod] = subprocess.Popen(
                [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *self.command],
                env={**self.env, **own, **env},
                stdout=log,
                stderr=log,
                process_group=0,
            )
        return pod

    def start_all(self) -> None:
        for rank in range(self.size):
            self.start(rank)

    def kill(self, pod: str) -> None:
        """As a node does that goes away: the runtime, and the trainer with it."""
        self.pods[pod].kill()
        self.pods[pod].wait()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            started = json.loads((self.home / "nvme" / pod / "started.json").read_text())
            os.killpg(started["pid"], signal.SIGKILL)

    def wait(self, pod: str, timeout_s: float = 60) -> int:
        return self.pods[pod].wait(timeout_s)

    def output(self, pod: str) -> str:
        return (self.home / f"{pod}.log").read_text()

    def word(self, pod: str) -> dict[str, Any]:
        word: dict[str, Any] = json.loads((self.home / f"{pod}.word").read_text())
        return word

    def steps(self) -> list[int]:
        return [commit.step for commit in self.log.read().commits]

    def result(self) -> Any:
        named = self.log.read().finishes[1].result["result"]
        return json.loads(read_bytes(self.store, named["key"], named["sha256"])[1])

    def outputs(self) -> str:
        return "\n".join(f"--- {pod}\n{self.output(pod)}" for pod in self.pods)


def wait_for(condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(body: str = COUNTING, size: int = 2, join_deadline_s: float = 60.0, **params: Any) -> World:
        worlds.append(
            World(tmp_path, trainer(body, params={"steps": 4, "home": str(tmp_path), **params}), size, join_deadline_s)
        )
        return worlds[-1]

    yield make
    for made in worlds:
        for pod, process in made.pods.items():
            if process.poll() is None:
                made.kill(pod)


def codes(world: World, pods: Sequence[str]) -> list[int]:
    return [world.wait(pod) for pod in pods]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_train_and_a_checkpoint_has_a_part_of_each(world: Callable[..., World], size: int) -> None:
    made = world(size=size)
    made.start_all()
    assert codes(made, list(made.pods)) == [ExitCode.OK] * size, made.outputs()
    assert made.result() == {"steps": 4, "from": 0}
    assert made.steps() == [1, 2, 3, 4]
    for commit in made.log.read().commits:
        assert len(commit.manifests) == size and commit.metrics == {"loss": 1 / commit.step}
    for rank in range(size):
        assert f"rank {rank} of {size} from 0: None" in made.output(f"pod-{rank}")
    assert not list((made.home / "nvme").iterdir()), "scratch folders are left behind"


def test_the_container_log_and_the_spool_are_the_same_bytes_from_the_header_on(world: Callable[..., World]) -> None:
    made = world()
    made.start_all()
    codes(made, list(made.pods))
    streams: dict[str, bytes] = {}
    for entry in made.store.list(stream_prefix(KEY.prefix, 1)):
        stream = entry.key.split("/")[-2]
        streams[stream] = streams.get(stream, b"") + made.store.get(entry.key)
    assert len(streams) == 2
    for rank in range(2):
        log = (made.home / f"pod-{rank}.log").read_bytes()
        found = contract.parse_header(log.partition(b"\n")[0])
        assert found and found[1:] == (rank, 2)
        assert streams[found[0]] == log


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_comes_again_and_all_go_on_from_the_last_checkpoint(world: Callable[..., World], lost: int) -> None:
    made = world(steps=12)
    made.start_all()
    wait_for(lambda: len(made.steps()) >= 2, made.outputs)
    made.kill(f"pod-{lost}")
    new = made.start(lost, "pod-new")
    stays = f"pod-{1 - lost}"
    assert codes(made, [new, stays]) == [ExitCode.OK, ExitCode.OK], made.outputs()
    start = made.result()["from"]
    assert start >= 2 and made.steps()[-1] == 12
    # Each has its own file of the checkpoint that both went back to.
    assert f"rank {lost} of 2 from {start}: rank {lost} step {start}" in made.output(new)
    assert f"rank {1 - lost} of 2 from {start}: rank {1 - lost} step {start}" in made.output(stays)
    # Only the killed pod's folder could stay, and the pod that took its place removed it.
    assert not list((made.home / "nvme").iterdir())


def test_a_container_that_restarts_in_its_pod_comes_again(world: Callable[..., World]) -> None:
    made = world(steps=8)
    made.start_all()
    wait_for(lambda: len(made.steps()) >= 1, made.outputs)
    made.kill("pod-1")
    made.start(1, "pod-1")
    assert codes(made, ["pod-0", "pod-1"]) == [ExitCode.OK, ExitCode.OK], made.outputs()
    assert made.result()["from"] >= 1


def test_a_rank_that_is_done_is_still_there_when_another_one_has_to_start_anew(world: Callable[..., World]) -> None:
    body = COUNTING.replace("time.sleep(0.3)", "time.sleep(0.3 if ctx.rank == 0 else 0)")
    made = world(body, steps=8)
    made.start_all()
    wait_for(lambda: "waiting for rank 0" in made.output("pod-1"), made.outputs)
    made.kill("pod-0")
    new = made.start(0, "pod-new")
    assert codes(made, [new, "pod-1"]) == [ExitCode.OK, ExitCode.OK], made.outputs()
    assert made.steps()[-1] == 8


def test_a_collective_that_breaks_because_a_rank_was_lost_is_no_failure_of_the_run(
    world: Callable[..., World],
) -> None:
    """As with NCCL: the survivor's trainer fails long before the lost rank comes again."""
    broken = 'flag = ctx.params["home"] + "/broken"\n    if os.path.exists(flag): os.remove(flag); sys.exit(13)\n    '
    made = world(COUNTING.replace("time.sleep(0.3)", broken + "time.sleep(0.3)"), steps=20)
    made.start_all()
    wait_for(lambda: len(made.steps()) >= 1, made.outputs)
    made.kill("pod-1")
    (made.home / "broken").touch()
    wait_for(lambda: "is it because another rank was lost?" in made.output("pod-0"), made.outputs)
    new = made.start(1, "pod-new")
    assert codes(made, ["pod-0", new]) == [ExitCode.OK, ExitCode.OK], made.outputs()


def test_trainers_that_fail_on_all_ranks_fail_the_run_at_once(world: Callable[..., World]) -> None:
    made = world("sys.exit(13)")
    made.start_all()
    began = time.monotonic()
    assert codes(made, list(made.pods)) == [ExitCode.TRAINER_FAILED] * 2, made.outputs()
    assert time.monotonic() - began < 30
    assert made.word("pod-0")["reason"] == "TrainerFailed" and "exited with 13" in made.word("pod-1")["message"]


def test_a_rank_that_never_comes_ends_the_others_with_a_retry(world: Callable[..., World]) -> None:
    made = world(join_deadline_s=3)
    assert made.wait(made.start(0)) == ExitCode.RETRY_MAY_HELP
    assert made.word("pod-0")["reason"] == "NotStarted" and "ranks [1] have not registered" in made.output("pod-0")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_the_others_ends_when_it_is_told_to(world: Callable[..., World], rank: int) -> None:
    made = world(join_deadline_s=600)
    pod = made.start(rank)
    wait_for(lambda: any(made.store.list(f"{KEY.prefix}/join/")), made.outputs)
    made.pods[pod].terminate()
    assert made.wait(pod, 10) == ExitCode.RETRY_MAY_HELP
    assert made.word(pod)["reason"] == "Terminated"


def test_a_checkpoint_that_one_rank_leaves_out_is_never_committed(world: Callable[..., World]) -> None:
    body = COUNTING.replace("ctx.ready(step, loss", "if (ctx.rank, step) not in ((1, 2), (1, 4)): ctx.ready(step, loss")
    made = world(body)
    made.start_all()
    assert codes(made, list(made.pods)) == [ExitCode.OK, ExitCode.OK], made.outputs()
    assert made.steps() == [1, 3]
    said = [line for line in made.output("pod-0").splitlines() if "is dropped" in line]
    assert len(said) == 2 and all("ranks [1] have not saved their part" in line for line in said)
    left = [entry.key for entry in made.store.list(f"{KEY.prefix}/data/") if "/step-" in entry.key]
    steps = {int(key.split("/step-")[1][:12]) for key in left}
    assert steps == {1, 3}, "data of dropped checkpoints stays"


def test_with_several_ranks_none_is_skipped_however_far_uploads_are_behind(tmp_path: Path) -> None:
    """One rank cannot leave out what the others save: six checkpoints in 2 s, each of which takes 2 s to upload."""
    body = COUNTING.replace("write_text(str(step))", "write_bytes(os.urandom(400_000))")
    spec = trainer(body, params={"steps": 6}, checkpoint=Checkpointing(bandwidth=200_000))
    made = World(tmp_path, spec, 2)
    made.start_all()
    assert codes(made, list(made.pods)) == [ExitCode.OK, ExitCode.OK], made.outputs()
    assert made.steps() == [1, 2, 3, 4, 5, 6]


def test_rank_0_may_save_alone(world: Callable[..., World]) -> None:
    body = COUNTING.replace("ctx.ready(step, loss", 'if ctx.rank == 0: ctx.ready(step, ranks="self", loss')
    made = world(body, steps=6)
    made.start_all()
    wait_for(lambda: len(made.steps()) >= 2, made.outputs)
    made.kill("pod-1")
    new = made.start(1, "pod-new")
    assert codes(made, ["pod-0", new]) == [ExitCode.OK, ExitCode.OK], made.outputs()
    start = made.result()["from"]
    assert f"rank 1 of 2 from {start}: rank 0 step {start}" in made.output(new), "what rank 0 saved is for all"


def test_another_rank_may_not_save_alone(world: Callable[..., World]) -> None:
    made = world(COUNTING.replace("loss=", 'ranks="self", loss='))
    made.start_all()
    assert made.wait("pod-1") == ExitCode.TRAINER_FAILED
    assert "a checkpoint of one rank is rank 0's" in made.output("pod-1")


def test_all_ranks_told_to_end_still_commit_what_is_ready(world: Callable[..., World]) -> None:
    body = """
def save(*_):
    (ctx.checkpoint_folder(99) / "state").write_text("last")
    ctx.ready(99)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready to go", flush=True)
time.sleep(60)
"""
    made = world(body)
    made.start_all()
    wait_for(lambda: all("ready to go" in made.output(pod) for pod in made.pods), made.outputs)
    for process in made.pods.values():
        process.terminate()
    assert codes(made, list(made.pods)) == [ExitCode.RETRY_MAY_HELP] * 2, made.outputs()
    assert made.steps() == [99]


def test_a_damaged_part_takes_all_ranks_back_to_the_checkpoint_before(world: Callable[..., World]) -> None:
    made = world(steps=12)
    made.start_all()
    wait_for(lambda: len(made.steps()) >= 3, made.outputs)
    for pod in list(made.pods):
        made.kill(pod)
    last, before = made.log.read().commits[-1], made.log.read().commits[-2]
    key = next(key for key in last.manifests if "/00001-" in key)
    data = read_manifest(made.store, key, last.manifests[key]).files[0].key
    made.store.put(data, b"damaged")
    shutil.rmtree(made.home / "nvme" / "kept")  # the pods come to other nodes
    pods = [made.start(rank, f"pod-again-{rank}") for rank in range(2)]
    assert codes(made, pods) == [ExitCode.OK, ExitCode.OK], made.outputs()
    assert made.result()["from"] == before.step


def test_a_rank_beyond_the_world_is_refused(world: Callable[..., World]) -> None:
    made = world()
    assert made.wait(made.start(2)) == ExitCode.CONTRACT_MISMATCH
    assert "submit again" in made.word("pod-2")["message"]


def test_the_trainer_finds_what_torchrun_reads(world: Callable[..., World]) -> None:
    body = 'print(*(f"{n}={os.environ.get(n)}" for n in ctx.params["names"]), flush=True)'
    names = ["RANK", "WORLD_SIZE", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"]
    names += ["MASTER_ADDR", "MASTER_PORT"]
    made = world(body, names=names)
    for rank in range(2):
        made.start(rank, MASTER_ADDR="localhost")
    codes(made, list(made.pods))
    for rank in range(2):
        assert (
            f"RANK={rank} WORLD_SIZE=2 PET_NNODES=2 PET_NODE_RANK={rank} PET_MASTER_ADDR=localhost "
            "PET_MASTER_PORT=29500 MASTER_ADDR=localhost MASTER_PORT=29500"
        ) in made.output(f"pod-{rank}")
