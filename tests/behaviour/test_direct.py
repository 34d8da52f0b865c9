"""The direct route against an API server that goes wrong on demand: one object per generation, whatever is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import contract, runs
from airflow_gpu_burst.errors import (
    ClusterForbidden,
    ClusterUnauthorized,
    ClusterUnreachable,
    GpuBurstError,
    RunFailed,
    RunTimeout,
    SpecError,
)
from airflow_gpu_burst.routes import ClusterConfig, KubeConfig
from airflow_gpu_burst.routes.direct import DirectRoute
from airflow_gpu_burst.runs import Site
from airflow_gpu_burst.runtime.output import chunk_key, stream_prefix
from airflow_gpu_burst.spec import RunSpec, Timeouts
from airflow_gpu_burst.state import Handle, Phase, RunKey
from airflow_gpu_burst.store import StoreConfig, open_store
from tests.fake_apiserver import FakeApi

fault = pytest.mark.fault
KEY = RunKey(dag_id="dag", task_id="train", run_id="manual__2026-01-01 ☃ spaces")
SPEC = RunSpec(command=("python3", "train.py"), image="fab/train:1", gpus=1, platform="generic")
STREAM = "20260101T000000-00000-aaaaaaaa"


class Cluster:
    """A site on a fake cluster, with shorthand for what its controllers would do."""

    def __init__(self, api: FakeApi, path: Path, store: str = "store") -> None:
        self.api = api
        (path / store).mkdir(exist_ok=True)
        config = StoreConfig(uri=f"file://{path}/{store}")
        cluster = ClusterConfig(connection="gpu", route="direct", api=KubeConfig(kubeconfig=api.kubeconfig()))
        self.site = Site(
            route=DirectRoute(cluster, sleep=lambda seconds: time.sleep(seconds / 20)),
            store=open_store(config),
            store_config=config,
            connection="gpu",
            store_connection="store",
        )

    def submit(self, spec: RunSpec = SPEC, key: RunKey = KEY, max_tries: int = 2, try_number: int = 1) -> Handle:
        return runs.submit(self.site, spec=spec, run_key=key, max_tries=max_tries, try_number=try_number)

    def follower(self, handle: Handle, **options: Any) -> runs.Follower:
        values = {"timeouts": Timeouts(), "submitted_at": time.time(), "poll_s": 0.05, **options}
        return runs.Follower(store=self.site.store, route=self.site.route, handle=handle, **values)

    def jobs(self) -> list[dict[str, Any]]:
        return self.objects("Job")

    def objects(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.api.objects.values() if item["kind"] == kind]

    def status(self, handle: Handle, *conditions: str, **status: Any) -> None:
        (job,) = [item for item in self.jobs() if item["metadata"]["name"] == handle.name]
        found = [{"type": name, "status": "True", "reason": name, "message": "m"} for name in conditions]
        self.api.put({**job, "status": {**status, "conditions": found}})

    def pod(self, handle: Handle, name: str = "p", state: dict[str, Any] | None = None, phase: str = "Running") -> None:
        labels = {"app.kubernetes.io/managed-by": "airflow-gpu-burst", "gpu-burst/name": handle.name}
        now = "2026-01-01T00:00:00Z"
        owner = {"kind": "Job", "name": handle.name, "uid": handle.uid, "controller": True, "apiVersion": "batch/v1"}
        self.api.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "train", "labels": labels, "ownerReferences": [owner]},
                "spec": {"containers": [{"name": "trainer"}], "nodeName": "node-1"},
                "status": {
                    "phase": phase,
                    "containerStatuses": [
                        {
                            "name": "trainer",
                            "restartCount": 0,
                            "containerID": "c",
                            "state": state or {"running": {"startedAt": now}},
                        }
                    ],
                },
            }
        )

    def spool(self, handle: Handle, data: bytes, offset: int = 0) -> None:
        stream = f"{stream_prefix(handle.run_key.prefix, handle.generation)}{STREAM}"
        self.site.store.put(chunk_key(stream, offset), data)


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api


@pytest.fixture
def cluster(api: FakeApi, tmp_path: Path) -> Cluster:
    return Cluster(api, tmp_path)


def wait_for(what: Any, timeout_s: float = 20) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def steps(follower: runs.Follower, until: Any, timeout_s: float = 20) -> list[runs.Step]:
    """Looks until one satisfies `until`."""
    found: list[runs.Step] = []

    def look() -> bool:
        found.append(follower.step())
        return bool(until(found[-1]))

    wait_for(look, timeout_s)
    return found


def lines(found: list[runs.Step]) -> list[str]:
    return [line for step in found for line in step.lines]


def notes(found: list[runs.Step]) -> str:
    return "\n".join(note for step in found for note in step.notes)


# --- one object per generation ------------------------------------------------------------------------------------


def test_no_secret_is_in_the_manifest(cluster: Cluster) -> None:
    cluster.submit()
    (job,) = cluster.jobs()
    env = job["spec"]["template"]["spec"]["containers"][0]["env"]
    references = {e["name"] for e in env if "secretKeyRef" in e.get("valueFrom", {})}
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", contract.ENV_CATALOG_SECRETS} <= references
    assert {e["name"]: e.get("value") for e in env}["GPU_BURST_STORE"] == cluster.site.store.uri


@fault(
    "the answer of the create call is lost (once, twice, 500, 504, 429)",
    outcome="the object is asked for by its name and adopted; one job",
)
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "lost"},
        {"kind": "drop"},
        {"kind": "status", "status": 500},
        {"kind": "status", "status": 429, "retry_after": "0"},
        {"kind": "done-but", "status": 504},
        {"kind": "lost", "times": 2},
    ],
)
def test_a_lost_answer_never_makes_a_second_job(cluster: Cluster, api: FakeApi, fault: dict[str, Any]) -> None:
    api.fault(verb="create", resource="jobs", **fault)
    handle = cluster.submit()
    (job,) = cluster.jobs()
    assert handle.uid == job["metadata"]["uid"] and handle.name == job["metadata"]["name"]


def test_a_retry_adopts_and_a_clear_makes_the_next_generation(cluster: Cluster) -> None:
    first = cluster.submit()
    assert cluster.submit(try_number=2).uid == first.uid
    cleared = cluster.submit(try_number=3, max_tries=4)
    assert (cleared.generation, cleared.uid != first.uid) == (2, True)
    assert [job["metadata"]["name"] for job in cluster.jobs()] == [cleared.name], "the one before was ended"


@fault("the name is taken by somebody else", outcome="SpecError with both identities; theirs is left alone")
def test_a_name_that_somebody_else_has_is_refused_with_both_identities(cluster: Cluster, api: FakeApi) -> None:
    name = KEY.object_name(1, salt=cluster.site.store.uri)
    api.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": "train"}})
    with pytest.raises(SpecError, match=f"kubectl -n train delete jobs {name}"):
        cluster.submit()


def test_two_airflows_with_equal_ids_do_not_meet(api: FakeApi, tmp_path: Path) -> None:
    one, other = Cluster(api, tmp_path, "a"), Cluster(api, tmp_path, "b")
    handles = {one.submit().name, other.submit().name, one.submit(try_number=2).name}
    assert len(handles) == 2 == len(one.jobs())


def test_submission_without_rights_names_the_line_to_add(cluster: Cluster, api: FakeApi) -> None:
    api.forbid("create", "jobs")
    with pytest.raises(ClusterForbidden, match=r"apiGroups: \[\"?batch\"?\].*create"):
        cluster.submit()


def test_without_an_image_the_connection_is_named(cluster: Cluster) -> None:
    with pytest.raises(SpecError, match="image"):
        cluster.submit(RunSpec(command=("x",), platform="generic"))


# --- cancel -------------------------------------------------------------------------------------------------------


def test_cancel_deletes_once_by_uid_and_may_be_repeated(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    runs.cancel(cluster.site, handle, "by hand")
    runs.cancel(cluster.site, handle, "by hand")
    assert cluster.jobs() == [] and api.count("delete", "jobs") == 1
    (request,) = [r for r in api.requests if r.verb == "delete"]
    assert request.body["preconditions"] == {"uid": handle.uid}


def test_cancel_leaves_a_successor_of_that_name_alone(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    api.delete("jobs", handle.name)
    api.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": handle.name, "namespace": "train"}})
    cluster.site.route.cancel(handle)
    assert len(cluster.jobs()) == 1


def test_what_has_ended_stays_for_a_look(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    cluster.status(handle, "Failed")
    with pytest.raises(RunFailed):
        runs.collect(cluster.site, handle, cluster.site.route.observe(handle))
    assert len(cluster.jobs()) == 1 and api.count("delete") == 0


# --- following ----------------------------------------------------------------------------------------------------


def header(rank: int = 0, world: int = 1) -> bytes:
    return contract.header(STREAM, rank, world)


def stamped(data: bytes, second: int = 0) -> bytes:
    return b"".join(b"2026-01-01T00:00:%02d.000000000Z %s\n" % (second, line) for line in data.splitlines())


def test_live_lines_then_the_rest_from_the_spool(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    cluster.pod(handle)
    cluster.status(handle, active=1)
    api.write("p", stamped(header() + b"one\ntwo\n"))
    found = steps(follower, lambda step: "two" in step.lines)
    assert found[-1].observation.phase is Phase.RUNNING
    cluster.spool(handle, header() + b"one\ntwo\nthree\n")
    cluster.status(handle, "Complete", succeeded=1)
    found += steps(follower, lambda step: step.done)
    assert lines(found) == ["one", "two", "three"]
    follower.close()


def test_while_all_is_well_nobody_asks(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    cluster.pod(handle)
    cluster.status(handle, active=1)
    api.write("p", stamped(header() + b"one\n"))
    steps(follower, lambda step: "one" in step.lines)
    before = len(api.requests)
    for _ in range(50):
        step = follower.step()
    assert len(api.requests) == before and step.wait_s > 30
    follower.close()


def test_a_broken_stream_goes_on_from_the_spool_at_the_very_byte(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    cluster.pod(handle)
    cluster.status(handle, active=1)
    api.write("p", stamped(header() + b"one\ntwo\n"))
    found = steps(follower, lambda step: "two" in step.lines)
    api.cut_connections()
    cluster.spool(handle, header() + b"one\ntwo\nthr")
    cluster.spool(handle, b"ee\nfour\n", offset=len(header() + b"one\ntwo\nthr"))
    found += steps(follower, lambda step: "four" in step.lines)
    assert lines(found) == ["one", "two", "three", "four"]
    follower.close()


def test_without_the_right_to_logs_it_goes_on_and_says_so_once(cluster: Cluster, api: FakeApi) -> None:
    api.forbid("get", "pods/log")
    handle = cluster.submit()
    follower = cluster.follower(handle)
    cluster.pod(handle)
    cluster.status(handle, active=1)
    cluster.spool(handle, header() + b"one\n")
    found = steps(follower, lambda step: "one" in step.lines)
    cluster.pod(handle, name="another")
    cluster.status(handle, "Complete", succeeded=1)
    found += steps(follower, lambda step: step.done)
    assert lines(found) == ["one"] and notes(found).count("lines come from the spool") == 1, notes(found)
    follower.close()


def test_events_are_in_the_tasks_log_once(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    cluster.pod(handle, state={"waiting": {"reason": "ContainerCreating"}}, phase="Pending")
    (pod,) = cluster.objects("Pod")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e", "namespace": "train"},
        "involvedObject": {"kind": "Pod", "name": "p", "uid": pod["metadata"]["uid"]},
        "reason": "FailedMount",
        "message": "no such disk",
        "type": "Warning",
        "count": 1,
    }
    api.put(event)
    found = steps(follower, lambda step: "no such disk" in "".join(step.notes))
    for _ in range(5):
        found.append(follower.step())
    assert notes(found).count("pod p: FailedMount: no such disk") == 1
    follower.close()


def test_an_unreachable_cluster_is_waited_for(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    cluster.pod(handle)
    cluster.status(handle, active=1)
    steps(follower, lambda step: step.observation.phase is Phase.RUNNING)
    api.stop()
    found = steps(follower, lambda step: "out of reach" in "".join(step.notes))
    assert found[-1].observation.phase is Phase.RUNNING, "as it was last seen"
    api.start()
    cluster.status(handle, "Complete", succeeded=1)
    found = steps(follower, lambda step: step.done, timeout_s=30)
    assert found[-1].observation.phase is Phase.SUCCEEDED
    follower.close()


def test_an_expired_token_asks_for_the_connection_to_be_read_again(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    steps(follower, lambda step: step.observation.phase is not Phase.SUBMITTED or step.notes)
    api.tokens = {"another"}
    api.cut_connections()
    steps(follower, lambda step: step.refused)
    follower.close()


@fault(
    "the cluster stays out of reach for more than 15 minutes",
    outcome="ClusterUnreachable, retryable; the job is left alone",
)
def test_patience_has_an_end(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    now = time.time()
    clock = [now]
    follower = cluster.follower(handle, wall=lambda: clock[0])
    steps(follower, lambda step: step.observation.submitted is not None)
    api.stop()
    steps(follower, lambda step: "out of reach" in "".join(step.notes))
    clock[0] += 901
    with pytest.raises(ClusterUnreachable):
        steps(follower, lambda step: False)
    follower.close()


def test_deleted_by_hand_is_lost_and_a_retry_makes_the_next(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    follower = cluster.follower(handle)
    steps(follower, lambda step: step.observation.submitted is not None)
    api.delete("jobs", handle.name)
    found = steps(follower, lambda step: step.done)
    assert (found[-1].observation.phase, found[-1].observation.reason) == (Phase.LOST, "Deleted")
    with pytest.raises(RunFailed, match="starts from the beginning"):
        runs.collect(cluster.site, handle, found[-1].observation)
    assert cluster.submit(try_number=2).generation == 2
    follower.close()


@pytest.mark.parametrize(
    ("limits", "conditions", "says"),
    [
        ({"queue_s": 100.0}, {"suspended": True}, "queue_timeout"),
        ({"start_s": 100.0}, {"pending": True}, "start_timeout"),
        ({"run_s": 100.0}, {"running": True}, "run_timeout"),
    ],
)
def test_each_clock_ends_the_run(
    cluster: Cluster, api: FakeApi, limits: dict[str, float], conditions: dict[str, bool], says: str
) -> None:
    handle = cluster.submit()
    offset = [0.0]
    follower = cluster.follower(
        handle, timeouts=Timeouts(**{"start_s": None, **limits}), wall=lambda: time.time() + offset[0]
    )
    if "suspended" in conditions:
        (job,) = cluster.jobs()
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
        api.put({**job, "spec": {**job["spec"], "suspend": True}})
        cluster.status(handle, "Suspended")
        wanted = Phase.QUEUED
    elif "pending" in conditions:
        cluster.pod(handle, state={"waiting": {"reason": "ContainerCreating"}}, phase="Pending")
        cluster.status(handle, active=1)
        wanted = Phase.STARTING
    else:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        cluster.pod(handle, state={"running": {"startedAt": now}})
        cluster.status(handle, active=1, startTime=now)
        wanted = Phase.RUNNING
    found = steps(follower, lambda step: step.observation.phase is wanted)
    assert found[-1].wait_s <= 101
    offset[0] = 102.0
    (step,) = steps(follower, lambda step: step.done)
    assert says in step.timeout
    with pytest.raises(RunTimeout, match=says):
        runs.collect(cluster.site, handle, step.observation, timeout=step.timeout)
    assert cluster.jobs() == []
    follower.close()


def test_a_clock_an_hour_off_ends_nothing(cluster: Cluster, api: FakeApi) -> None:
    api.skew_s = -3600.0
    handle = cluster.submit()
    follower = cluster.follower(handle, timeouts=Timeouts(queue_s=60, start_s=60, run_s=60))
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600))
    (job,) = cluster.jobs()
    job["metadata"]["creationTimestamp"] = created
    earlier = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600))
    cluster.pod(handle, state={"running": {"startedAt": earlier}})
    cluster.status(handle, active=1, startTime=earlier)
    found = steps(follower, lambda step: step.observation.phase is Phase.RUNNING)
    assert not any(step.timeout for step in found)
    assert abs((found[-1].observation.since or 0) - time.time()) < 30
    follower.close()


# --- ends ---------------------------------------------------------------------------------------------------------


def test_the_error_has_exit_code_last_lines_pods_and_events(cluster: Cluster) -> None:
    handle = cluster.submit()
    word = json.dumps({"code": 7, "reason": "TrainerFailed", "message": "the trainer exited with 1", "at": 1.0})
    ended = {"exitCode": 7, "reason": "Error", "message": word, "startedAt": "2026-01-01T00:00:00Z"}
    cluster.pod(handle, state={"terminated": ended}, phase="Failed")
    cluster.spool(handle, header() + b"Traceback\nValueError: no data\n")
    cluster.status(handle, "Failed", failed=1)
    with pytest.raises(RunFailed) as failure:
        runs.collect(cluster.site, handle, cluster.site.route.observe(handle))
    text = str(failure.value)
    assert failure.value.code == 7 and failure.value.reason == "TrainerFailed"
    assert "ValueError: no data" in text and "pod p on node-1" in text and "Failed=True" in text


def test_what_a_killed_pod_had_not_spooled_is_taken_from_its_log(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    written = header() + b"one\ntwo\nthree\n"
    cluster.pod(handle, state={"terminated": {"exitCode": 137, "startedAt": "2026-01-01T00:00:00Z"}}, phase="Failed")
    api.write("p", written)
    api.end_log("p")
    cluster.spool(handle, header() + b"one\n")
    cluster.status(handle, "Failed", failed=1)
    with pytest.raises(RunFailed, match="its last lines:\n  one\n  two\n  three"):
        runs.collect(cluster.site, handle, cluster.site.route.observe(handle))


# --- a manifest of one's own --------------------------------------------------------------------------------------


RAW = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "mine"},
    "spec": {
        "template": {
            "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "i", "command": ["true"]}]}
        }
    },
}


def test_a_raw_manifest_succeeds_when_the_cluster_says_so_and_only_once(cluster: Cluster, api: FakeApi) -> None:
    spec = RunSpec(manifest=RAW, platform="generic")
    handle = cluster.submit(spec)
    assert cluster.submit(spec, try_number=2).uid == handle.uid
    follower = cluster.follower(handle, spooled=False)
    cluster.pod(handle)
    cluster.status(handle, active=1)
    api.write("p", stamped(b"hello\nworld\n"))
    found = steps(follower, lambda step: "world" in step.lines)
    api.end_log("p")
    cluster.status(handle, "Complete", succeeded=1)
    found += steps(follower, lambda step: step.done)
    assert lines(found) == ["hello", "world"]
    result = runs.collect(cluster.site, handle, found[-1].observation)
    assert result.result is None and result.generation == 1
    again = cluster.submit(spec, try_number=2)
    assert (again.generation, runs.finished(cluster.site, again)) == (1, True), "a retry collects, it runs nothing"
    assert api.count("create", "jobs") == 1 + 1
    follower.close()


def test_a_raw_manifest_that_fails_does(cluster: Cluster) -> None:
    spec = RunSpec(manifest=RAW, platform="generic")
    handle = cluster.submit(spec)
    cluster.status(handle, "Failed", failed=1)
    with pytest.raises(RunFailed):
        runs.collect(cluster.site, handle, cluster.site.route.observe(handle))


def test_find_lists_what_is_ours(cluster: Cluster, api: FakeApi) -> None:
    handle = cluster.submit()
    api.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "other", "namespace": "train"}})
    (found,) = cluster.site.route.find()
    assert (found.handle.run_key, found.handle.uid, found.store_uri) == (KEY, handle.uid, cluster.site.store.uri)


def test_errors_of_the_way_are_ours(cluster: Cluster, api: FakeApi) -> None:
    api.tokens = {"another"}
    with pytest.raises(ClusterUnauthorized) as refused:
        cluster.submit()
    assert refused.value.retryable and isinstance(refused.value, GpuBurstError)
