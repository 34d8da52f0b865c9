"""Reading, appending, generations and epochs over a real directory store: what the search leaves out."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst import runlog
from airflow_gpu_burst.errors import (
    ExitCode,
    Fenced,
    NotStarted,
    Overtaken,
    Renamed,
    RunLogError,
    SpecError,
    StoreForbidden,
    StoreUnavailable,
)
from airflow_gpu_burst.runlog import (
    Adopt,
    Collect,
    Epoch,
    Finished,
    Member,
    RunLog,
    begin,
    close_generation,
    open_generation,
    settle_generation,
)
from airflow_gpu_burst.store import Entry, Store
from airflow_gpu_burst.store.directory import DirectoryStore

ASKED = {"spec_digest": "s", "max_tries": 0, "try_number": 1}


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(str(tmp_path))


@pytest.fixture
def log(store: DirectoryStore, clock: Clock) -> RunLog:
    return RunLog(store, "run", clock=clock, sleep=clock.sleep)


def start(
    store: Store, clock: Clock, *, generation: int = 1, owner: str = "A", pod: str = "P", **more: object
) -> Epoch:
    return begin(
        RunLog(store, "run", clock=clock, sleep=clock.sleep),
        generation=generation,
        member=Member(owner=owner, rank=0, pod_uid=pod),
        world_size=1,
        deadline_s=10,
        clock=clock,
        sleep=clock.sleep,
        **more,
    )


def commit(epoch: Epoch, step: int) -> int:
    return epoch.commit(step, {f"{epoch.data_prefix}/step-{step}": "0"})


class Failing:
    """A directory store of which some verbs fail, for as long as they are told to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri
        self.failing: dict[str, Exception] = {}
        self.counts: dict[str, int] = {}

    def __getattr__(self, verb: str) -> object:
        self.counts[verb] = self.counts.get(verb, 0) + 1
        if verb in self.failing:
            raise self.failing[verb]
        return getattr(self._store, verb)


def test_a_long_log_is_read_by_threads_and_whole(store: DirectoryStore, log: RunLog, clock: Clock) -> None:
    settle_generation(log, **ASKED)
    epoch = start(store, clock)
    for step in range(60):
        commit(epoch, step)
        epoch.retire()
    history = RunLog(store, "run").read()
    assert history.records == epoch._log.read().records
    assert history.tail > 100
    assert [c.step for c in history.restorable(1)] == [58, 59]


@pytest.mark.parametrize("gone", [1, 2, 17, 30])
def test_a_gap_is_damage_and_not_the_end(store: DirectoryStore, log: RunLog, clock: Clock, gone: int) -> None:
    settle_generation(log, **ASKED)
    epoch = start(store, clock)
    for step in range(40):
        commit(epoch, step)
    store.delete(f"run/log/{gone:012d}.json")
    with pytest.raises(RunLogError, match=f"record {gone} of run/log is gone, though 42 is there.*Restore"):
        RunLog(store, "run").read()


def test_a_stale_or_failing_listing_decides_nothing(store: DirectoryStore, log: RunLog) -> None:
    settle_generation(log, **ASKED)
    failing = Failing(store)
    failing.failing["list"] = StoreUnavailable("503")
    assert RunLog(failing, "run").read().tail == 1

    class Phantom(Failing):
        def list(self, prefix: str) -> Iterator[Entry]:
            return iter([Entry(f"{prefix}{n:012d}.json", 1) for n in (1, 2, 99)])

    assert RunLog(Phantom(store), "run").read().tail == 1
    failing.failing["list"] = StoreForbidden("403")
    with pytest.raises(StoreForbidden):
        RunLog(failing, "run").read()


def test_append_gives_up_in_time_and_can_be_called_again(store: DirectoryStore, clock: Clock) -> None:
    settle_generation(RunLog(store, "run"), **ASKED)
    epoch = start(store, clock)
    failing = Failing(store)
    epoch._log.store = failing
    failing.failing["create"] = StoreUnavailable("503")
    began = clock.now
    with pytest.raises(StoreUnavailable, match="gave up after 120 s, not knowing") as caught:
        commit(epoch, 1)
    assert caught.value.retryable
    assert 120 <= clock.now - began < 130
    assert failing.counts["create"] < 60
    failing.failing.clear()
    place = commit(epoch, 1)
    assert commit(epoch, 1) == place
    assert commit(epoch, 2) == place + 1
    first = epoch.finish({"rows": 1})
    assert epoch.finish({"rows": 2}) == first


