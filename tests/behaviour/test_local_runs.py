"""One run through submit, poll, collect and cancel on the local route, and everything that can go wrong on the way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import runs
from airflow_gpu_burst.errors import ExitCode, RunFailed, RunTimeout, SpecError
from airflow_gpu_burst.routes import Job
from airflow_gpu_burst.routes.local import LocalRoute
from airflow_gpu_burst.runlog import RunLog, close_generation
from airflow_gpu_burst.runtime.process import start_ticks
from airflow_gpu_burst.spec import Checkpointing, Timeouts
from airflow_gpu_burst.state import Handle, Observation, Phase, RunKey
from tests.behaviour.conftest import COUNTING, KEY, Lab, trainer


def counting(steps: int = 3, **values: object):  # type: ignore[no-untyped-def]
    params = {"steps": steps, **{k: values.pop(k) for k in ("pause",) if k in values}}
    return trainer(COUNTING, params=params, publish="model", **values)


def test_a_run_returns_its_result_and_publishes_one_model(lab: Lab) -> None:
    handle = lab.submit(counting())
    observation, lines = lab.wait(handle)
    assert observation.success, lines
    result = runs.collect(lab.site, handle)
    assert result.result == {"steps": 3, "from": 0}
    assert lab.versions() == [result.model_key]
    record = json.loads(lab.site.store.get(result.model_key))
    assert record["run_key"]["run_id"] == KEY.run_id
    assert [line for line in lines if not line.startswith("gpu-burst:")] == ["from 0", "step 1", "step 2", "step 3"]
    assert not (lab.folder(handle) / "scratch").exists(), "the scratch folder is left behind"


def test_a_retry_after_the_end_collects_and_runs_nothing(lab: Lab) -> None:
    spec = counting()
    first = lab.submit(spec)
    lab.wait(first)
    results = [runs.collect(lab.site, lab.submit(spec, try_number=n)).to_dict() for n in (2, 3)]
    assert results[0] == results[1] and results[0]["generation"] == 1
    assert len(lab.versions()) == 1


def test_a_retry_adopts_the_running_process(lab: Lab) -> None:
    spec = counting(steps=8)
    first = lab.submit(spec)
    lab.wait_for(lambda: lab.site.route.observe(first).phase is Phase.RUNNING)
    again = lab.submit(spec, try_number=2)
    assert (again.name, again.uid) == (first.name, first.uid)
    observation, lines = lab.wait(again)
    assert observation.success
    assert lines.count("from 0") == 1


def trainer_pid(lab: Lab, handle: Handle) -> int:
    return int(json.loads((lab.folder(handle) / "scratch" / "started.json").read_text())["pid"])


def runtime_pid(lab: Lab, handle: Handle) -> int:
    return int(json.loads((lab.folder(handle) / "process.json").read_text())["pid"])


def kill_trainer(lab: Lab, handle) -> None:  # type: ignore[no-untyped-def]
    os.kill(trainer_pid(lab, handle), signal.SIGKILL)


def kill_runtime(lab: Lab, handle) -> None:  # type: ignore[no-untyped-def]
    os.kill(runtime_pid(lab, handle), signal.SIGKILL)


def failure(lab: Lab, handle: Handle, observation: Observation, timeout: str = "") -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        runs.collect(lab.site, handle, observation, timeout=timeout)
    return caught.value


def alive(pid: int) -> bool:
    """Whether the process runs; what is dead and waits to be reaped does not."""
    return start_ticks(pid) is not None


def commits(lab: Lab, key: RunKey = KEY) -> int:
    return len(RunLog(lab.site.store, key.prefix).read().commits)


@pytest.mark.parametrize("kill", [kill_trainer, kill_runtime])
def test_after_a_kill_the_retry_goes_on_from_the_last_checkpoint(lab: Lab, kill) -> None:  # type: ignore[no-untyped-def]
    spec = counting(steps=30)
    first = lab.submit(spec)
    lab.wait_for(lambda: commits(lab) >= 2)
    kill(lab, first)
    observation, _ = lab.wait(first)
    assert observation.phase is Phase.FAILED
    with pytest.raises(RunFailed, match="goes on from checkpoint") as caught:
        runs.collect(lab.site, first, observation)
    assert caught.value.retryable
    second = lab.submit(spec, try_number=2)
    assert second.generation == 2
    observation, lines = lab.wait(second)
    assert observation.success, lines
    result = runs.collect(lab.site, second)
    assert result.result["from"] >= 2 and result.result["steps"] == 30
    assert len(lab.versions()) == 1


def test_an_orphaned_trainer_is_ended_before_the_next_epoch(lab: Lab) -> None:
    body = "open(ctx.params['pids'], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(60 if not ctx.restored else 0)"
    pids = lab.work.parent / "pids"
    spec = trainer(body, params={"pids": str(pids)})
    first = lab.submit(spec)
    lab.wait_for(pids.exists)
    kill_runtime(lab, first)
    lab.wait_for(lambda: lab.site.route.observe(first).terminal)
    orphan = int(pids.read_text())
    assert alive(orphan), "it outlived its runtime"
    second = lab.submit(spec, try_number=2)
    lab.wait_for(lambda: len(pids.read_text().split()) == 2)
    assert not alive(orphan)
    runs.cancel(lab.site, second, "test")


def test_a_try_that_finds_a_dead_run_opens_the_next_generation_at_once(lab: Lab) -> None:
    spec = counting(steps=30)
    first = lab.submit(spec)
    lab.wait_for(lambda: commits(lab) >= 1)
    kill_runtime(lab, first)
    lab.wait_for(lambda: lab.site.route.observe(first).terminal)
    second = lab.submit(spec, try_number=2)
    assert second.generation == 2
    runs.cancel(lab.site, second, "test")


def test_clearing_a_running_task_ends_it_and_goes_on_from_its_checkpoint(lab: Lab) -> None:
    spec = counting(steps=30)
    first = lab.submit(spec, max_tries=2)
    lab.wait_for(lambda: commits(lab) >= 2)
    second = lab.submit(spec, max_tries=3, try_number=2)
    assert second.generation == 2
    assert lab.site.route.observe(first).terminal
    observation, lines = lab.wait(second)
    assert observation.success, lines
    assert runs.collect(lab.site, second).result["from"] >= 2
    assert len(lab.versions()) == 1


def test_clearing_after_success_trains_anew(lab: Lab) -> None:
    spec = counting()
    lab.wait(lab.submit(spec))
    second = lab.submit(spec, max_tries=3, try_number=2)
    lab.wait(second)
    result = runs.collect(lab.site, second)
    assert (result.generation, result.result["from"]) == (2, 0)
    assert len(lab.versions()) == 2


def test_cancel_leaves_no_process_and_may_be_repeated(lab: Lab) -> None:
    spec = counting(steps=1000)
    handle = lab.submit(spec)
    lab.wait_for(lambda: commits(lab) >= 1)
    pid = trainer_pid(lab, handle)
    for _ in range(2):
        runs.cancel(lab.site, handle, "marked failed")
    assert not alive(pid)
    assert RunLog(lab.site.store, KEY.prefix).read().closes[1].verdict == "cancelled"


def test_a_cancelled_run_that_cannot_be_signalled_fences_itself(lab: Lab) -> None:
    handle = lab.submit(counting(steps=1000))
    lab.wait_for(lambda: commits(lab) >= 1)
    close_generation(RunLog(lab.site.store, KEY.prefix), 1, "cancelled", "from elsewhere")
    observation, _ = lab.wait(handle)
    assert observation.code == ExitCode.FENCED


def test_another_request_under_the_same_run_key_is_refused_with_both(lab: Lab) -> None:
    handle = lab.submit(counting(steps=100))
    with pytest.raises(SpecError, match=r"Clear the task.*params: \{'steps': 100\} -> \{'steps': 5\}"):
        lab.submit(counting(steps=5), try_number=2)
    runs.cancel(lab.site, handle, "test")


@pytest.mark.parametrize(
    ("body", "code", "reason", "says", "retryable"),
    [
        ("print('boom'); sys.exit(1)", 7, "TrainerFailed", r"the trainer exited with 1(.|\n)*boom", True),
        ("raise ValueError('no such column')", 7, "TrainerFailed", "ValueError: no such column", True),
        (
            "os.kill(os.getpid(), 9)",
            7,
            "TrainerFailed",
            "was killed by SIGKILL; the machine may be out of memory",
            True,
        ),
        ("ctx.ready(1)", 7, "TrainerFailed", r"write files into checkpoint_folder\(1\) first", True),
    ],
)
def test_a_failing_trainer(lab: Lab, body: str, code: int, reason: str, says: str, retryable: bool) -> None:
    handle = lab.submit(trainer(body))
    observation, _ = lab.wait(handle)
    error = failure(lab, handle, observation)
    assert (error.code, error.reason, error.retryable) == (code, reason, retryable)
    assert re.search(says, str(error)), str(error)


def test_publish_without_a_model_says_where_to_write_it(lab: Lab) -> None:
    handle = lab.submit(trainer("pass", publish="model"))
    observation, _ = lab.wait(handle)
    error = failure(lab, handle, observation)
    assert "context().model_dir" in str(error) and not error.retryable


@pytest.mark.parametrize("change", [{"command": ("pyton", "train.py")}, {"working_dir": "/no/such/folder"}])
def test_what_cannot_start_is_the_requests_fault(lab: Lab, change: dict[str, object]) -> None:
    handle = lab.submit(trainer("pass", **change))
    observation, _ = lab.wait(handle)
    assert observation.code == ExitCode.REQUEST_WRONG
    assert not failure(lab, handle, observation).retryable


def test_a_trainer_that_hangs_and_ignores_sigterm_is_cancelled_by_the_run_timeout(lab: Lab) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)"
    handle = lab.submit(trainer(body, timeouts=Timeouts(run_s=60)))
    follower = lab.follower(handle, Timeouts(run_s=1.0))
    while not (step := follower.step()).done:
        time.sleep(0.1)
    error = failure(lab, handle, step.observation, step.timeout)
    assert isinstance(error, RunTimeout) and "run_timeout is 1 s" in str(error)
    assert lab.site.route.observe(handle).terminal


def test_the_pod_enforces_the_run_timeout_when_nobody_watches(lab: Lab) -> None:
    handle = lab.submit(trainer("time.sleep(600)", timeouts=Timeouts(run_s=1.0)))
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    assert lab.site.route.observe(handle).reason == "RunTimeout"


def test_megabyte_lines_and_bytes_that_are_no_text_do_not_stop_the_run(lab: Lab) -> None:
    body = "sys.stdout.buffer.write(b'x' * 1048576 + b'\\n' + b'\\xff\\xfe\\n' + b'no end'); ctx.result({})"
    handle = lab.submit(trainer(body))
    observation, lines = lab.wait(handle)
    assert observation.success
    assert lines[0].startswith("xxx") is False or len(lines[0]) < 9000
    assert any("more bytes of this line" in line for line in lines)
    assert any("\ufffd\ufffd" in line for line in lines) and "no end" in lines


def test_a_follower_that_died_is_followed_without_losing_a_line(lab: Lab) -> None:
    handle = lab.submit(counting(steps=20))
    first, seen = lab.follower(handle), []
    while len(seen) < 5:
        seen += first.step().lines
        time.sleep(0.05)
    _, rest = lab.wait(handle)
    lines = [line for line in seen + rest if line.startswith("step")]
    assert list(dict.fromkeys(lines)) == [f"step {n}" for n in range(1, 21)]


def test_only_so_many_checkpoints_are_kept_and_their_data_is_deleted(lab: Lab) -> None:
    handle = lab.submit(counting(steps=8, checkpoint=Checkpointing(keep=2)))
    observation, lines = lab.wait(handle)
    assert observation.success, lines
    history = RunLog(lab.site.store, KEY.prefix).read()
    assert [c.step for c in history.live] == [7, 8]
    data = {
        entry.key.split("/step-")[1][:12]
        for entry in lab.site.store.list(f"{KEY.prefix}/data/")
        if "/step-" in entry.key
    }
    assert data == {f"{step:012d}" for step in (7, 8)}


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(lab: Lab) -> None:
    spec = counting(steps=30)
    first = lab.submit(spec)
    lab.wait_for(lambda: commits(lab) >= 3)
    kill_runtime(lab, first)
    lab.wait_for(lambda: lab.site.route.observe(first).terminal)
    last = RunLog(lab.site.store, KEY.prefix).read().newest_checkpoint(1)
    assert last is not None
    for entry in lab.site.store.list(next(iter(last.manifests)).rpartition("/")[0]):
        if "/data/" in entry.key.removeprefix(KEY.prefix + "/data"):
            lab.site.store.put(entry.key, b"rotten")
    second = lab.submit(spec, try_number=2)
    observation, lines = lab.wait(second)
    assert observation.success, lines
    assert any(f"checkpoint {last.step} is damaged" in line for line in lines)
    assert runs.collect(lab.site, second).result["from"] == last.step - 1


def test_a_run_without_checkpoints_starts_from_the_beginning(lab: Lab) -> None:
    spec = counting(steps=3, checkpoint=None)
    observation, lines = lab.wait(lab.submit(spec))
    assert observation.success, lines


def test_the_trainer_sees_none_of_the_workers_secrets(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "secret")
    handle = lab.submit(trainer("ctx.result({'env': sorted(os.environ)})"))
    lab.wait(handle)
    assert not [name for name in runs.collect(lab.site, handle).result["env"] if name.startswith("AIRFLOW")]


def test_cancelling_an_old_generation_late_does_not_touch_its_successor(lab: Lab) -> None:
    spec = counting(steps=30)
    first = lab.submit(spec, max_tries=2)
    lab.wait_for(lambda: commits(lab) >= 1)
    second = lab.submit(spec, max_tries=3, try_number=2)
    lab.wait_for(lambda: lab.site.route.observe(second).phase is Phase.RUNNING)
    runs.cancel(lab.site, first, "a trigger that is late")
    observation, lines = lab.wait(second)
    assert observation.success, lines


def test_a_result_that_comes_while_the_run_is_given_up_is_collected(lab: Lab) -> None:
    handle = lab.submit(counting())
    lab.wait(handle)
    lost = Observation(phase=Phase.LOST, reason="Deleted")
    assert runs.collect(lab.site, handle, lost).result == {"steps": 3, "from": 0}
    assert len(lab.versions()) == 1


def test_a_late_submission_of_an_old_generation_does_not_touch_its_successor(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker stalls just before the process is started; meanwhile the task is cleared and runs anew."""
    spec, genuine = counting(steps=40), LocalRoute.submit
    stalled, gate = threading.Event(), threading.Event()

    def slow(route: LocalRoute, job: Job) -> str:
        if job.generation == 1:
            stalled.set()
            gate.wait(30)
        return genuine(route, job)

    monkeypatch.setattr(LocalRoute, "submit", slow)
    zombie = threading.Thread(target=lambda: lab.submit(spec, max_tries=2))
    zombie.start()
    stalled.wait(30)
    second = lab.submit(spec, max_tries=3, try_number=2)
    lab.wait_for(lambda: commits(lab) >= 2)
    gate.set()
    zombie.join()
    observation, lines = lab.wait(second)
    assert observation.success, lines


