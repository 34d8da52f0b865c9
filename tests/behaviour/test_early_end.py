"""A run's success is known when its last line comes, from the run log: seconds before the cluster tells of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu_burst import contract, runs
from airflow_gpu_burst.contract import PodResult
from airflow_gpu_burst.runlog import Member, RunLog, begin
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
