"""What trainers, stores and people do that nobody should: ways in which a run was once lost, stuck or forgotten."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import runs
from airflow_gpu_burst.checkpoint import save_bytes
from airflow_gpu_burst.errors import (
    ClusterUnreachable,
    Fenced,
    GpuBurstError,
    RouteError,
    RunLogError,
    SpecError,
    StoreForbidden,
    StoreUnavailable,
)
from airflow_gpu_burst.runlog import Member, RunLog, begin, open_generation
from airflow_gpu_burst.runs import OutputReader
from airflow_gpu_burst.runs.output import stream_prefix
from airflow_gpu_burst.runtime import keeping
from airflow_gpu_burst.runtime.output import chunk_key
from airflow_gpu_burst.runtime.workspace import Workspace
from airflow_gpu_burst.spec import Checkpointing, RunSpec
from airflow_gpu_burst.state import Phase
from airflow_gpu_burst.store import Entry, Store, StoreConfig, open_store
from airflow_gpu_burst.transfer import Mover, open_mover
from tests.behaviour.conftest import KEY, Lab, trainer
from tests.behaviour.test_local_runs import alive, commits, counting, failure, kill_runtime, runtime_pid, trainer_pid


@pytest.fixture
def store_config(tmp_path: Path) -> StoreConfig:
    (tmp_path / "store").mkdir()
    return StoreConfig(uri=f"file://{tmp_path}/store")


class Flaky:
    """In front of a real store: `get` fails at the given calls."""

    def __init__(self, store: Store, failing: set[int]) -> None:
        self.store, self.failing, self.calls = store, failing, 0

    def get(self, key: str) -> bytes:
        self.calls += 1
        if self.calls in self.failing:
            raise StoreUnavailable("503")
        return self.store.get(key)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self.store.list(prefix)


@pytest.mark.parametrize("failing", [{1}, {2}, {3, 4}, {1, 3, 5, 7}])
def test_a_store_that_fails_while_it_is_read_loses_no_line(store_config: StoreConfig, failing: set[int]) -> None:
    store = open_store(store_config)
    expected, offset = [], 0
    for number in range(6):
        data = b"".join(b"line %d.%d\n" % (number, n) for n in range(50))[: 400 + number]
        store.put(chunk_key(f"{stream_prefix('p', 1)}s", offset), data)
        offset += len(data)
        expected.append(data)
    reader, lines = OutputReader(Flaky(store, failing), "p", 1), []  # type: ignore[arg-type]
    while not reader.exhausted:
        try:
            lines += reader.read(ended=True)
        except StoreUnavailable:
            continue
    assert lines == b"".join(expected).decode().splitlines()


@pytest.mark.parametrize(
    "cursor", ['"x"', '{"offset": "y"}', '{"stream": "../x", "offset": 0}', "[]", '{"pending": "☃"}']
)
def test_a_damaged_cursor_only_prints_again(lab: Lab, cursor: str) -> None:
    handle = lab.submit(trainer("print('hello')"))
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    lab.site.store.put(f"{KEY.prefix}/output/cursor-g{handle.generation:06d}.json", cursor.encode())
    assert "hello" in lab.wait(handle)[1]


def test_a_store_that_is_away_when_a_follower_starts_is_waited_for(lab: Lab, tmp_path: Path) -> None:
    handle = lab.submit(trainer("print('hello')"))
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    follower = lab.follower(handle)
    follower._store = Flaky(lab.site.store, {1, 2})  # type: ignore[assignment]
    steps = [follower.step() for _ in range(2)]
    assert not any(step.done for step in steps) and "out of reach" in steps[0].notes[0]


def test_a_zombie_of_before_a_clear_is_fenced_whatever_its_max_tries(lab: Lab) -> None:
    """The DAG's retries were lowered before the clear, so that the new max_tries is the smaller one."""
    spec = counting(steps=40)
    lab.submit(spec, max_tries=5, try_number=1)
    second = lab.submit(spec, max_tries=2, try_number=2)
    with pytest.raises(Fenced, match="older than generation 2"):
        lab.submit(spec, max_tries=5, try_number=1)
    assert lab.wait(second)[0].success


