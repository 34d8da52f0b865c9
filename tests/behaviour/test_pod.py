"""`gpu-burst run` as a process of its own: signals, exit codes, last word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import contract, runs
from airflow_gpu_burst.cli import main
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ExitCode, RunFailed
from airflow_gpu_burst.runlog import RunLog, open_generation
from airflow_gpu_burst.spec import RunSpec, TablePin
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.behaviour.conftest import KEY, Lab, trainer
from tests.behaviour.test_local_runs import commits, runtime_pid

TRUE = RunSpec(command=("true",))


class Pod:
    """What a route would set up, without a route."""

    def __init__(self, home: Path) -> None:
        self.config = StoreConfig(uri=f"file://{home}/store")
        (home / "store").mkdir()
        self.store = open_store(self.config)
        self.home = home
        self.env = self.context(PodContext.of(TRUE, run_key=KEY, generation=1, catalogs={}).to_bytes())
        open_generation(RunLog(self.store, KEY.prefix), 1, spec_digest="d", max_tries=0, try_number=1, restore_since=1)

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

    def run(self, *command: str, **changes: str) -> tuple[int, dict[str, Any]]:
        """Exit code and last word."""
        env = {**self.env, **changes}
        done = subprocess.run(
            [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *command],
            env=env,
            stdout=subprocess.DEVNULL,
            check=False,
        )
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
    finish = RunLog(pod.store, KEY.prefix).read().finishes[1]
    manifest = json.loads(pod.store.get(finish.result["result"]["key"]))
    result = json.loads(pod.store.get(manifest["files"][0]["key"]))
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
