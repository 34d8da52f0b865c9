"""`gpu-burst run` as a process of its own: signals, exit codes, last word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import contract, runs
from airflow_gpu_burst.cli import main
from airflow_gpu_burst.contract import PodContext
from airflow_gpu_burst.errors import ExitCode
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
        done = subprocess.run(
            [sys.executable, "-m", "airflow_gpu_burst.cli", "run", "--", *command],
            env={**self.env, **changes},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode, json.loads((self.home / "last-word.json").read_text())


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_success(pod: Pod) -> None:
    assert pod.run("true")[0] == ExitCode.OK
    assert not (pod.home / "scratch").exists()


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
    with pytest.raises(runs.verbs.RunFailed) as caught:
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
