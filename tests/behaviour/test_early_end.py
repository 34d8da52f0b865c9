"""A run's success is known when its last line comes, from the run log: seconds before the cluster tells of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst import contract, runs
from airflow_gpu_burst.contract import PodResult
from airflow_gpu_burst.errors import RunFailed
from airflow_gpu_burst.runlog import Member, RunLog, begin
from airflow_gpu_burst.runtime.output import end_key, stream_prefix
from airflow_gpu_burst.state import Handle, Phase
from tests.behaviour.test_direct import STREAM, Cluster, lines, steps
from tests.fake_apiserver import FakeApi


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api


@pytest.fixture
def cluster(api: FakeApi, tmp_path: Path) -> Cluster:
    return Cluster(api, tmp_path)


def printed(text: bytes) -> bytes:
    return b"".join(b"2026-01-01T00:00:00.000000001Z " + line for line in text.splitlines(keepends=True))


def finish(cluster: Cluster, handle: Handle) -> None:
    """As the runtime does, when its trainer has succeeded."""
    log = RunLog(cluster.site.store, handle.run_key.prefix)
    member = Member(owner=handle.uid, rank=0, pod_uid="p", nonce="n")
    epoch = begin(log, generation=handle.generation, member=member, world_size=1, deadline_s=5.0, restore=False)
    epoch.finish(PodResult(seconds=1.0).to_dict(), None)


def printing(cluster: Cluster, api: FakeApi) -> tuple[Handle, runs.Follower]:
    """A run whose pod has printed a line, and who follows it."""
    handle = cluster.submit()
    cluster.pod(handle)
    api.write("p", printed(contract.header(STREAM, 0, 1) + b"hello\n"))
    follower = cluster.follower(handle)
    steps(follower, lambda step: "hello" in step.lines)
    return handle, follower


def test_a_stream_that_breaks_off_is_not_the_end_and_loses_no_line(cluster: Cluster, api: FakeApi) -> None:
    handle, follower = printing(cluster, api)
    finish(cluster, handle)
    api.write("p", printed(b"bye\n"))
    api.end_log("p")
    until = time.monotonic() + 1.0
    found = steps(follower, lambda step: time.monotonic() > until)
    assert {step.observation.phase for step in found} == {Phase.RUNNING}
    cluster.spool(handle, contract.header(STREAM, 0, 1) + b"hello\nbye\nand more\n")
    cluster.status(handle, "Complete", succeeded=1)
    found += steps(follower, lambda step: step.done)
    assert lines(found) == ["bye", "and more"]
    assert runs.collect(cluster.site, handle, found[-1].observation).seconds == 1.0
    follower.close()


def test_without_its_note_the_cluster_decides(cluster: Cluster, api: FakeApi) -> None:
    handle, follower = printing(cluster, api)
    api.end_log("p")
    until = time.monotonic() + 1.0
    found = steps(follower, lambda step: time.monotonic() > until)
    assert {step.observation.phase for step in found} == {Phase.RUNNING}
    cluster.status(handle, "Failed", failed=1)
    assert steps(follower, lambda step: step.done)[-1].observation.phase is Phase.FAILED
    follower.close()


def test_when_all_pods_have_ended_the_log_is_asked_too(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    finish(cluster, handle)
    ended = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z"}}
    cluster.pod(handle, state=ended, phase="Succeeded")
    assert steps(follower, lambda step: step.done)[-1].observation.success
    follower.close()


def test_the_last_line_is_the_end_of_it_too(cluster: Cluster, api: FakeApi) -> None:
    handle, follower = printing(cluster, api)
    api.write("p", printed(b"gpu-burst: finished in 1.0 s: says the trainer\n"))
    (told,) = [step for step in steps(follower, lambda step: step.lines) if step.lines]
    assert not told.done
    finish(cluster, handle)
    api.write("p", printed(b"gpu-burst: finished in 1.0 s\n"))
    found = steps(follower, lambda step: step.done)
    assert found[-1].observation.success and lines(found) == ["gpu-burst: finished in 1.0 s"]
    follower.close()


FAILED = b"gpu-burst: ended with exit code 7 (TrainerFailed)\n"


def leave_word(cluster: Cluster, handle: Handle, code: int = 7) -> None:
    """As the runtime does, when its trainer has failed."""
    stream = f"{stream_prefix(handle.run_key.prefix, handle.generation)}{STREAM}"
    word = {"code": code, "reason": "TrainerFailed", "message": "the trainer exited with 1"}
    cluster.site.store.put(end_key(stream), json.dumps(word).encode())


def test_a_failure_is_told_by_the_last_line_and_the_word_in_the_store(cluster: Cluster, api: FakeApi) -> None:
    handle, follower = printing(cluster, api)
    leave_word(cluster, handle)
    api.write("p", printed(FAILED))
    found = steps(follower, lambda step: step.done)
    follower.close()
    observation = found[-1].observation
    assert (observation.phase, observation.reason, observation.code) == (Phase.FAILED, "TrainerFailed", 7)
    assert lines(found) == [FAILED.decode().strip()]
    # Collecting waits for the cluster's own verdict, so that the failed job stays to be looked at.
    threading.Timer(0.7, lambda: cluster.status(handle, "Failed", failed=1)).start()
    with pytest.raises(RunFailed, match="the trainer exited with 1") as failure:
        runs.collect(cluster.site, handle, observation)
    assert failure.value.code == 7
    assert [job["metadata"]["name"] for job in cluster.jobs()] == [handle.name]


@pytest.mark.parametrize("case", ["a trainer's own line", "a retry may help", "the pod is taken away"])
def test_what_is_no_end_yet_is_waited_for(case: str, cluster: Cluster, api: FakeApi) -> None:
    handle, follower = printing(cluster, api)
    if case != "a trainer's own line":
        leave_word(cluster, handle, code=4 if case == "a retry may help" else 7)
    if case == "the pod is taken away":
        (pod,) = cluster.objects("Pod")
        taken = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        api.put({**pod, "status": {**pod["status"], "conditions": [taken]}})
        steps(follower, lambda step: step.observation.phase is not Phase.RUNNING)
    api.write("p", printed(FAILED))
    until = time.monotonic() + 1.0
    found = steps(follower, lambda step: time.monotonic() > until)
    follower.close()
    assert not [step for step in found if step.done or step.observation.terminal]
    assert FAILED.decode().strip() in lines(found)
