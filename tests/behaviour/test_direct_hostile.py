"""What a hostile reviewer did to the direct route: every case once went wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import runs
from airflow_gpu_burst.errors import ClusterUnauthorized, GpuBurstError, StoreUnavailable
from airflow_gpu_burst.routes.kube import kube_of
from airflow_gpu_burst.routes.pod_logs import PodLogs
from airflow_gpu_burst.routes.watching import Watcher, watcher_of
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import Phase
from airflow_gpu_burst.store import Entry
from airflow_gpu_burst.store.directory import DirectoryStore
from airflow_gpu_burst.workloads import pods_of
from airflow_gpu_burst.workloads.kinds import JOB
from airflow_gpu_burst.workloads.snapshot import Snapshot
from tests.behaviour.test_direct import RAW, Cluster, header, lines, stamped, steps, wait_for
from tests.fake_apiserver import FakeApi


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api


@pytest.fixture
def cluster(api: FakeApi, tmp_path: Path) -> Cluster:
    return Cluster(api, tmp_path)


class Moody(DirectoryStore):
    """A store that does not answer while `out` is set; `slow` holds a get up until it is set."""

    out = False
    slow: threading.Event | None = None
    asked = threading.Event()

    def list(self, prefix: str) -> Iterator[Entry]:
        if self.out:
            raise StoreUnavailable("out. Try again")
        return super().list(prefix)

    def get(self, key: str) -> bytes:
        if self.out:
            raise StoreUnavailable("out. Try again")
        if self.slow is not None:
            self.asked.set()
            self.slow.wait(20)
        return super().get(key)


def test_live_lines_survive_a_store_that_does_not_answer(cluster: Cluster, api: FakeApi, tmp_path: Path) -> None:
    handle = cluster.submit()
    store = Moody(str(tmp_path / "store"))
    follower = runs.Follower(
        store=store, route=cluster.site.route, handle=handle, timeouts=runs_timeouts(), submitted_at=time.time()
    )
    api.write("p", stamped(header() + b"one\n"))
    cluster.pod(handle)
    cluster.status(handle, active=1)
    found = steps(follower, lambda step: "one" in step.lines)
    api.write("p", stamped(b"two\n"))
    cluster.spool(handle, header() + b"one\ntwo\n")
    store.out = True
    cluster.status(handle, "Complete", succeeded=1)
    time.sleep(0.5)  # so that one look meets both
    found += steps(follower, lambda step: "out of reach" in "".join(step.notes))
    store.out = False
    found += steps(follower, lambda step: step.done)
    assert lines(found) == ["one", "two"]
    follower.close()


def runs_timeouts() -> Any:
    from airflow_gpu_burst.spec import Timeouts

    return Timeouts()


def test_a_look_that_is_under_way_leaves_nothing_behind_when_its_follower_is_closed(
    cluster: Cluster, api: FakeApi, tmp_path: Path
) -> None:
    handle = cluster.submit()
    store = Moody(str(tmp_path / "store"))
    store.slow, store.asked = threading.Event(), threading.Event()
    follower = runs.Follower(
        store=store, route=cluster.site.route, handle=handle, timeouts=runs_timeouts(), submitted_at=time.time()
    )
    look = threading.Thread(target=follower.step)
    look.start()
    store.asked.wait(20)
    follower.close()
    store.slow.set()
    look.join(20)
    session = watcher_of(kube_of(cluster.site.route._config.api), "train")._session  # type: ignore[attr-defined]
    assert session is None or session.over, "its threads go on for nobody"


def test_a_cleared_run_of_another_kind_is_ended_too(cluster: Cluster) -> None:
    cluster.submit(RunSpec(command=("x",), image="i", gpus=16, platform="generic"))
    kinds = {item["kind"] for item in cluster.api.objects.values()}
    assert kinds == {"JobSet"}
    cluster.submit(RunSpec(command=("x",), image="i", gpus=1, platform="generic"), try_number=2, max_tries=4)
    assert {item["kind"] for item in cluster.api.objects.values()} == {"Job"}


def test_what_one_clear_could_not_end_the_next_one_does(cluster: Cluster, api: FakeApi) -> None:
    first = cluster.submit()
    api.stop()
    with pytest.raises(GpuBurstError):
        cluster.submit(try_number=2, max_tries=4)
    api.start()
    last = cluster.submit(try_number=3, max_tries=5)
    assert last.generation == 3
    assert [job["metadata"]["name"] for job in cluster.jobs()] == [last.name], f"{first.name} runs on"


def test_a_cluster_without_jobsets_is_listed(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    api.fault("html", verb="list", resource="jobsets", status=404, times=1000)
    assert [found.handle.uid for found in cluster.site.route.find()] == [handle.uid]


def test_a_delete_whose_answer_is_lost_is_sent_again(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    api.fault("status", verb="delete", resource="jobs", status=500)
    runs.cancel(cluster.site, handle, "by hand")
    assert cluster.jobs() == []


def test_a_right_that_is_taken_for_a_moment_fails_no_run(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    cluster.pod(handle)
    cluster.status(handle, active=1)
    steps(follower, lambda step: step.observation.phase is Phase.RUNNING)
    faults = [api.forbid("list", "pods"), api.forbid("watch", "pods")]
    api.compact()
    api.cut_connections()
    steps(follower, lambda step: "out of reach" in "".join(step.notes))
    for fault in faults:
        fault.end()
    found = steps(follower, lambda step: not step.notes and step.wait_s > 5)
    assert found[-1].observation.phase is Phase.RUNNING
    follower.close()


def test_a_raw_pod_that_is_gone_is_not_asked_for_its_log_for_ever(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit(RunSpec(manifest=RAW, platform="generic"))
    cluster.pod(handle)
    api.write("p", stamped(b"one\n"))
    kube = kube_of(cluster.site.route._config.api)  # type: ignore[attr-defined]
    logs = PodLogs(kube, "train", lambda: None, resume=True, since={})
    pod = cluster.objects("Pod")[0]
    job = cluster.jobs()[0]
    logs.want(pods_of(Snapshot(object=job, pods=(pod,))))
    wait_for(lambda: logs._size)
    api.delete("pods", "p")
    del api.logs["p", "trainer"]
    api.cut_connections()
    logs.want(pods_of(Snapshot(object=job)))
    logs.take()
    wait_for(lambda: not logs.take() and not logs.reading(), 10)
    logs.close()


def test_a_subscriber_that_comes_as_the_last_one_leaves_is_served(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    watcher = Watcher(kube_of(cluster.site.route._config.api), "train")  # type: ignore[attr-defined]
    first = watcher.subscribe(JOB, "other", "uid", lambda: None)
    session = watcher._session
    assert session is not None
    want = session.mirror.want

    def leaves(name: str, by: int) -> None:
        want(name, by)
        session.mirror.want = want  # type: ignore[method-assign]
        first.close()

    session.mirror.want = leaves  # type: ignore[method-assign]
    second = watcher.subscribe(JOB, handle.name, handle.uid, lambda: None)
    wait_for(lambda: second.snapshot() is not None, 10)
    api.delete("jobs", handle.name)
    wait_for(lambda: second.snapshot().object is None, 10)  # type: ignore[union-attr]
    second.close()


def test_patience_with_refused_credentials_ends_though_the_connection_is_read_again(
    cluster: Cluster, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_gpu_burst.runs import following
    from airflow_gpu_burst.triggers import gpu_job

    handle = cluster.submit()
    trigger = gpu_job.GpuJobTrigger(handle.to_json(), {}, time.time(), 0.05)

    async def site(handle: Any) -> Any:
        return cluster.site

    monkeypatch.setattr(trigger, "_site", site)
    monkeypatch.setattr(gpu_job, "CONNECTION_EVERY_S", 1.0)
    monkeypatch.setattr(following, "PATIENCE_S", 6.0)
    monkeypatch.setattr(gpu_job, "PATIENCE_S", 6.0)
    api.tokens = {"another"}

    async def first() -> Any:
        async for event in trigger.run():
            return event.payload

    payload = asyncio.run(asyncio.wait_for(first(), 40))
    assert payload["error"] == ClusterUnauthorized.__name__