def test_a_submitter_killed_right_after_the_start_leaves_a_run_that_can_be_followed(lab: Lab) -> None:
    spec = counting(steps=1000)
    child = os.fork()
    if child == 0:
        genuine = os.posix_spawn

        def spawn_and_die(*args: Any, **kwargs: Any) -> None:
            genuine(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        os.posix_spawn = spawn_and_die  # type: ignore[assignment]
        lab.submit(spec)
    os.waitpid(child, 0)
    handle = lab.submit(spec, try_number=2)
    assert handle.generation == 1
    lab.wait_for(lambda: commits(lab) >= 1)
    kill_runtime(lab, handle)
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)


def test_runs_that_are_submitted_at_once_do_not_keep_each_other_alive(lab: Lab) -> None:
    handles: dict[int, Handle] = {}

    def submit(number: int) -> None:
        spec = trainer("time.sleep(ctx.params['s'])", params={"s": 0 if number % 2 else 30}, checkpoint=None)
        handles[number] = lab.submit(spec, key=replace(KEY, run_id=f"r{number}"))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 3, 5):
        assert lab.wait(handles[number])[0].success


def test_what_a_trainer_leaves_behind_is_ended_and_blocks_nobody(lab: Lab) -> None:
    """A daemon that has left group and session, and keeps every descriptor."""
    spec = trainer("if os.fork() == 0:\n    os.setsid(); time.sleep(60); os._exit(0)\nctx.result({})")
    for try_number in (1, 2):
        handle = lab.submit(spec, max_tries=try_number, try_number=try_number)
        observation, lines = lab.wait(handle)
        assert observation.success, lines
    mark = str(lab.folder(handle).parent).encode()
    left = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                left.append(entry.name)
    assert not left


