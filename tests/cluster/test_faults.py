"""Faults of the cluster and of the way to it: each ends in the state that docs/reliability.md says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from airflow_gpu_burst import runs
from airflow_gpu_burst.errors import ClusterForbidden, ClusterUnauthorized, GpuBurstError, RunTimeout
from airflow_gpu_burst.routes import KubeConfig
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Phase
from tests.cluster.conftest import COUNTING, QUEUE, Burst, counting, ended, numbers, raw, trainer
from tests.lab_fixtures import Stack

fault = pytest.mark.fault
full = pytest.mark.lab_full


@contextmanager
def api_away(burst: Burst, seconds: float) -> Iterator[None]:
    """The API server is gone for so long, beginning now; back at the end of the block at the latest."""
    burst.gpu.stop("apiserver")
    back = threading.Timer(seconds, burst.gpu.start, args=("apiserver",))
    back.start()
    try:
        yield
    finally:
        back.join()


@fault("API server stopped while the run trains", outcome="the pod goes on; said once; all lines, then the result")
@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=full)])
def test_api_server_away_while_running(burst: Burst, seconds: int) -> None:
    steps = int((seconds + 10) / 0.3)
    handle = burst.submit(counting(steps, 0.3))
    following = burst.follow(handle)
    following.until_line("step 3")
    with api_away(burst, seconds):
        following.until(lambda step: "out of reach" in "".join(step.notes))
        step = following.to_end(seconds + 120)
    assert ended(step)[0] is Phase.SUCCEEDED
    assert numbers(following.lines) == list(range(1, steps + 1)), "each line once, in order"
    assert following.notes.count("out of reach") == 1
    assert burst.collect(handle, step).result["from"] == 0, "never started again"
    following.close()


@full
@fault("API server stopped while the run is queued", outcome="it waits; the queue's clock runs by the cluster's time")
def test_api_server_away_while_queued(burst: Burst) -> None:
    patch = '{"spec":{"stopPolicy":"%s"}}'
    burst.gpu.kubectl("patch", "clusterqueue", "gpu-batch", "--type=merge", "-p", patch % "Hold")
    try:
        handle = burst.submit(counting(3, queue=QUEUE))
        following = burst.follow(handle)
        following.until(lambda step: step.observation.phase is Phase.QUEUED)
        with api_away(burst, 60):
            following.until(lambda step: "out of reach" in "".join(step.notes))
        following.until(lambda step: step.observation.phase is Phase.QUEUED and step.wait_s >= 30)
    finally:
        burst.gpu.kubectl("patch", "clusterqueue", "gpu-batch", "--type=merge", "-p", patch % "None")
    assert ended(following.to_end())[0] is Phase.SUCCEEDED
    following.close()


@full
@fault("API server stopped while the pod starts", outcome="it waits, then follows from the first line")
def test_api_server_away_while_starting(burst: Burst) -> None:
    handle = burst.submit(counting(3, 0.2))
    following = burst.follow(handle)
    following.until(lambda step: step.observation.phase in (Phase.STARTING, Phase.RUNNING, Phase.SUBMITTED))
    with api_away(burst, 60):
        step = following.to_end(180)
    assert ended(step)[0] is Phase.SUCCEEDED and numbers(following.lines) == [1, 2, 3]
    following.close()


@full
@fault("API server stopped at submission", outcome="ClusterUnreachable, retryable; the retry makes the one job")
def test_api_server_away_at_submission(burst: Burst) -> None:
    spec = counting(2, 0.1)
    with burst.gpu.without("apiserver"), pytest.raises(GpuBurstError) as refused:
        burst.submit(spec)
    assert refused.value.retryable
    handle = burst.submit(spec, try_number=2)
    assert handle.generation == 1
    following = burst.follow(handle)
    assert ended(following.to_end())[0] is Phase.SUCCEEDED
    following.close()


@full
@fault("API server stopped while the result is collected", outcome="the result stands: it is in the run log")
def test_api_server_away_at_collection(burst: Burst) -> None:
    handle = burst.submit(counting(2, 0.1))
    following = burst.follow(handle)
    step = following.to_end()
    with burst.gpu.without("apiserver"):
        try:
            result = burst.collect(handle, step)
        except GpuBurstError as error:
            assert error.retryable, error
            result = None
    assert (result or burst.collect(handle, step)).result["steps"] == 2
    following.close()


@fault("the token expires", outcome="waits; says which connection; the connection is read again every 30 s")
def test_an_expired_token(burst: Burst) -> None:
    token = burst.gpu.kubectl("create", "token", "airflow-gpu-burst", "--duration=10m").strip()
    config = json.loads(burst.gpu.kubectl("config", "view", "--raw", "-o", "json", admin=False))
    config["users"][0]["user"] = {"token": token[:-8] + "AAAAAAAA"}
    refused = burst.site_with(api=KubeConfig(kubeconfig=json.dumps(config)))
    handle = burst.submit(counting(10, 0.2))
    following = burst.follow(handle, site=refused)
    step = following.until(lambda step: step.refused)
    assert "connection" in following.notes
    following.close()
    config["users"][0]["user"] = {"token": token}
    renewed = burst.site_with(api=KubeConfig(kubeconfig=json.dumps(config)))
    following = burst.follow(handle, site=renewed)
    step = following.to_end()
    assert numbers(following.lines) == list(range(1, 11)) and ended(step)[0] is Phase.SUCCEEDED
    with pytest.raises(ClusterUnauthorized):
        refused.route.observe(handle)
    following.close()


@contextmanager
def role_without(burst: Burst, resource: str, verb: str = "") -> Iterator[None]:
    """The shipped Role with a resource (or one verb of it) taken out."""
    role = burst.gpu.get("role", "airflow-gpu-burst")
    changed = json.loads(json.dumps(role))
    for rule in changed["rules"]:
        if resource in rule["resources"]:
            if verb:
                rule["verbs"] = [v for v in rule["verbs"] if v != verb]
            else:
                rule["resources"] = [r for r in rule["resources"] if r != resource]
    changed["rules"] = [rule for rule in changed["rules"] if rule["resources"]]
    burst.gpu.apply(_plain(changed))
    try:
        yield
    finally:
        burst.gpu.apply(_plain(role))


def _plain(role: dict) -> dict:  # type: ignore[type-arg]
    metadata = {key: role["metadata"][key] for key in ("name", "namespace")}
    return {**role, "metadata": metadata}


@fault("pods/log revoked", outcome="goes on; said once, with the line to add; lines from the spool, seconds later")
def test_logs_revoked(burst: Burst) -> None:
    with role_without(burst, "pods/log"):
        handle = burst.submit(counting(12, 0.3))
        following = burst.follow(handle)
        step = following.to_end()
    assert numbers(following.lines) == list(range(1, 13)) and ended(step)[0] is Phase.SUCCEEDED
    assert following.notes.count("pods/log") >= 1 and following.notes.count("lines come from the spool") == 1
    following.close()


@fault("events revoked", outcome="goes on; said once, with the line to add")
def test_events_revoked(burst: Burst) -> None:
    with role_without(burst, "events"):
        handle = burst.submit(counting(3, 0.1))
        following = burst.follow(handle)
        assert ended(following.to_end())[0] is Phase.SUCCEEDED
    assert "events" in following.notes
    following.close()


@fault("create jobs revoked", outcome="ClusterForbidden: verb, resource, and the line to add to the Role")
def test_create_revoked(burst: Burst) -> None:
    with role_without(burst, "jobs", "create"), pytest.raises(ClusterForbidden, match="create") as refused:
        burst.submit(counting(1))
    assert "jobs" in str(refused.value) and "apiGroups" in str(refused.value) and not refused.value.retryable


@fault("kubelet stopped and started", outcome="the container goes on; lines from the spool; the result")
def test_kubelet_restarted(burst: Burst) -> None:
    handle = burst.submit(counting(40, 0.3, gpus=0))
    following = burst.follow(handle)
    following.until_line("step 3")
    with burst.gpu.without("kubelet"):
        following.until_line("step 12", 60)
    step = following.to_end(180)
    assert ended(step)[0] is Phase.SUCCEEDED and numbers(following.lines) == list(range(1, 41))
    assert burst.collect(handle, step).result["from"] == 0
    following.close()


@fault(
    "node drained", outcome="the pod flushes its checkpoint (exit code 4), another goes on from it elsewhere or later"
)
def test_node_drained(burst: Burst) -> None:
    handle = burst.submit(counting(30, 0.3))
    following = burst.follow(handle)
    following.until_line("step 5")
    with burst.gpu.drained():
        time.sleep(2)
    step = following.to_end(180)
    result = burst.collect(handle, step)
    assert result.result["steps"] == 30 and result.result["from"] >= 4 and result.generation == 1
    following.close()


@full
@fault(
    "node gone: it is dead, and its object is deleted",
    outcome="another pod goes on from the checkpoint; the old pod's containers, if they live on, are fenced",
)
def test_node_gone(burst: Burst) -> None:
    # Slow at first, so that the ghost does not come to the end by itself on a busy machine.
    body = COUNTING.replace('ctx.params.get("pause", 0.2)', "0.02 if start else 1.0")
    handle = burst.submit(trainer(body, params={"steps": 300}, gpus=0))
    following = burst.follow(handle)
    following.until_line("step 6")
    (old,) = burst.pods(handle)
    node = old["spec"]["nodeName"]
    with burst.gpu.without("kubelet"):  # its containers go on: a ghost
        burst.gpu.kubectl("delete", "node", node)
        deadline = time.monotonic() + 150
        while {pod["metadata"]["uid"] for pod in burst.pods(handle)} <= {old["metadata"]["uid"]}:
            assert time.monotonic() < deadline, "no other pod"
            time.sleep(1)
            following.steps.append(following.follower.step())
    step = following.to_end(240)
    result = burst.collect(handle, step)
    assert result.result["steps"] == 300 and result.result["from"] >= 5 and result.generation == 1
    following.close()


@fault("namespace deleted", outcome="LOST (Deleted), with what is gone; a submission names the namespace")
def test_namespace_deleted(burst: Burst) -> None:
    name = "gone"
    for item in (
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "all", "namespace": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "airflow-gpu-burst", "namespace": "train"}],
        },
    ):
        burst.gpu.kubectl("apply", "-n", name, "-f", "-", stdin=json.dumps(item))
    time.sleep(1)
    site = burst.site_with(namespace=name)
    spec = raw("sleep 60")
    handle = burst.submit(spec, site=site)
    following = burst.follow(handle, site=site, spooled=False)
    following.until(lambda step: step.observation.phase in (Phase.RUNNING, Phase.STARTING))
    burst.gpu.kubectl("delete", "namespace", name, "--timeout=90s")
    try:
        step = following.to_end(60)
        assert ended(step)[0] in (Phase.LOST, Phase.FAILED)
    except GpuBurstError as error:
        assert name in str(error)  # the right to look went with the namespace
    with pytest.raises(GpuBurstError, match=name):
        burst.submit(spec, site=site, try_number=2)
    following.close()
    burst.handles.clear()


@fault("two Airflows with the same ids, one namespace", outcome="two jobs: the store is part of the name")
def test_two_deployments(burst: Burst, stack: Stack) -> None:
    other = Burst(burst.gpu, stack.store(), burst.name)
    spec = counting(2, 0.1)
    handles = [burst.submit(spec), other.submit(spec)]
    assert handles[0].name != handles[1].name
    for one, handle in zip((burst, other), handles, strict=True):
        following = one.follow(handle)
        assert one.collect(handle, following.to_end()).result["steps"] == 2
        following.close()
    other.clean()


@fault("a person kills it", outcome="the log is closed, the job deleted once by UID; the pod is gone; no result")
def test_cancel(burst: Burst) -> None:
    handle = burst.submit(counting(1000, 0.2))
    following = burst.follow(handle)
    following.until_line("step 2")
    runs.cancel(burst.site, handle, "by hand")
    runs.cancel(burst.site, handle, "by hand")
    deadline = time.monotonic() + 30
    while burst.pods(handle) or burst.object(handle):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    following.close()


KILLED = """
import json, os, sys, threading, time
from airflow_gpu_burst import runs
from airflow_gpu_burst.routes import ClusterConfig, KubeConfig
from airflow_gpu_burst.routes.direct import DirectRoute
from airflow_gpu_burst.routes import kube
from airflow_gpu_burst.spec import RunSpec
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.store import StoreConfig, open_store