@pytest.mark.parametrize(
    ("name", "says"), [(b"\xff\xfe", "no UTF-8"), (b"a\\b", "neither saved nor restored")], ids=["bytes", "backslash"]
)
def test_a_file_name_that_cannot_be_restored_is_refused_when_saved(lab: Lab, name: bytes, says: str) -> None:
    body = f"""
for step in (1, 2, 3, 4):
    path = b"good" if step == ctx.params["good"] else {name!r}
    open(os.fsencode(ctx.checkpoint_folder(step)) + b"/" + path, "w").write("x")
    ctx.ready(step)
time.sleep(ctx.params["then"])
"""
    observation, lines = lab.wait(lab.submit(trainer(body, params={"good": 0, "then": 30})))
    assert observation.phase is Phase.FAILED and any(says in line for line in lines), lines
    other = replace(KEY, run_id="one good one among them")
    observation, lines = lab.wait(lab.submit(trainer(body, params={"good": 3, "then": 0}), key=other))
    assert observation.success and commits(lab, other) == 1, lines


def test_long_file_names_come_back(lab: Lab) -> None:
    body = """
if ctx.restored:
    ctx.result({"names": os.listdir(ctx.restored.folder)})
else:
    (ctx.checkpoint_folder(1) / ("n" * 255)).write_text("x")
    ctx.ready(1)
    time.sleep(2)
    sys.exit(1)
"""
    spec = trainer(body)
    handle = lab.submit(spec)
    failure(lab, handle, lab.wait(handle)[0])
    second = lab.submit(spec, try_number=2)
    lab.wait(second)
    assert runs.collect(lab.site, second).result == {"names": ["n" * 255]}


@pytest.mark.parametrize("name", ["models//x", "my\\model", "a/../b", "m" * 300, "m/", "/m", "ü"])
def test_a_model_name_that_cannot_be_published_is_refused_before_training(name: str) -> None:
    with pytest.raises(SpecError, match="a model's name has"):
        RunSpec(command=("true",), publish=name)


@pytest.mark.parametrize("command", [("echo", "x" * 200_000), ("echo", "a\0b")])
def test_an_argument_that_the_kernel_refuses_is_refused_before(command: tuple[str, ...]) -> None:
    with pytest.raises(SpecError, match="trainer_params"):
        RunSpec(command=command)