def test_a_record_that_nobody_may_write_is_refused_on_reading(store: DirectoryStore, clock: Clock) -> None:
    settle_generation(RunLog(store, "run"), **ASKED)
    old = start(store, clock)
    start(store, clock, owner="B")
    forged = runlog.Commit(
        seq=4, id="x", generation=1, owner="A", at="", epoch=old.number, step=1, manifests={"k": "0"}, metrics={}
    )
    store.create("run/log/000000000004.json", runlog.records.encode(forged))
    with pytest.raises(RunLogError, match="'commit' at 4 that was not permitted there.*gpu-burst doctor") as caught:
        RunLog(store, "run").read()
    assert not isinstance(caught.value, Fenced)


def test_threads_share_one_log(store: DirectoryStore, clock: Clock) -> None:
    settle_generation(RunLog(store, "run"), **ASKED)
    epoch = start(store, clock)
    stop = threading.Event()
    problems: list[BaseException] = []

    def look() -> None:
        try:
            while not stop.is_set():
                epoch.check()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(100):
        commit(epoch, step)
        epoch.retire()
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []


def test_retire_hands_out_each_commit_once_and_again_to_the_next_epoch(store: DirectoryStore, clock: Clock) -> None:
    settle_generation(RunLog(store, "run"), **ASKED)
    epoch = start(store, clock)
    places = [commit(epoch, step) for step in range(4)]
    assert [c.seq for c in epoch.retire(extra_protected=[places[0]])] == places[1:2]
    assert epoch.retire(extra_protected=[places[0]]) == ()
    after_crash = start(store, clock)
    assert after_crash.restore_from is not None
    assert after_crash.restore_from.seq == places[3]
    assert [c.seq for c in after_crash.retire()] == places[:2]
    with pytest.raises(RunLogError, match="keep at least 2"):
        after_crash.retire(keep=1)


def test_what_the_newest_start_restores_is_kept(store: DirectoryStore, clock: Clock) -> None:
    settle_generation(RunLog(store, "run"), **ASKED)
    first = start(store, clock)
    place = commit(first, 1)
    second = start(store, clock)
    for step in range(2, 6):
        commit(second, step)
    assert place not in [c.seq for c in second.retire()]


def test_a_run_without_checkpoints_restores_none(store: DirectoryStore, clock: Clock) -> None:
    settle_generation(RunLog(store, "run"), **ASKED)
    commit(start(store, clock), 1)
    assert start(store, clock, restore=False).restore_from is None
    assert start(store, clock).restore_from is not None


def test_damage_is_remembered_by_later_epochs(store: DirectoryStore, clock: Clock) -> None:
    settle_generation(RunLog(store, "run"), **ASKED)
    first = start(store, clock)
    good, bad = commit(first, 1), commit(first, 2)
    epoch = start(store, clock)
    assert epoch.restore_from is not None
    assert epoch.restore_from.seq == bad
    epoch = epoch.restart_without(bad)
    assert epoch.restore_from is not None
    assert epoch.restore_from.seq == good
    later = start(store, clock, owner="B")
    assert later.restore_from is not None
    assert later.restore_from.seq == good
    with pytest.raises(Fenced):
        epoch.restart_without(good)


def test_fenced_and_finished_have_their_exit_codes(store: DirectoryStore, log: RunLog, clock: Clock) -> None:
    settle_generation(log, **ASKED)
    ghost = start(store, clock, owner="A")
    epoch = start(store, clock, owner="B")
    for act in (ghost.check, lambda: commit(ghost, 1), lambda: ghost.finish({}), ghost.retire, ghost.restart):
        with pytest.raises(Fenced) as fenced:
            act()
        assert fenced.value.exit_code == ExitCode.FENCED
    epoch.finish({"rows": 3})
    epoch.check()
    with pytest.raises(Finished) as finished:
        start(store, clock, owner="C")
    assert finished.value.exit_code == ExitCode.OK
    assert finished.value.finish.result == {"rows": 3}
    assert close_generation(log, 1, "failed", "pod killed").verdict == "succeeded"
    assert close_generation(log, 1, "lost").verdict == "succeeded"
    with pytest.raises(Fenced):
        start(store, clock, owner="C")


def test_a_rank_that_is_never_named_says_so(store: DirectoryStore, log: RunLog, clock: Clock) -> None:
    settle_generation(log, **ASKED)
    for rank, said in ((0, "ranks \\[1\\] have not registered"), (1, "rank 0 has not named this rank")):
        member = Member(owner=f"O{rank}", rank=rank, pod_uid="P")
        with pytest.raises(NotStarted, match=said) as caught:
            begin(log, generation=1, member=member, world_size=2, deadline_s=10, clock=clock, sleep=clock.sleep)
        assert caught.value.exit_code == ExitCode.RETRY_MAY_HELP
        assert caught.value.retryable