wanted = json.load(open(sys.argv[1]))
create = kube.Kube.create

def killed(self, kind, namespace, manifest):
    if wanted["step"] == "before":
        os.kill(os.getpid(), 9)
    if wanted["step"] == "during":
        threading.Timer(wanted["after_s"], os.kill, (os.getpid(), 9)).start()
    found = create(self, kind, namespace, manifest)
    if wanted["step"] == "after":
        os.kill(os.getpid(), 9)
    return found

kube.Kube.create = killed
store = StoreConfig(**wanted["store"])
config = ClusterConfig(**{**wanted["config"], "api": KubeConfig(**wanted["api"])})
site = runs.Site(route=DirectRoute(config), store=open_store(store), store_config=store, connection="gpu",
                 store_connection="store")
runs.submit(site, spec=RunSpec.from_dict(wanted["spec"]), run_key=RunKey.from_dict(wanted["key"]), max_tries=2,
            try_number=1)
time.sleep(5)
"""


@fault("worker killed before, during or after the create call", outcome="the retry finds or makes the one job")
@pytest.mark.parametrize(
    ("step", "after_s"),
    [("before", 0.0), ("during", 0.0), ("during", 0.004), ("during", 0.02), ("after", 0.0)],
)
def test_worker_killed_around_the_create_call(burst: Burst, tmp_path: Path, step: str, after_s: float) -> None:
    spec = counting(3, 0.1)
    wanted = {
        "step": step,
        "after_s": after_s,
        "store": {name: getattr(burst.store_config, name) for name in burst.store_config.__dataclass_fields__},
        "config": {
            "connection": "gpu",
            "route": "direct",
            "namespace": "train",
            "platform": "lab",
            "image_pull_policy": "IfNotPresent",
            "grace_s": 2.0,
        },
        "api": {"kubeconfig_path": str(burst.gpu.kubeconfig)},
        "spec": spec.to_dict(),
        "key": burst.key.to_dict(),
    }
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "wanted.json")], env=dict(os.environ), timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    handle = burst.submit(spec, try_number=2)
    assert handle.generation == 1
    following = burst.follow(handle)
    assert burst.collect(handle, following.to_end()).result["from"] == 0
    jobs = burst.gpu.get("jobs", "-l", "app.kubernetes.io/managed-by=airflow-gpu-burst")["items"]
    ours = [
        job for job in jobs if json.loads(job["metadata"]["annotations"]["gpu-burst/run-key"]) == burst.key.to_dict()
    ]
    assert len([job for job in ours if job["metadata"]["annotations"]["gpu-burst/store"] == burst.site.store.uri]) == 1
    following.close()


@fault("worker's clock an hour off", outcome="no timeout passes early or late: times are the cluster's")
@pytest.mark.parametrize("hours", [-1, pytest.param(1, marks=full)])
def test_a_clock_an_hour_off(burst: Burst, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    genuine = time.time
    monkeypatch.setattr("time.time", lambda: genuine() + 3600 * hours)
    burst.site = burst.site_with(connection=f"gpu{hours}")
    handle = burst.submit(counting(60, 0.3))
    limits = Timeouts(queue_s=60, start_s=60, run_s=8)
    following = burst.follow(handle, timeouts=limits, submitted_at=genuine())
    following.until_line("step 10")
    step = following.to_end(30)
    assert "run_timeout" in step.timeout, "not before step 10, and not an hour late"
    with pytest.raises(RunTimeout):
        burst.collect(handle, step)
    following.close()


@full
@fault("a rank's pod is lost (several nodes)", outcome="it is replaced; all ranks start again from the last checkpoint")
def test_a_lost_rank(burst: Burst) -> None:
    body = """