def test_a_store_that_does_not_delete_costs_room_not_the_run(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoDelete:
        def __init__(self, mover: Mover) -> None:
            self._mover = mover

        def __getattr__(self, name: str) -> Any:
            return getattr(self._mover, name)

        def delete(self, keys: Any) -> None:
            raise StoreForbidden("s3:DeleteObject")

    monkeypatch.setattr(keeping, "open_mover", lambda config: NoDelete(open_mover(config)))
    store, log = lab.site.store, RunLog(lab.site.store, KEY.prefix)
    open_generation(log, 1, spec_digest="d", max_tries=0, try_number=1, restore_since=1)
    member = Member(owner="owner", rank=0, pod_uid="pod", nonce="nonce")
    epoch = begin(log, generation=1, member=member, world_size=1, deadline_s=10)
    said: list[str] = []
    kept = keeping.Keeping(
        workspace=Workspace(tmp_path),
        epoch=epoch,
        log=log,
        store=store,
        config=lab.site.store_config,
        policy=Checkpointing(keep=2),
        kept=None,
        run_key=KEY,
        rank=0,
        say=said.append,
    )
    for step in range(5):
        saved = save_bytes(store, b"x", f"{epoch.data_prefix}/step-{step}", "f")
        epoch.commit(step, {saved.key: saved.sha256})
        kept.committed()
        kept.clean()
    kept.close()
    assert [commit.step for commit in log.read().live] == [3, 4]
    assert len(said) == 1 and "could not be deleted" in said[0]


def damage_log(lab: Lab) -> None:
    path = Path(lab.site.store_config.directory) / KEY.prefix / "log" / f"{1:012d}.json"
    path.write_text("{")


def test_cancel_ends_the_processes_even_if_the_log_cannot_be_written(lab: Lab) -> None:
    handle = lab.submit(counting(steps=1000))
    lab.wait_for(lambda: commits(lab) >= 1)
    pids = [trainer_pid(lab, handle), runtime_pid(lab, handle)]
    damage_log(lab)
    with pytest.raises(RunLogError):
        runs.cancel(lab.site, handle, "test")
    assert not any(alive(pid) for pid in pids)


def rename_host(lab: Lab, handle: Any, **changes: str) -> None:
    path = lab.folder(handle) / "process.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_another_host_name_on_the_same_boot_is_the_same_machine(lab: Lab) -> None:
    """A worker's container was made anew."""
    handle = lab.submit(counting(steps=1000))
    lab.wait_for(lambda: commits(lab) >= 1)
    rename_host(lab, handle, host="old-container")
    assert lab.site.route.observe(handle).phase is Phase.RUNNING
    runs.cancel(lab.site, handle, "test")


def test_another_machine_is_out_of_reach_and_says_what_to_delete_if_it_is_gone(lab: Lab) -> None:
    handle = lab.submit(counting(steps=3))
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    rename_host(lab, handle, host="elsewhere", boot="another")
    with pytest.raises(ClusterUnreachable, match=f"delete {lab.folder(handle)}"):
        lab.site.route.observe(handle)
    lab.handles.clear()


def test_a_reboot_is_a_lost_run(lab: Lab) -> None:
    handle = lab.submit(counting(steps=1000))
    lab.wait_for(lambda: commits(lab) >= 1)
    kill_runtime(lab, handle)
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    rename_host(lab, handle, boot="before")
    observation = lab.site.route.observe(handle)
    assert (observation.phase, observation.reason) == (Phase.LOST, "Rebooted")


@pytest.mark.parametrize("file", ["job.json", "process.json"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_file_of_the_route_is_named(lab: Lab, file: str, text: str) -> None:
    handle = lab.submit(trainer("pass"))
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    good = (lab.folder(handle) / file).read_text()
    (lab.folder(handle) / file).write_text(text)
    with pytest.raises(RouteError, match=f"{file} is damaged.*delete"):
        lab.site.route.cancel(handle)
    (lab.folder(handle) / file).write_text(good)


@pytest.mark.parametrize("text", ["", "{}", '{"code": "x"}', "[]"])
def test_a_damaged_last_word_is_none(lab: Lab, text: str) -> None:
    handle = lab.submit(trainer("sys.exit(1)"))
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    (lab.folder(handle) / "exit.json").write_text(text)
    assert lab.site.route.observe(handle).reason == "Killed"


@pytest.mark.parametrize("metric", ["float('nan')", "float('inf')", "__import__('numpy').float32(0.5)"])
def test_metrics_that_json_has_not_are_kept(lab: Lab, metric: str) -> None:
    body = f"(ctx.checkpoint_folder(1) / 'f').write_text('x')\nctx.ready(1, loss={metric})"
    observation, lines = lab.wait(lab.submit(trainer(body)))
    assert observation.success, lines
    assert RunLog(lab.site.store, KEY.prefix).read().commits[0].metrics["loss"] in ("nan", "inf", 0.5)


def test_a_result_that_is_no_json_fails_the_run_rather_than_every_collect(lab: Lab) -> None:
    handle = lab.submit(trainer("open(os.environ['GPU_BURST_RESULT_FILE'], 'w').write('{oops')"))
    error = failure(lab, handle, lab.wait(handle)[0])
    assert "no JSON" in str(error) and not error.retryable


def test_the_output_of_a_run_that_ended_unwatched_is_there_for_the_retry(lab: Lab) -> None:
    spec = counting()
    handle = lab.submit(spec)
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    assert "step 3" in list(runs.unprinted(lab.site.store, lab.submit(spec, try_number=2)))


def test_the_output_of_a_killed_run_is_kept_when_a_retry_clears_up(lab: Lab) -> None:
    spec = trainer("for n in range(10_000): print(f'line {n}', flush=True); time.sleep(0.005)")
    handle = lab.submit(spec)
    lab.wait_for(lambda: lab.site.route.observe(handle).phase is Phase.RUNNING)
    threading.Event().wait(1.5)
    kill_runtime(lab, handle)
    lab.wait_for(lambda: lab.site.route.observe(handle).terminal)
    written = (lab.folder(handle) / "scratch" / "output.log").read_text().count("line ")
    second = lab.submit(spec, try_number=2)
    assert sum(line.startswith("line") for line in runs.unprinted(lab.site.store, handle)) >= written > 100
    runs.cancel(lab.site, second, "test")


def test_many_at_once_end_in_one_run(lab: Lab) -> None:
    """Tries, retries, zombies and clears of one run key, in threads: nothing but our own errors, and one trainer."""
    spec, errors = counting(steps=400), []

    def submit(number: int) -> None:
        try:
            lab.submit(spec, max_tries=2 + number % 3, try_number=1 + number % 3)
        except GpuBurstError as error:
            if not isinstance(error, Fenced):
                errors.append(error)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    history = RunLog(lab.site.store, KEY.prefix).read()
    assert [generation for generation in history.opens if generation not in history.closes] == [history.generation]