def test_the_last_lines_of_a_killed_runtime_are_in_the_log(lab: Lab) -> None:
    handle = lab.submit(trainer("for n in range(10_000): print(f'line {n}', flush=True); time.sleep(0.005)"))
    lab.wait_for(lambda: lab.site.route.observe(handle).phase is Phase.RUNNING)
    time.sleep(1.5)
    kill_runtime(lab, handle)
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    written = (lab.folder(handle) / "scratch" / "output.log").read_text().count("line ")
    _, lines = lab.wait(handle)
    assert len([line for line in lines if line.startswith("line")]) >= written > 100


def test_the_same_step_twice_gives_two_checkpoints_that_do_not_mix(lab: Lab) -> None:
    body = """
if ctx.restored:
    ctx.result({p.name: p.read_text()[:3] for p in ctx.restored.folder.iterdir()})
else:
    for value in ("one", "two"):
        folder = ctx.checkpoint_folder(7)
        (folder / "a").write_text(value)
        (folder / "b").write_text(value * 20_000_000)
        (folder / "c").write_text(value)
        ctx.ready(7)
    time.sleep(2)
    sys.exit(1)
"""
    spec = trainer(body)
    handle = lab.submit(spec)
    observation, lines = lab.wait(handle)
    failure(lab, handle, observation)
    assert commits(lab) == 2, lines
    second = lab.submit(spec, try_number=2)
    lab.wait(second)
    assert runs.collect(lab.site, second).result == {"a": "two", "b": "two", "c": "two"}