start = ctx.restored.step if ctx.restored else 0
print(f"from {start}", flush=True)
for step in range(start + 1, 26):
    (ctx.checkpoint_folder(step) / f"shard-{ctx.rank}").write_text(str(step))
    ctx.ready(step)
    print(f"step {step}", flush=True)
    time.sleep(0.4)
if ctx.rank == 0:
    ctx.result({"from": start})
"""
    handle = burst.submit(trainer(body, gpus=8))
    following = burst.follow(handle, ranks=2)
    following.until_line("[1] step 6", 120)
    lost = [pod for pod in burst.pods(handle) if "-0-1-" in pod["metadata"]["name"]]
    burst.gpu.kubectl("delete", "pod", lost[0]["metadata"]["name"], "--grace-period=0", "--force")
    step = following.to_end(240)
    assert burst.collect(handle, step).result["from"] >= 2
    following.close()


@fault("nobody followed it (triggerer down for the whole run)", outcome="all lines from the spool, then the result")
def test_nobody_followed(burst: Burst) -> None:
    handle = burst.submit(counting(5, 0.1))
    deadline = time.monotonic() + 60
    while not runs.finished(burst.site, handle):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    following = burst.follow(handle)
    step = following.to_end()
    assert numbers(following.lines) == [1, 2, 3, 4, 5]
    assert burst.collect(handle, step).result["steps"] == 5
    following.close()
