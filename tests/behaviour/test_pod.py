"""`gpu-burst run` as a process of its own: signals, exit codes, last word."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import contract, runs
from airflow_gpu_burst.checkpoint import read_bytes
from airflow_gpu_burst.cli import main
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ExitCode, RunFailed
from airflow_gpu_burst.runlog import RunLog, open_generation
from airflow_gpu_burst.runtime.orphans import ENV_TRAINER_LOCK
from airflow_gpu_burst.runtime.process import start_ticks
from airflow_gpu_burst.runtime.publication import ENV_MODELS
from airflow_gpu_burst.runtime.workspace import Workspace
from airflow_gpu_burst.spec import Checkpointing, RunSpec, TablePin
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.behaviour.conftest import KEY, Lab, trainer
from tests.behaviour.test_local_runs import commits, runtime_pid
from tests.faulty_s3 import Call, FaultyS3

TRUE = RunSpec(command=("true",))


class Pod:
    """What a route would set up, without a route."""

    def __init__(self, home: Path, config: StoreConfig | None = None) -> None:
        self.config = config or StoreConfig(uri=f"file://{home}/store")
        (home / "store").mkdir()
        self.store = open_store(self.config)
        self.home = home
        self.env = self.context(PodContext.of(TRUE, run_key=KEY, generation=1, catalogs={}).to_bytes())
        self.log = RunLog(self.store, KEY.prefix)
        open_generation(self.log, 1, spec_digest="d", max_tries=0, try_number=1, restore_since=1)

    def context(self, data: bytes) -> dict[str, str]:
        self.store.put("context.json", data)
        return {
            "PATH": os.environ["PATH"],
            **self.config.to_env(),
            contract.ENV_CONTEXT: "context.json",
            contract.ENV_CONTEXT_SHA256: contract.sha256_hex(data),
            contract.ENV_OWNER: "owner",
            contract.ENV_SCRATCH: str(self.home / "scratch"),
            contract.ENV_TERMINATION_FILE: str(self.home / "last-word.json"),
        }

    def for_spec(self, spec: RunSpec) -> dict[str, str]:
        """The environment for another request."""
        return self.context(PodContext.of(spec, run_key=KEY, generation=1, catalogs={}).to_bytes())

    def start(self, *command: str, **changes: str) -> subprocess.Popen[bytes]:
        """Only started; its output is in `self.said()`."""
        with (self.home / "output").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *command],
                env={**self.env, **changes},
                stdout=out,
            )

    def said(self) -> str:
        return (self.home / "output").read_text()

    def steps(self) -> list[int]:
        return [commit.step for commit in self.log.read().commits]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def run(self, *command: str, **changes: str) -> tuple[int, dict[str, Any]]:
        """Exit code and last word."""
        env = {**self.env, **changes}
        done = self.start(*command, **changes)
        done.wait()
        return done.returncode, json.loads(Path(env[contract.ENV_TERMINATION_FILE]).read_text())


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_success(pod: Pod) -> None:
    assert pod.run("true")[0] == ExitCode.OK
    assert not list((pod.home / "scratch").iterdir())


def test_a_second_start_after_the_result_does_nothing_and_is_no_failure(pod: Pod) -> None:
    pod.run("true")
    code, word = pod.run("false")
    assert (code, word["reason"]) == (ExitCode.OK, "Finished")


def test_a_failing_trainer(pod: Pod) -> None:
    code, word = pod.run("false")
    assert code == ExitCode.TRAINER_FAILED and "exited with 1" in word["message"]


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_a_contract_of_another_version_is_refused(pod: Pod, version: Any) -> None:
    data = json.loads(PodContext.of(TRUE, run_key=KEY, generation=1, catalogs={}).to_bytes())
    code, word = pod.run("true", **pod.context(json.dumps({**data, "version": version}).encode()))
    assert code == ExitCode.CONTRACT_MISMATCH and "pip install --upgrade" in word["message"]


def test_a_context_that_was_tampered_with_is_refused(pod: Pod) -> None:
    pod.store.put("context.json", b"{}")
    assert pod.run("true")[0] == ExitCode.CONTRACT_MISMATCH


def test_a_context_that_is_gone(pod: Pod) -> None:
    pod.store.delete("context.json")
    assert pod.run("true")[0] == ExitCode.DATA_MISSING


def test_a_closed_generation_is_fenced_and_trains_nothing(pod: Pod) -> None:
    from airflow_gpu_burst.runlog import close_generation

    close_generation(RunLog(pod.store, KEY.prefix), 1, "cancelled")
    marker = pod.home / "trained"
    assert pod.run("touch", str(marker))[0] == ExitCode.FENCED
    assert not marker.exists()


def test_without_a_contract_it_says_who_sets_it(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", "true"], env={}, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == ExitCode.CONTRACT_MISMATCH and "GpuJobOperator" in done.stderr


@pytest.mark.parametrize("argv", [["run"], ["run", "--"], ["walk"], []])
def test_a_wrong_command_line_is_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == ExitCode.USAGE
    assert "usage: gpu-burst" in capsys.readouterr().err


def test_a_trainer_in_any_language_finds_its_inputs_in_the_environment(pod: Pod) -> None:
    spec = RunSpec(command=("true",), params={"rounds": 3})
    data = PodContext.of(spec, run_key=KEY, generation=1, catalogs={}).to_bytes()
    form = """'{"params": %s, "rank": "%s/%s"}'"""
    script = f'printf {form} "$GPU_BURST_PARAMS" "$RANK" "$WORLD_SIZE" > "$GPU_BURST_RESULT_FILE"'
    assert pod.run("sh", "-c", script, **pod.context(data))[0] == ExitCode.OK
    named = pod.log.read().finishes[1].result["result"]
    result = json.loads(read_bytes(pod.store, named["key"], named["sha256"])[1])
    assert result == {"params": {"rounds": 3}, "rank": "0/1"}


def test_sigterm_reaches_the_trainer_whose_last_checkpoint_is_still_committed(lab: Lab) -> None:
    body = """