def test_an_older_epoch_object_of_the_same_boot_is_told_apart_from_a_ghost(
    store: DirectoryStore, log: RunLog, clock: Clock
) -> None:
    settle_generation(log, **ASKED)
    epoch = start(store, clock)
    newer = epoch.restart()
    with pytest.raises(Renamed):
        epoch.check()
    with pytest.raises(Renamed):
        commit(epoch, 1)
    newer.check()


def test_only_rank_0_writes_and_only_below_its_epoch(store: DirectoryStore, log: RunLog, clock: Clock) -> None:
    settle_generation(log, **ASKED)
    epoch = start(store, clock)
    for manifests in ({}, {"run/data/000000000001/00000-x/m": "0"}, {"elsewhere": "0"}):
        with pytest.raises(RunLogError, match="below `Epoch.data_prefix`"):
            epoch.commit(1, manifests)
    assert f"/{epoch.number:012d}/" in epoch.data_prefix
    assert epoch.data_prefix.startswith("run/data/")


@pytest.mark.parametrize("change", [{"owner": "a/b"}, {"pod_uid": ""}, {"nonce": "../x"}, {"rank": -1}])
def test_members_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(RunLogError):
        Member(**{"owner": "o", "rank": 0, "pod_uid": "p", "nonce": "n", **change})


def test_generations_and_what_they_restore(store: DirectoryStore, log: RunLog, clock: Clock) -> None:
    assert settle_generation(log, **ASKED) == Adopt(generation=1)
    assert settle_generation(log, **ASKED) == Adopt(generation=1)
    place = commit(start(store, clock), 1)
    close_generation(log, 1, "failed", "exit code 7")
    assert settle_generation(log, **ASKED) == Adopt(generation=2)
    epoch = start(store, clock, generation=2)
    assert epoch.restore_from is not None
    assert epoch.restore_from.seq == place
    commit(epoch, 2)
    epoch.finish({})
    assert isinstance(settle_generation(log, **ASKED), Collect)
    cleared = {**ASKED, "max_tries": 2, "try_number": 3}
    assert settle_generation(log, **cleared) == Adopt(generation=3)
    assert log.read().closes[2].verdict == "succeeded"
    assert start(store, clock, generation=3).restore_from is None
    with pytest.raises(Fenced):
        settle_generation(log, **ASKED)
    close_generation(log, 3, "failed")
    other = {**cleared, "spec_digest": "t"}
    assert settle_generation(log, **other) == Adopt(generation=4)
    assert log.read().opens[4].restore_since == 4
    close_generation(log, 4, "lost")
    assert settle_generation(log, **cleared, goes_on=lambda previous: True) == Adopt(generation=5)
    assert log.read().opens[5].restore_since == 4
    close_generation(log, 5, "lost")
    assert settle_generation(log, **cleared, goes_on=lambda previous: False) == Adopt(generation=6)
    assert log.read().opens[6].restore_since == 6


def test_generations_that_cannot_be(log: RunLog, store: DirectoryStore, clock: Clock) -> None:
    with pytest.raises(RunLogError, match="never opened"):
        start(store, clock)
    with pytest.raises(RunLogError, match="never opened"):
        close_generation(log, 1, "failed")
    open_generation(log, 1, **ASKED)
    assert open_generation(log, 1, **ASKED).seq == 1
    with pytest.raises(Overtaken, match="plan again"):
        open_generation(log, 1, **{**ASKED, "max_tries": 2})
    with pytest.raises(RunLogError, match="close it first"):
        open_generation(log, 2, **ASKED)
    with pytest.raises(Fenced):
        open_generation(log, 3, **ASKED)
    with pytest.raises(RunLogError, match="no result"):
        close_generation(log, 1, "succeeded")
    with pytest.raises(RunLogError, match="use one of succeeded, failed, cancelled, lost"):
        close_generation(log, 1, "shrug")
    with pytest.raises(SpecError, match="Clear the task"):
        settle_generation(log, **{**ASKED, "spec_digest": "t"})


def test_importing_is_light() -> None:
    code = (
        "import sys; import airflow_gpu_burst.store, airflow_gpu_burst.runlog\n"
        "heavy = {'boto3', 'botocore', 'urllib3', 'ssl', 'hashlib', 'asyncio', 'airflow', 'kubernetes'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_that_is_exported_exists() -> None:
    assert sorted(runlog.__all__) == runlog.__all__
    assert all(hasattr(runlog, name) for name in runlog.__all__)
