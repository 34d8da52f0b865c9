"""Every end has a name, on a real cluster: what the operator raises is what a person needs at 2 a.m."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from airflow_gpu_burst.errors import RunFailed, RunTimeout
from airflow_gpu_burst.spec import Timeouts
from airflow_gpu_burst.state import Phase
from tests.cluster.conftest import QUEUE, Burst, counting, ended, numbers, raw, trainer

fault = pytest.mark.fault
full = pytest.mark.lab_full


def failure(burst: Burst, following: object, step: object) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        burst.collect(burst.handles[-1], step)  # type: ignore[arg-type]
    return caught.value


def test_a_run_through_the_queue_with_its_result(burst: Burst) -> None:
    spec = counting(5, queue=QUEUE)
    handle = burst.submit(spec)
    following = burst.follow(handle)
    step = following.to_end()
    assert ended(step)[0] is Phase.SUCCEEDED
    result = burst.collect(handle, step)
    assert result.result == {"steps": 5, "from": 0}
    assert numbers(following.lines) == [1, 2, 3, 4, 5]
    assert "Scheduled" in following.notes
    job = burst.object(handle)
    assert job is not None and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == QUEUE
    template = job["spec"]["template"]["metadata"]["labels"]
    assert "kueue.x-k8s.io/queue-name" not in template
    following.close()


@fault("the trainer fails", outcome="FAILED, the trainer's exit code, the last lines, pods and events in the error")
def test_a_trainer_that_fails(burst: Burst) -> None:
    handle = burst.submit(trainer("print('about to fail', flush=True)\nraise ValueError('bad wafer')"))
    following = burst.follow(handle)
    error = failure(burst, following, following.to_end())
    assert (error.code, error.reason) == (7, "TrainerFailed")
    assert "ValueError: bad wafer" in str(error) and "Job " in str(error) and len(burst.pods(handle)) == 1
    following.close()


@fault("out of memory", outcome="FAILED (OOMKilled or TrainerFailed: killed by SIGKILL); says to ask for more memory")
def test_out_of_memory(burst: Burst) -> None:
    limits = {"resources": {"requests": {"memory": "32Mi"}, "limits": {"memory": "32Mi"}}}
    handle = burst.submit(raw("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}", container=limits))
    following = burst.follow(handle, spooled=False)
    step = following.to_end()
    assert ended(step) == (Phase.FAILED, "OOMKilled")
    assert "memory" in step.observation.message
    following.close()


@full
@fault("an image that does not exist", outcome="start_timeout, with the kubelet's words and the image's name")
def test_an_image_that_does_not_exist(burst: Burst) -> None:
    handle = burst.submit(replace(counting(1), image="lab.local/no-such-image:9"))
    following = burst.follow(handle, timeouts=Timeouts(start_s=15))
    step = following.to_end()
    assert step.observation.reason in ("ErrImagePull", "ImagePullBackOff")
    with pytest.raises(RunTimeout, match="no-such-image"):
        burst.collect(handle, step)
    assert burst.object(handle) is None or burst.object(handle)["metadata"].get("deletionTimestamp")  # type: ignore[index]
    following.close()


@fault("a Secret that does not exist", outcome="start_timeout, and the Secret's name in the error")
def test_a_secret_that_does_not_exist(burst: Burst) -> None:
    env = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "no-such-secret", "key": "a"}}}]}
    handle = burst.submit(raw("true", container=env))
    following = burst.follow(handle, spooled=False, timeouts=Timeouts(start_s=10))
    step = following.to_end()
    with pytest.raises(RunTimeout, match="no-such-secret"):
        burst.collect(handle, step)
    following.close()


@fault("more GPUs than there are", outcome="start_timeout, and FailedScheduling with the resource that is missing")
def test_unschedulable(burst: Burst) -> None:
    resources = {"resources": {"requests": {"nvidia.com/gpu": "9"}, "limits": {"nvidia.com/gpu": "9"}}}
    handle = burst.submit(raw("true", container=resources))
    following = burst.follow(handle, spooled=False, timeouts=Timeouts(start_s=8))
    step = following.to_end()
    assert step.observation.reason == "Unschedulable"
    with pytest.raises(RunTimeout, match=r"nvidia.com/gpu"):
        burst.collect(handle, step)
    assert "FailedScheduling" in following.notes
    following.close()


@fault("a queue without room", outcome="queue_timeout; the job is deleted")
def test_the_queue_clock(burst: Burst) -> None:
    holder = burst.gpu
    holder.kubectl("patch", "clusterqueue", "gpu-batch", "--type=merge", "-p", '{"spec":{"stopPolicy":"Hold"}}')
    try:
        handle = burst.submit(counting(1, queue=QUEUE))
        following = burst.follow(handle, timeouts=Timeouts(queue_s=5))
        step = following.to_end()
        assert ended(step)[0] is Phase.QUEUED
        with pytest.raises(RunTimeout, match="queue_timeout"):
            burst.collect(handle, step)
        following.close()
    finally:
        holder.kubectl("patch", "clusterqueue", "gpu-batch", "--type=merge", "-p", '{"spec":{"stopPolicy":"None"}}')


@fault("run_timeout", outcome="the job is deleted; RunTimeout says which clock")
def test_the_run_clock(burst: Burst) -> None:
    spec = counting(1000, 0.2, timeouts=Timeouts(run_s=4))
    handle = burst.submit(spec)
    following = burst.follow(handle, timeouts=Timeouts(run_s=4))
    step = following.to_end()
    assert step.timeout or step.observation.reason == "RunTimeout", "the trigger's clock, or the net in the pod"
    with pytest.raises(RunFailed, match="run.timeout"):
        burst.collect(handle, step)
    following.close()


@full
@fault("pod deleted", outcome="another pod goes on from the last checkpoint; nothing is printed twice")
def test_a_deleted_pod(burst: Burst) -> None:
    handle = burst.submit(counting(25, 0.3))
    following = burst.follow(handle)
    following.until_line("step 4")
    burst.gpu.kubectl("delete", "pod", burst.pods(handle)[0]["metadata"]["name"], "--grace-period=1", "--wait=false")
    step = following.to_end()
    result = burst.collect(handle, step)
    assert result.result["steps"] == 25 and result.result["from"] >= 3
    assert numbers(following.lines)[-1] == 25 and set(numbers(following.lines)) == set(range(1, 26))
    assert any("training starts from checkpoint" in line for line in following.lines)
    following.close()


@fault("job deleted by hand", outcome="LOST (Deleted); a retry makes the next generation, from the last checkpoint")
def test_a_job_deleted_by_hand(burst: Burst) -> None:
    spec = counting(12, 0.3)
    handle = burst.submit(spec)
    following = burst.follow(handle)
    following.until_line("step 3")
    time.sleep(1)  # so that a checkpoint is committed for certain
    burst.gpu.kubectl("delete", "job", handle.name, "--wait=false")
    step = following.to_end()
    assert ended(step) == (Phase.LOST, "Deleted")
    assert "goes on from checkpoint" in str(failure(burst, following, step))
    following.close()
    again = burst.submit(spec, try_number=2)
    assert again.generation == 2
    following = burst.follow(again)
    assert burst.collect(again, following.to_end()).result["from"] >= 2
    following.close()


@fault("collected by its TTL after success, unseen", outcome="SUCCEEDED: the run log has the result")
def test_collected_by_ttl_before_anybody_looked(burst: Burst) -> None:
    site = burst.site_with(keep_finished_s=0)
    handle = burst.submit(counting(2, 0.1), site=site)
    deadline = time.monotonic() + 60
    while burst.object(handle) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    following = burst.follow(handle)
    step = following.to_end()
    assert burst.collect(handle, step).result["steps"] == 2
    assert numbers(following.lines) == [1, 2], "from the spool: nobody saw it live"
    following.close()


def test_a_manifest_of_ones_own(burst: Burst) -> None:
    handle = burst.submit(raw("for i in 1 2 3; do echo line $i; sleep 0.3; done; printf rest"))
    following = burst.follow(handle, spooled=False)
    step = following.to_end()
    assert following.lines == ["line 1", "line 2", "line 3", "rest"]
    assert burst.collect(handle, step).generation == 1
    following.close()


def test_several_nodes(burst: Burst) -> None:
    body = """
import socket
print(f"rank {ctx.rank} of {ctx.world_size}", flush=True)
socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
(ctx.checkpoint_folder(1) / f"shard-{ctx.rank}").write_text("x")
ctx.ready(1)
if ctx.rank == 0:
    ctx.result({"nodes": ctx.world_size})
"""
    handle = burst.submit(trainer(body, gpus=8, queue=QUEUE))
    assert handle.kind == "JobSet"
    following = burst.follow(handle, ranks=2)
    step = following.to_end(180)
    assert burst.collect(handle, step).result == {"nodes": 2}
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} <= set(following.lines)
    following.close()


@full
def test_a_foreign_image_with_the_runtime_copied_in(burst: Burst) -> None:
    burst.gpu.image("python", "runtime")
    site = burst.site_with(runtime_image="lab.local/runtime:1")
    handle = burst.submit(replace(counting(2, 0.1), image="lab.local/python:1"), site=site)
    following = burst.follow(handle)
    assert burst.collect(handle, following.to_end()).result["steps"] == 2
    following.close()