def save(*_):
    (ctx.checkpoint_folder(99) / "state").write_text("last")
    ctx.ready(99)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(ctx.checkpoint_folder(1) / "state").write_text("first")
ctx.ready(1)
time.sleep(60)
"""
    spec = trainer(body)
    handle = lab.submit(spec)
    lab.wait_for(lambda: commits(lab) >= 1)
    os.kill(runtime_pid(lab, handle), signal.SIGTERM)
    observation, lines = lab.wait(handle)
    assert (observation.code, observation.reason) == (ExitCode.RETRY_MAY_HELP, "Terminated")
    assert [c.step for c in RunLog(lab.site.store, KEY.prefix).read().commits] == [1, 99], lines
    with pytest.raises(RunFailed) as caught:
        runs.collect(lab.site, handle, observation)
    assert caught.value.retryable


def test_a_pin_that_cannot_be_verified_starts_no_trainer(pod: Pod) -> None:
    """Nothing is trained on a guess."""
    pin = TablePin(
        catalog="lake", table="fab.w", table_uuid="u", snapshot_id="1", ref="r", schema_id=0, committed_at="x"
    )
    spec = RunSpec(command=("true",), inputs={"wafers": pin})
    catalogs = {"lake": {"type": "sql", "uri": f"sqlite:///{pod.home}/none.db", "warehouse": f"file://{pod.home}"}}
    data = PodContext.of(spec, run_key=KEY, generation=1, catalogs=catalogs).to_bytes()
    marker = pod.home / "trained"
    code, word = pod.run("touch", str(marker), **pod.context(data))
    assert code != ExitCode.OK and not marker.exists(), word


def test_sigterm_ends_a_run_with_its_last_checkpoint_in_the_store_and_exit_code_4(pod: Pod) -> None:
    """A drained node: also a trainer that does not listen loses nothing that was ready."""
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(ctx.checkpoint_folder(7) / "state").write_bytes(b"x" * 50_000_000)
ctx.ready(7)
print("saved", flush=True)
time.sleep(60)
"""
    command = trainer(body).command
    with subprocess.Popen(
        [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *command],
        env={**pod.env, contract.ENV_GRACE: "2"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        while b"saved" not in process.stdout.readline():
            pass
        began = time.monotonic()
        process.terminate()
        process.stdout.read()
        assert process.wait(20) == ExitCode.RETRY_MAY_HELP
    assert time.monotonic() - began < 2 * 2 + 5, "a pod has twice the grace time and some seconds"
    assert json.loads((pod.home / "last-word.json").read_text())["reason"] == "Terminated"
    assert [commit.step for commit in RunLog(pod.store, KEY.prefix).read().commits] == [7]


def test_a_scratch_folder_that_cannot_be_written_is_said_before_training(pod: Pod) -> None:
    (pod.home / "file").write_text("in the way")
    code, word = pod.run("true", **{contract.ENV_SCRATCH: str(pod.home / "file")})
    assert code == ExitCode.REQUEST_WRONG and "Mount a volume there" in word["message"]


def test_pods_that_share_a_scratch_folder_do_not_meet(pod: Pod) -> None:
    """A host path on the node's NVMe: another pod's files are left alone, those of a dead start of this pod go."""
    other = pod.home / "scratch" / "other-pod"
    left = pod.home / "scratch" / "this-pod" / "restored"
    for folder in (other, left):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    script = 'test ! -e restored/file && pwd > "$GPU_BURST_MODEL_DIR/../../seen"'
    code, word = pod.run("sh", "-c", script, **{contract.ENV_POD_UID: "this-pod"})
    assert code == ExitCode.OK, word
    assert (pod.home / "scratch" / "seen").read_text().strip() == str(left.parent)
    assert (other / "file").exists() and not left.parent.exists()


def test_the_last_word_is_written_into_a_file_that_cannot_be_replaced(pod: Pod) -> None:
    """As a kubelet mounts it: a file in a folder that takes no other."""
    folder = pod.home / "mounted"
    folder.mkdir()
    word = folder / "termination-log"
    word.touch()
    (folder / f".{word.name}.tmp").mkdir()  # what a rename would begin with does not work
    assert pod.run("false", **{contract.ENV_TERMINATION_FILE: str(word)})[0] == ExitCode.TRAINER_FAILED
    assert json.loads(word.read_text())["reason"] == "TrainerFailed"


def test_a_bug_of_ours_is_in_the_output_with_its_traceback(pod: Pod) -> None:
    """Nobody foresaw a trainer that removes the folder of its model."""
    spec = RunSpec(command=("true",), publish="m")
    env = pod.context(PodContext.of(spec, run_key=KEY, generation=1, catalogs={}).to_bytes())
    command = ["sh", "-c", 'rmdir "$GPU_BURST_MODEL_DIR"']
    done = subprocess.run(
        [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *command],
        env=env,
        capture_output=True,
        check=False,
    )
    assert done.returncode == ExitCode.UNCATEGORISED and b"Traceback" in done.stdout
    spooled = b"".join(pod.store.get(entry.key) for entry in pod.store.list(f"{KEY.prefix}/output/"))
    assert spooled == done.stdout and not done.stderr


GPU_BURST = f"{sys.executable} -m airflow_gpu_burst.cli"


def test_a_trainer_that_is_no_python_drops_a_marker(pod: Pod) -> None:
    """Without leading zeros, and the last one just before its end."""
    script = """
cd "$GPU_BURST_CHECKPOINT_DIR"
mkdir 5 && echo weights > 5/state && echo '{"loss": 0.5, "pin": true}' > 5.ready
while [ -e 5.ready ]; do sleep 0.05; done
mkdir 000000000006 && echo weights > 000000000006/state && touch 6.ready
"""
    assert pod.run("sh", "-c", script)[0] == ExitCode.OK, pod.said()
    first, second = pod.log.read().commits
    assert (first.step, first.metrics) == (5, {"loss": 0.5, "pinned": True})
    assert (second.step, second.metrics) == (6, {})


def test_a_marker_that_cannot_be_taken_is_said_and_three_stop_training(pod: Pod) -> None:
    script = 'cd "$GPU_BURST_CHECKPOINT_DIR"; for n in 1 2 3; do touch $n.ready; done; sleep 60'
    code, word = pod.run("sh", "-c", script)
    assert code == ExitCode.REQUEST_WRONG and "write files into the folder 3" in word["message"], pod.said()


def test_a_trainer_in_a_shell_says_ready_by_the_command_line(pod: Pod) -> None:
    script = f"""
folder=$({GPU_BURST} checkpoint folder 7) && echo weights > $folder/state
{GPU_BURST} checkpoint ready 7 --metric loss=0.25 --pin && ! {GPU_BURST} checkpoint ready 8
"""
    code, _ = pod.run("sh", "-c", script)
    assert code == ExitCode.OK, pod.said()
    (commit,) = pod.log.read().commits
    assert (commit.step, commit.metrics) == (7, {"loss": 0.25, "pinned": True})
    assert "write files into checkpoint_folder(8) first" in pod.said()


def test_outside_a_run_the_command_says_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ready", "7"]) == ExitCode.CONTRACT_MISMATCH
    assert "GpuJobOperator" in capsys.readouterr().err


SAVING = """
def save(step, size=1000):
    (ctx.checkpoint_folder(step) / "state").write_bytes(os.urandom(size))
    ctx.ready(step, **ctx.params.get(str(step), {}))
    print("saved", step, flush=True)
"""


def test_the_result_says_what_checkpoints_cost(pod: Pod) -> None:
    env = pod.for_spec(trainer("", params={}))
    assert pod.run(*trainer(SAVING + "save(1, 2_000_000); time.sleep(2); save(2)").command, **env)[0] == ExitCode.OK
    found = pod.log.read().finishes[1].result["checkpoints"]
    assert (found["committed"], found["bytes"], found["failed"], found["skipped"]) == (2, 2_001_000, 0, 0)
    assert found["rate"] > 0 and 0 < found["stall_max_s"] <= found["stall_s"] < 0.1
    assert "checkpoint 1 committed: 1 files, 2.0 MB in " in pod.said()


def test_a_run_without_checkpoints_says_nothing_of_them(pod: Pod) -> None:
    pod.run("true")
    assert pod.log.read().finishes[1].result["checkpoints"] is None


def slow_spec(body: str, bandwidth: int, **params: Any) -> RunSpec:
    return trainer(SAVING + body, params=params, checkpoint=Checkpointing(bandwidth=bandwidth))


def test_a_newer_checkpoint_takes_the_place_of_one_that_waits_behind_an_upload(pod: Pod) -> None:
    """8 s of upload, meanwhile three more are ready: the pinned one is saved and the newest, the other is skipped."""
    body = "save(10, 8_000_000); time.sleep(1)\nfor step in (20, 30, 40): save(step)\ntime.sleep(12)"
    spec = slow_spec(body, 1_000_000, **{"20": {"pin": True}})
    assert pod.run(*spec.command, **pod.for_spec(spec))[0] == ExitCode.OK
    assert pod.steps() == [10, 20, 40], pod.said()
    assert "checkpoint 30 skipped: 40 is newer and the upload is behind" in pod.said()
    assert pod.log.read().finishes[1].result["checkpoints"]["skipped"] == 1


def test_a_grace_time_shorter_than_the_upload_keeps_the_checkpoint_before(pod: Pod) -> None:
    """The run ends in time with exit code 4, says what is missing, and the next start goes on from what is whole."""
    body = """
if ctx.restored: ctx.result({"from": ctx.restored.step}); sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
save(1); time.sleep(2); save(2, 40_000_000); time.sleep(60)
"""
    spec = slow_spec(body, 1_000_000)
    process = pod.start(*spec.command, **pod.for_spec(spec), **{contract.ENV_GRACE: "3"})
    pod.wait_for(lambda: "saved 2" in pod.said())
    time.sleep(1)
    began = time.monotonic()
    process.terminate()
    assert process.wait(20) == ExitCode.RETRY_MAY_HELP and time.monotonic() - began < 8, pod.said()
    assert pod.steps() == [1]
    assert "not in the store: checkpoint 2" in pod.said() and "raise the grace time" in pod.said()
    prefix = f"{KEY.prefix}/data/{pod.log.read().starts[-1].seq:012d}"
    pod.store.put(f"{prefix}/00000-killed/step-{2:012d}-1/data/half", b"x")
    assert pod.run(*spec.command, **pod.for_spec(spec))[0] == ExitCode.OK
    assert "restored checkpoint 1" in pod.said()
    left = [entry.key for entry in pod.store.list(f"{KEY.prefix}/data/") if "/step-" in entry.key]
    assert all("/step-000000000001-" in key for key in left), "data of the epoch before that nobody names stays"


def test_sigterm_while_the_last_checkpoint_is_flushed_gives_it_up_and_keeps_the_result(pod: Pod) -> None:
    spec = slow_spec("save(1); time.sleep(2); save(2, 40_000_000); ctx.result({'done': True})", 1_000_000)
    process = pod.start(*spec.command, **pod.for_spec(spec), **{contract.ENV_GRACE: "3"})
    pod.wait_for(lambda: "saved 2" in pod.said())
    time.sleep(1)
    process.terminate()
    assert process.wait(10) == ExitCode.OK and "not in the store: checkpoint 2" in pod.said(), pod.said()
    assert pod.steps() == [1] and pod.log.read().finishes[1].result["result"]


def test_what_a_trainer_left_that_ended_before_its_lock_was_taken_belongs_to_no_epoch(tmp_path: Path) -> None:
    """Its runtime was killed, it went on into the folders of the next start, and came to its end by itself."""
    planted: list[str] = []

    def plant(call: Call) -> bool:
        if call.name.endswith("/log/000000000002.json") and not planted:  # the start record
            planted.append(call.name)
            workspace = Workspace(tmp_path / "scratch" / "owner")
            for folder in (workspace.checkpoint(9), workspace.model):
                folder.mkdir(exist_ok=True)
                (folder / "stale").write_text("of an epoch that is over")
            workspace.mark_ready(9, {})
            workspace.result_file.write_text('{"stale": true}')
        return False

    with FaultyS3() as server:
        pod = Pod(tmp_path, server.config())
        server.fault("PutObject", when=plant, times=None)
        spec = trainer(SAVING + "(ctx.model_dir / 'weights').write_text('w'); save(1)", publish="model")
        code, _ = pod.run(*spec.command, **pod.for_spec(spec), **{ENV_TRAINER_LOCK: str(tmp_path / "lock")})
        assert code == ExitCode.OK and planted, pod.said()
        result = pod.log.read().finishes[1].result
        assert pod.steps() == [1] and result["result"] is None, pod.said()
        assert not [entry.key for entry in pod.store.list("") if entry.key.endswith("/stale")]


def test_sigterm_during_a_restore_ends_it_at_once(pod: Pod) -> None:
    body = 'if ctx.restored: sys.exit(9)\nsave(1, 20_000_000); time.sleep(ctx.params["pause"]); sys.exit(1)'
    fast = slow_spec(body, 100_000_000, pause=3)
    pod.run(*fast.command, **pod.for_spec(fast))
    assert pod.steps() == [1]
    shutil.rmtree(pod.home / "scratch" / "kept")
    slow = slow_spec(body, 500_000, pause=3)
    process = pod.start(*slow.command, **pod.for_spec(slow))
    time.sleep(3)
    process.terminate()
    assert process.wait(5) == ExitCode.RETRY_MAY_HELP and "restored checkpoint" not in pod.said()


def test_no_agent_is_left_behind_by_a_killed_runtime(pod: Pod) -> None:
    spec = slow_spec("save(1, 40_000_000); time.sleep(60)", 1_000_000)
    process = pod.start(*spec.command, **pod.for_spec(spec))
    pod.wait_for(lambda: "saved 1" in pod.said())
    pod.wait_for(lambda: bool(agents(process.pid)))
    (agent,) = agents(process.pid)
    process.kill()
    process.wait()
    pod.wait_for(lambda: start_ticks(agent) is None)
    started = json.loads(next((pod.home / "scratch").glob("*/started.json")).read_text())
    os.killpg(started["pid"], signal.SIGKILL)


def agents(runtime: int) -> list[int]:
    """Checkpoint agents that are children of a runtime."""
    found = []
    for child in Path(f"/proc/{runtime}/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


def test_checkpoints_are_kept_by_the_policy_and_what_is_pinned_for_ever(pod: Pod) -> None:
    body = "for step in range(1, 7): save(step); time.sleep(0.7)\nsys.exit(1)"
    spec = trainer(SAVING + body, params={"2": {"pin": True}}, checkpoint=Checkpointing(keep=2))
    pod.run(*spec.command, **pod.for_spec(spec))
    history = pod.log.read()
    assert [commit.step for commit in history.live] == [2, 5, 6], pod.said()
    keys = [entry.key for entry in pod.store.list(f"{KEY.prefix}/data/") if "/step-" in entry.key]
    assert {int(key.split("/step-")[1][:12]) for key in keys} == {2, 5, 6}


def test_a_pod_that_comes_again_on_its_node_restores_from_the_disk(pod: Pod) -> None:
    body = """
if ctx.restored: ctx.result({"state": len((ctx.restored.folder / "state").read_bytes())}); sys.exit(0)
save(1, 3_000_000); time.sleep(60)
"""
    spec = trainer(SAVING + body)
    process = pod.start(*spec.command, **pod.for_spec(spec), **{contract.ENV_POD_UID: "first"})
    pod.wait_for(lambda: pod.steps() == [1])
    time.sleep(0.5)
    process.kill()
    process.wait()
    started = json.loads((pod.home / "scratch" / "first" / "started.json").read_text())
    os.killpg(started["pid"], signal.SIGKILL)
    assert pod.run(*spec.command, **pod.for_spec(spec), **{contract.ENV_POD_UID: "second"})[0] == ExitCode.OK
    assert "3.0 MB of them from this node" in pod.said()
    assert pod.log.read().finishes[1].result["checkpoints"]["reused_bytes"] == 3_000_000
    assert not list((pod.home / "scratch").iterdir()), "a run that has its result needs no copies"


def test_a_model_is_published_in_a_folder_under_its_own_names(pod: Pod) -> None:
    script = 'cd "$GPU_BURST_MODEL_DIR" && mkdir tokenizer && echo w > weights && echo t > tokenizer/vocab'
    spec = RunSpec(command=("true",), publish="m")
    assert pod.run("sh", "-c", script, **pod.for_spec(spec))[0] == ExitCode.OK, pod.said()
    result = pod.log.read().finishes[1].result
    folder = Path(result["model_uri"].removeprefix("file://"))
    assert (folder / "weights").read_text() == "w\n" and (folder / "tokenizer" / "vocab").read_text() == "t\n"
    assert folder == Path(pod.config.directory) / "models" / "m" / result["model_version"]
    assert [entry.key for entry in pod.store.list("models/m/versions/")] == [f"models/m/versions/{folder.name}.json"]


def test_models_may_have_a_store_of_their_own(pod: Pod) -> None:
    models = f"file://{pod.home}/models"
    env = pod.for_spec(RunSpec(command=("true",), publish="m"))
    code, word = pod.run("sh", "-c", 'echo w > "$GPU_BURST_MODEL_DIR/weights"', **env, **{ENV_MODELS: models})
    assert code == ExitCode.OK, word
    uri = pod.log.read().finishes[1].result["model_uri"]
    assert uri.startswith(f"{models}/m/") and (Path(uri.removeprefix("file://")) / "weights").exists()
