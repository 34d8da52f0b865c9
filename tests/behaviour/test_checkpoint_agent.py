"""The process that moves checkpoints: asked, killed, started again, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from airflow_gpu_burst.checkpoint import Manifest
from airflow_gpu_burst.checkpoint.agent import NICE
from airflow_gpu_burst.errors import (
    AgentLost,
    CheckpointError,
    ChecksumMismatch,
    ExitCode,
    GpuBurstError,
    ObjectMissing,
)
from airflow_gpu_burst.runtime.agent_process import RESTARTS, Agent
from airflow_gpu_burst.runtime.process import start_ticks
from airflow_gpu_burst.store import StoreConfig, open_store

SLOW = {"cap": 4e6}
MB = 1_000_000


class Node:
    """A folder to save, a store, and an agent."""

    def __init__(self, home: Path, config: StoreConfig | None = None, **settings: float) -> None:
        self.home = home
        self.folder = home / "checkpoint"
        (home / "store").mkdir()
        own = StoreConfig(uri=f"file://{home}/store", access_key_id="id", secret_access_key="very-secret")
        self.config = config or own
        self.store = open_store(self.config)
        self.agent = Agent({**os.environ, **self.config.to_env()}, settings)

    def write(self, **files: bytes) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, data in files.items():
            (self.folder / name).write_bytes(data)

    def save(
        self,
        progress: Callable[[int, int], None] = lambda done, total: None,
        check: Callable[[], None] = lambda: None,
    ) -> Manifest:
        return self.agent.save(self.folder, "data/1", self.home / "state", progress=progress, check=check)

    def restore(self, saved: Manifest) -> dict[str, bytes]:
        target = self.home / "restored"
        self.agent.restore(
            [(saved.key, saved.sha256)], target, [], progress=lambda done, total: None, check=lambda: None
        )
        return {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}

    @property
    def pid(self) -> int:
        process = self.agent._process
        assert process is not None
        return process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(tmp_path, **getattr(request, "param", {}))
    yield made
    made.agent.close()


slow = pytest.mark.parametrize("node", [SLOW], indirect=True)


def once(action: Callable[[], None], after: int = 1) -> Callable[[int, int], None]:
    """Progress that does something when the first bytes are through."""
    done_before: list[int] = []

    def progress(done: int, total: int) -> None:
        if done > 0 and len(done_before) < after:
            done_before.append(done)
            action()

    return progress


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while start_ticks(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_what_is_saved_comes_back(node: Node) -> None:
    node.write(small=b"x" * 10, large=os.urandom(3 * MB), empty=b"")
    saved = node.save()
    assert (saved.files, saved.size) == (3, 3 * MB + 10)
    assert node.restore(saved) == {path.name: path.read_bytes() for path in node.folder.iterdir()}
    assert node.agent.tally["bytes_sent"] >= saved.size and node.agent.tally["bytes_received"] >= saved.size
    assert 0 < node.agent.memory < 200 * MB


def test_one_process_serves_all_requests_with_low_priority_and_no_secret_in_its_command(node: Node) -> None:
    node.write(file=b"x")
    node.save()
    pid = node.pid
    node.save()
    assert node.pid == pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert b"very-secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"very-secret" in Path(f"/proc/{pid}/environ").read_bytes()


def test_it_keeps_secrets_that_it_has_no_use_for_out_of_its_environment(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.agent.close()
    node.agent = Agent({**os.environ, **node.config.to_env(), "GPU_BURST_CATALOG_SECRETS": "of-the-lake"})
    node.write(file=b"x")
    node.save()
    assert b"of-the-lake" not in Path(f"/proc/{node.pid}/environ").read_bytes()
    node.agent.close()


@slow
def test_progress_is_told_while_it_moves(node: Node) -> None:
    node.write(large=os.urandom(8 * MB))
    told: list[tuple[int, int]] = []
    node.save(lambda done, total: told.append((done, total)))
    assert len(told) >= 2 and told == sorted(told) and {total for _, total in told} == {8 * MB}


@slow
def test_killed_in_the_middle_it_is_started_again_and_finishes(node: Node) -> None:
    node.write(**{f"part{n}": os.urandom(2 * MB) for n in range(4)})
    saved = node.save(once(node.kill))
    assert node.agent.restarts == 1
    assert node.restore(saved) == {path.name: path.read_bytes() for path in node.folder.iterdir()}


def test_killed_in_a_multipart_upload_the_next_one_sends_only_what_is_missing(tmp_path: Path, s3: str) -> None:
    config = StoreConfig(
        uri=f"s3://burst/{tmp_path.name}",
        endpoint_url=s3,
        region="us-east-1",
        access_key_id="key",
        secret_access_key="secret",
    )
    node = Node(tmp_path, config, cap=10e6, part_size=5 << 20)
    node.write(large=os.urandom(40 * MB))

    def late(done: int, total: int) -> None:
        if done > 30 * MB and not node.agent.restarts:
            node.kill()

    saved = node.save(late)
    assert node.agent.restarts == 1 and node.agent.tally["resumed_bytes"] >= 5 << 20
    assert node.restore(saved) == {"large": (node.folder / "large").read_bytes()}
    assert not [entry.key for entry in node.store.list("data/") if entry.key.endswith(".upload")]
    node.agent.close()


@slow
def test_killed_in_the_middle_of_a_restore_it_is_started_again_and_finishes(node: Node) -> None:
    node.write(large=os.urandom(8 * MB))
    saved = node.save()
    target = node.home / "restored"
    node.agent.restore([(saved.key, saved.sha256)], target, [], progress=once(node.kill), check=lambda: None)
    assert (target / "large").read_bytes() == (node.folder / "large").read_bytes() and node.agent.restarts == 1


@slow
def test_what_kills_it_again_and_again_is_an_error_that_says_how_it_ended(node: Node) -> None:
    node.write(large=os.urandom(8 * MB))
    with pytest.raises(AgentLost, match="SIGKILL.*look at the memory of the pod"):
        node.save(once(node.kill, after=RESTARTS + 1))
    assert node.agent.restarts == RESTARTS + 1


def test_one_that_cannot_even_start_leaves_its_last_words(node: Node) -> None:
    node.agent._env["GPU_BURST_TRANSFER"] = json.dumps({"no_such_setting": 1})
    node.write(file=b"x")
    with pytest.raises(GpuBurstError, match="no_such_setting"):
        node.save()
    node.agent._env["PYTHONPATH"] = ""
    node.agent._env["PYTHONHOME"] = "/nowhere"
    node.kill()
    with pytest.raises(AgentLost, match="exited with 1.*last words: .*encodings"):
        node.save()


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_ends_at_once_and_leaves_what_it_did(node: Node, number: int) -> None:
    node.write(**{f"part{n}": os.urandom(2 * MB) for n in range(4)})
    ended: list[int] = []

    class Enough(Exception):
        pass

    def end() -> None:
        process = node.agent._process
        assert process is not None
        node.kill(number)
        ended.append(process.wait(2))
        raise Enough

    with pytest.raises(Enough):
        node.save(once(end))
    assert ended == [ExitCode.RETRY_MAY_HELP] and (node.home / "state").exists()


@slow
def test_what_the_caller_raises_ends_the_request_and_the_process(node: Node) -> None:
    node.write(large=os.urandom(40 * MB))
    pids: list[int] = []

    def check() -> None:
        if pids:
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        node.save(lambda done, total: pids.append(node.pid), check)
    assert time.monotonic() - began < 5 and gone(pids[0])


@slow
def test_closed_while_it_works_the_request_ends_and_no_other_begins(node: Node) -> None:
    node.write(large=os.urandom(40 * MB))
    at_work, errors = threading.Event(), []

    def save() -> None:
        try:
            node.save(lambda done, total: at_work.set())
        except GpuBurstError as error:
            errors.append(str(error))

    thread = threading.Thread(target=save)
    thread.start()
    assert at_work.wait(20)
    pid = node.pid
    node.agent.close()
    thread.join(10)
    assert gone(pid) and errors == ["the checkpoint agent was closed: the run is over"]


@pytest.mark.parametrize("busy", [True, False])
def test_it_dies_with_the_runtime_however_that_ends(tmp_path: Path, busy: bool) -> None:
    program = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.behaviour.test_checkpoint_agent import MB, SLOW, Node
node = Node(Path({str(tmp_path)!r}), **SLOW)
node.write(large=os.urandom(40 * MB) if {busy} else b"x")
node.save(lambda done, total: print(node.pid, flush=True))
print(node.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runtime:
        assert runtime.stdout is not None
        pid = int(runtime.stdout.readline())
        assert start_ticks(pid) is not None
        runtime.kill()
    assert gone(pid)


@pytest.mark.parametrize("change", ["damage", "remove"])
def test_damage_is_the_error_that_it_is(node: Node, change: str) -> None:
    node.write(large=os.urandom(2 * MB))
    saved = node.save()
    (key,) = [entry.key for entry in node.store.list("data/1/") if entry.key != saved.key]
    node.store.put(key, b"damaged") if change == "damage" else node.store.delete(key)
    with pytest.raises((ChecksumMismatch, ObjectMissing), match=key):
        node.restore(saved)


def test_what_cannot_be_saved_is_the_error_that_it_is(node: Node) -> None:
    node.write(file=b"x")
    os.mkfifo(node.folder / "pipe")
    with pytest.raises(CheckpointError, match="pipe"):
        node.save()
    (node.folder / "pipe").unlink()
    assert node.save().files == 1, "the agent goes on after an error"
