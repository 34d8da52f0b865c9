"""Every end has a name, nothing depends on an order, and nothing is called an end that is none."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.state import Phase
from airflow_gpu_burst.workloads import events_in_words, interpret, pods_of, report
from airflow_gpu_burst.workloads.kinds import JOB, JOBSET, Kind
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot
from tests.unit.workload_objects import (
    KEY,
    RESUMED,
    T0,
    at,
    condition,
    ended,
    event,
    job,
    jobset,
    pod,
    running,
    snap,
    waiting,
    word,
)

SUSPENDED = condition("Suspended", "True", "JobSuspended", "Job suspended", after=1)
STOPPED_AGAIN = condition("Suspended", "True", "JobSuspended", "Job suspended", after=60)
BACKOFF = condition("Failed", "True", "BackoffLimitExceeded", "Job has reached the specified backoff limit", after=30)
POLICY = condition(
    "Failed", "True", "PodFailurePolicy",
    "Container trainer for pod train/x failed with exit code 7 matching FailJob rule at index 1", after=30,
)  # fmt: skip
COMPLETE = condition("Complete", "True", "CompletionsReached", "Reached expected number of succeeded pods", after=30)
JOBSET_FAILED = condition("Failed", "True", "FailedJobs", "jobset failed due to one or more job failures", after=30)
PENDING = {"phase": "Pending"}
NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims."
TAINT = "0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: gpu}. no new claims to deallocate"
PULL = (
    'Back-off pulling image "lab.local/nope:1": ErrImagePull: failed to resolve reference "lab.local/nope:1": not found'
)


def unschedulable(message: str, **parts: Any) -> Object:
    return pod(**PENDING, conditions=[condition("PodScheduled", "False", "Unschedulable", message)], **parts)


def disrupted(reason: str, **parts: Any) -> Object:
    return pod(
        conditions=[
            condition("PodScheduled"),
            condition("DisruptionTarget", "True", reason, "words of the cluster", after=20),
        ],
        **parts,
    )


CHILD_JOB: Object = {"kind": "Job", "metadata": {"name": f"{KEY.object_name(1)}-node-0", "uid": "child-uid"}}
WORKLOAD: Object = {"kind": "Workload", "metadata": {"name": f"job-{KEY.object_name(1)}-12345", "uid": "w"}}
TOP = job()

# what the API says, and: phase, reason, what the message holds, exit code
TABLE: dict[str, tuple[Kind, Snapshot, Phase, str, str, int | None]] = {
    "just created": (JOB, snap(job()), Phase.SUBMITTED, "Submitted", "", None),
    "in the queue, not looked at yet": (
        JOB, snap(job(spec={"suspend": True}, meta={"generation": 1})),
        Phase.QUEUED, "Queued", "waiting in queue gpu-batch", None,
    ),
    "in the queue, with Kueue's words": (
        JOB,
        snap(
            job(SUSPENDED, spec={"suspend": True}, meta={"generation": 1}),
            events=(
                event(WORKLOAD, "Pending", "couldn't assign flavors to pod set main: insufficient quota"),
            ),
        ),
        Phase.QUEUED, "Queued", "insufficient quota", None,
    ),
    "suspended without a queue": (
        JOB,
        snap(job(SUSPENDED, spec={"suspend": True}, meta={"generation": 1, "labels": {}})),
        Phase.QUEUED, "Suspended", "nothing will start it", None,
    ),
    "preempted": (
        JOB,
        snap(
            job(STOPPED_AGAIN, spec={"suspend": True}, meta={"generation": 4}, terminating=1),
            pod(trainer=running(), meta={"deletionTimestamp": at(70)}),
            events=(event(TOP, "Stopped", "Preempted to accommodate a workload", kind="Normal", after=60),),
        ),
        Phase.PREEMPTED, "Preempted", "Preempted to accommodate a workload", None,
    ),
    "preempted, pods gone, events expired": (
        JOBSET, snap(jobset(STOPPED_AGAIN, spec={"suspend": True}, meta={"generation": 3})),
        Phase.PREEMPTED, "Preempted", "waiting to be admitted again", None,
    ),
    "let go, no pod yet": (JOB, snap(job(RESUMED, startTime=at(5))), Phase.STARTING, "CreatingPods", "", None),
    "let go, quota of the namespace": (
        JOB,
        snap(
            job(RESUMED, startTime=at(5)),
            events=(event(TOP, "FailedCreate", 'Error creating: pods "x" is forbidden: exceeded quota: gpus'),),
        ),
        Phase.STARTING, "FailedCreate", "exceeded quota", None,
    ),
    "pod created": (
        JOB, snap(job(RESUMED, active=1), pod(**PENDING, conditions=[])), Phase.STARTING, "Scheduling", "", None,
    ),
    "unschedulable for want of GPUs": (
        JOB, snap(job(RESUMED, active=1), unschedulable(NO_GPU)),
        Phase.STARTING, "Unschedulable", "nvidia.com/gpu: wait until some is free", None,
    ),
    "unschedulable for a taint": (
        JOB, snap(job(RESUMED, active=1), unschedulable(TAINT)),
        Phase.STARTING, "Unschedulable", "{dedicated: gpu}: add it to the platform's tolerations", None,
    ),
    "unschedulable for labels, the event says why": (
        JOB,
        snap(
            job(RESUMED, active=1), unschedulable(""),
            events=(
                event(
                    unschedulable(""), "FailedScheduling",
                    "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
                ),
            ),
        ),
        Phase.STARTING, "Unschedulable", "node_selector", None,
    ),
    "creating": (
        JOB, snap(job(RESUMED, active=1), pod(**PENDING, trainer=waiting("ContainerCreating"))),
        Phase.STARTING, "ContainerCreating", "", None,
    ),
    "runtime being copied": (
        JOB, snap(job(RESUMED, active=1), pod(**PENDING, init=running(), trainer=waiting("PodInitializing"))),
        Phase.STARTING, "Initializing", "", None,
    ),
    "secret volume missing": (
        JOB,
        snap(
            job(RESUMED, active=1), pod(**PENDING, trainer=waiting("ContainerCreating")),
            events=(event(pod(), "FailedMount", 'MountVolume.SetUp failed for volume "x" : secret "y" not found'),),
        ),
        Phase.STARTING, "FailedMount", 'secret "y" not found', None,
    ),
    "secret volume was missing": (
        JOB,
        snap(
            job(RESUMED, active=1), pod(**PENDING, trainer=waiting("ContainerCreating")),
            events=(
                event(pod(), "FailedMount", "not found", after=7), event(pod(), "Pulling", "", kind="Normal", after=9),
            ),
        ),
        Phase.STARTING, "ContainerCreating", "", None,
    ),
    "no such image": (
        JOB, snap(job(RESUMED, active=1), pod(**PENDING, trainer=waiting("ImagePullBackOff", PULL))),
        Phase.STARTING, "ImagePullBackOff", "lab.local/nope:1", None,
    ),
    "no such image, just tried": (
        JOB, snap(job(RESUMED, active=1), pod(**PENDING, trainer=waiting("ErrImagePull", "not found"))),
        Phase.STARTING, "ImagePullBackOff", "image_pull_secrets", None,
    ),
    "no such runtime image": (
        JOB,
        snap(
            job(RESUMED, active=1),
            pod(**PENDING, init=waiting("ErrImageNeverPull", "not present"), trainer=waiting("PodInitializing")),
        ),
        Phase.STARTING, "ErrImageNeverPull", "gpu-burst-runtime", None,
    ),
    "image name is wrong": (
        JOB, snap(job(RESUMED, active=1), pod(**PENDING, trainer=waiting("InvalidImageName", "couldn't parse image"))),
        Phase.STARTING, "InvalidImageName", "registry/path/name:tag", None,
    ),
    "two containers in trouble": (
        JOB,
        snap(
            job(RESUMED, active=1),
            pod(**PENDING, sidecar=waiting("InvalidImageName"), trainer=waiting("ImagePullBackOff", PULL)),
        ),
        Phase.STARTING, "InvalidImageName", "sidecar", None,
    ),
    "secret missing": (
        JOB,
        snap(
            job(RESUMED, active=1),
            pod(**PENDING, trainer=waiting("CreateContainerConfigError", 'secret "fab-store" not found')),
        ),
        Phase.STARTING, "CreateContainerConfigError", 'secret "fab-store" not found', None,
    ),
    "running": (JOB, snap(job(RESUMED, active=1), pod(trainer=running())), Phase.RUNNING, "", "", None),
    "one of two ranks runs": (
        JOBSET,
        snap(jobset(RESUMED), pod(rank=0, trainer=running()), unschedulable(NO_GPU, rank=1, suffix="fghij")),
        Phase.RUNNING, "Unschedulable", "node-0-1-fghij", None,
    ),
    "a sidecar has failed, the trainer runs": (
        JOB, snap(job(RESUMED, active=1), pod(trainer=running(), sidecar=ended(1))), Phase.RUNNING, "", "", None,
    ),
    "trainer over, the job does not know": (
        JOB, snap(job(RESUMED, active=1), pod(phase="Succeeded", trainer=ended(0))),
        Phase.RUNNING, "Finishing", "", None,
    ),
    "success criteria met": (
        JOB,
        snap(job(RESUMED, condition("SuccessCriteriaMet", after=29)), pod(phase="Succeeded", trainer=ended(0))),
        Phase.RUNNING, "Finishing", "", None,
    ),
    "failure target": (
        JOB,
        snap(
            job(RESUMED, condition("FailureTarget", "True", "PodFailurePolicy", after=29)),
            pod(phase="Failed", trainer=ended(7)),
        ),
        Phase.RUNNING, "Finishing", "", None,
    ),
    "failed for good, the job does not know": (
        JOB, snap(job(RESUMED, active=1), pod(phase="Failed", trainer=ended(7, message=word(7, "TrainerFailed", "x")))),
        Phase.RUNNING, "Finishing", "", None,
    ),
    "killed, the next pod is coming": (
        JOB,
        snap(job(RESUMED, failed=1), pod(phase="Failed", trainer=ended(137)), pod("fghij", **PENDING, conditions=[])),
        Phase.RESTARTING, "Killed", "SIGKILL", None,
    ),
    "a retry may help": (
        JOB,
        snap(job(RESUMED), pod(phase="Failed", trainer=ended(4, message=word(4, "Terminated", "told to end")))),
        Phase.RESTARTING, "Terminated", "told to end", None,
    ),
    "the next pod gets no image": (
        JOB,
        snap(
            job(RESUMED, failed=1), pod(phase="Failed", trainer=ended(137)),
            pod("fghij", **PENDING, trainer=waiting("ImagePullBackOff", PULL)),
        ),
        Phase.RESTARTING, "ImagePullBackOff", "lab.local/nope:1", None,
    ),
    "drained": (
        JOB, snap(job(RESUMED), disrupted("EvictionByEvictionAPI", phase="Failed", trainer=ended(143))),
        Phase.RESTARTING, "Evicted", "drained", None,
    ),
    "node does not answer": (
        JOB,
        snap(
            job(RESUMED, terminating=1),
            disrupted("DeletionByTaintManager", trainer=running(), meta={"deletionTimestamp": at(20)}),
        ),
        Phase.RESTARTING, "NodeLost", "gpu-0", None,
    ),
    "node deleted": (
        JOB, snap(job(RESUMED), disrupted("DeletionByPodGC", phase="Failed")),
        Phase.RESTARTING, "NodeLost", "gone", None,
    ),
    "pod preempted by the scheduler": (
        JOB, snap(job(RESUMED), disrupted("PreemptionByScheduler", phase="Failed", trainer=ended(143))),
        Phase.RESTARTING, "Preempted", "higher priority", None,
    ),
    "node under pressure": (
        JOB,
        snap(
            job(RESUMED),
            pod(
                phase="Failed", trainer=ended(137),
                status={"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."},
            ),
        ),
        Phase.RESTARTING, "Evicted", "low on resource: ephemeral-storage", None,
    ),
    "jobset restarts": (
        JOBSET, snap(jobset(RESUMED, condition("RestartingJobSet"), restarts=1)),
        Phase.RESTARTING, "Restarting", "", None,
    ),
    "container restarted in its pod": (
        JOB,
        snap(
            job(RESUMED, spec={"podFailurePolicy": None}),
            pod(
                spec={"restartPolicy": "OnFailure"},
                trainer={**waiting("CrashLoopBackOff", "back-off 10s"), "restartCount": 1, "lastState": ended(1)},
            ),
        ),
        Phase.RESTARTING, "CrashLoopBackOff", "last lines", None,
    ),
    "being deleted": (
        JOB, snap(job(RESUMED, meta={"deletionTimestamp": at(15)}), pod(trainer=running())),
        Phase.RUNNING, "Deleting", "not by this task", None,
    ),
    "succeeded": (
        JOB, snap(job(RESUMED, COMPLETE, succeeded=1), pod(phase="Succeeded", trainer=ended(0))),
        Phase.SUCCEEDED, "Succeeded", "", 0,
    ),
    "succeeded after an eviction": (
        JOB,
        snap(
            job(RESUMED, COMPLETE), disrupted("EvictionByEvictionAPI", phase="Failed", trainer=ended(143)),
            pod("fghij", phase="Succeeded", trainer=ended(0)),
        ),
        Phase.SUCCEEDED, "Succeeded", "", 0,
    ),
    "jobset completed": (
        JOBSET, snap(jobset(condition("Completed", "True", "AllJobsCompleted"))), Phase.SUCCEEDED, "Succeeded", "", 0,
    ),
    "jobset completed, by its state alone": (
        JOBSET, snap(jobset(terminalState="Completed")), Phase.SUCCEEDED, "Succeeded", "", 0,
    ),
    "trainer failed": (
        JOB,
        snap(
            job(RESUMED, POLICY, failed=1),
            pod(phase="Failed", trainer=ended(7, message=word(7, "TrainerFailed", "the trainer ended with code 1"))),
        ),
        Phase.FAILED, "TrainerFailed", "the trainer ended with code 1", 7,
    ),
    "data missing": (
        JOB,
        snap(
            job(RESUMED, POLICY, failed=1),
            pod(phase="Failed", trainer=ended(5, message=word(5, "SnapshotGone", "snapshot 1 is gone; pin again"))),
        ),
        Phase.FAILED, "SnapshotGone", "snapshot 1 is gone; pin again", 5,
    ),
    "exit code without a last word": (
        JOB, snap(job(RESUMED, POLICY), pod(phase="Failed", trainer=ended(1, message="Traceback ..."))),
        Phase.FAILED, "Error", "exit code 1", 1,
    ),
    "out of memory": (
        JOB, snap(job(RESUMED, BACKOFF), pod(phase="Failed", trainer=ended(137, "OOMKilled"))),
        Phase.FAILED, "OOMKilled", "220Gi", None,
    ),
    "trainer out of memory, the runtime lived": (
        JOB,
        snap(
            job(RESUMED, POLICY),
            pod(phase="Failed", trainer=ended(7, "OOMKilled", word(7, "TrainerFailed", "killed by SIGKILL"))),
        ),
        Phase.FAILED, "OOMKilled", "memory_per_gpu", 7,
    ),
    "killed too often": (
        JOB,
        snap(
            job(RESUMED, BACKOFF),
            pod("fghij", phase="Failed", trainer=ended(4, message=word(4, "NotStarted", "never joined"), end=20)),
            pod(phase="Failed", trainer=ended(137, end=25)),
        ),
        Phase.FAILED, "Killed", "SIGKILL", None,
    ),
    "no such command": (
        JOB,
        snap(
            job(RESUMED, BACKOFF),
            pod(phase="Failed", trainer=ended(128, "StartError", '"gpu-burst": executable file not found in $PATH')),
        ),
        Phase.FAILED, "StartError", "executable file not found", None,
    ),
    "runtime not copied": (
        JOB,
        snap(job(RESUMED, BACKOFF), pod(phase="Failed", init=ended(1), trainer=waiting("PodInitializing"))),
        Phase.FAILED, "InitContainerFailed", "gpu-burst-runtime", None,
    ),
    "evicted for good": (
        JOB, snap(job(RESUMED, BACKOFF), disrupted("TerminationByKubelet", phase="Failed", trainer=ended(137))),
        Phase.FAILED, "Evicted", "memory or disk", None,
    ),
    "device plugin refuses": (
        JOB,
        snap(
            job(RESUMED, BACKOFF),
            pod(phase="Failed", status={"reason": "OutOfnvidia.com/gpu", "message": "Node has not enough resource"}),
        ),
        Phase.FAILED, "OutOfnvidiaComGpu", "enough resource", None,
    ),
    "deadline": (
        JOB,
        snap(
            job(RESUMED, condition("Failed", "True", "DeadlineExceeded", "Job was active longer than that")),
            pod(phase="Failed", trainer=ended(4, message=word(4, "Terminated", "told to end"))),
        ),
        Phase.FAILED, "DeadlineExceeded", "run_timeout", None,
    ),
    "backoff limit, pods gone": (
        JOB, snap(job(RESUMED, BACKOFF)), Phase.FAILED, "BackoffLimitExceeded", "backoff limit", None,
    ),
    "pod failure policy, pods gone": (
        JOB, snap(job(RESUMED, POLICY)), Phase.FAILED, "PodFailurePolicy", "exit code 7", None,
    ),
    "a rank fails, and drags the others down": (
        JOBSET,
        snap(
            jobset(RESUMED, JOBSET_FAILED),
            pod(rank=0, phase="Failed", trainer=ended(7, message=word(7, "TrainerFailed", "lost peer 1"), end=22)),
            pod(
                rank=1, phase="Failed",
                trainer=ended(7, message=word(7, "TrainerFailed", "a batch of another shape"), end=20),
            ),
            pod(
                rank=2, phase="Failed", meta={"deletionTimestamp": at(25)},
                trainer=ended(4, message=word(4, "Terminated", "told to end"), end=28),
            ),
        ),
        Phase.FAILED, "TrainerFailed", "a batch of another shape", 7,
    ),
    "jobset's job over its deadline": (
        JOBSET,
        snap(
            jobset(RESUMED, JOBSET_FAILED),
            events=(event(CHILD_JOB, "DeadlineExceeded", "Job was active longer than specified deadline"),),
        ),
        Phase.FAILED, "DeadlineExceeded", "run_timeout", None,
    ),
    "jobset failed, nothing else is known": (
        JOBSET, snap(jobset(RESUMED, JOBSET_FAILED)), Phase.FAILED, "FailedJobs", "one or more job failures", None,
    ),
    "deleted by hand": (
        JOB, snap(None, pod(trainer=running()), last=job(RESUMED, active=1)), Phase.LOST, "Deleted", "checkpoint", None,
    ),
    "never seen": (JOB, snap(None), Phase.LOST, "Deleted", "gone", None),
    "failed because it was deleted": (
        JOB,
        snap(
            job(RESUMED, BACKOFF, meta={"deletionTimestamp": at(15)}),
            pod(phase="Failed", trainer=ended(143)),
        ),
        Phase.LOST, "Deleted", "checkpoint", None,
    ),
    "collected after its success": (
        JOB, snap(None, last=job(RESUMED, COMPLETE)), Phase.SUCCEEDED, "Succeeded", "", 0,
    ),
    "collected after its failure": (
        JOB, snap(None, last=job(RESUMED, BACKOFF)), Phase.FAILED, "BackoffLimitExceeded", "", None,
    ),
    "both verdicts, success later": (
        JOB,
        snap(job(condition("Failed", after=20), condition("Complete", after=21))),
        Phase.SUCCEEDED, "Succeeded", "", 0,
    ),
    "both verdicts at once": (
        JOB,
        snap(job(condition("Failed", "True", "DeadlineExceeded", after=20), condition("Complete", after=20))),
        Phase.FAILED, "DeadlineExceeded", "", None,
    ),
    "conditions that say False": (
        JOB,
        snap(job(RESUMED, condition("Complete", "False"), condition("Failed", "False")), pod(trainer=running())),
        Phase.RUNNING, "", "", None,
    ),
    "pods of an object before it": (
        JOB,
        snap(
            job(RESUMED, startTime=at(5)),
            pod(phase="Failed", trainer=ended(7), meta={"labels": {"batch.kubernetes.io/controller-uid": "another"}}),
        ),
        Phase.STARTING, "CreatingPods", "", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_what_the_api_says_has_one_meaning(case: str) -> None:
    kind, snapshot, phase, reason, says, code = TABLE[case]
    seen = interpret(kind, snapshot)
    assert (seen.phase, seen.reason, seen.code) == (phase, reason, code), seen
    assert says in seen.message


@pytest.mark.parametrize("case", TABLE)
def test_every_reason_is_one_camel_case_word_and_every_failure_is_a_sentence(case: str) -> None:
    kind, snapshot, *_ = TABLE[case]
    seen = interpret(kind, snapshot)
    assert not seen.reason or (seen.reason.isalnum() and seen.reason[0].isupper())
    assert not seen.terminal or seen.success or len(seen.message.split()) > 4
    assert "  " not in seen.message and ".." not in seen.message.replace("...", "")


def _shuffled(snapshot: Snapshot, rng: random.Random) -> Snapshot:
    def mixed(obj: Object | None) -> Object | None:
        made = copy.deepcopy(obj)
        for name in ("conditions", "containerStatuses", "initContainerStatuses"):
            rng.shuffle(((made or {}).get("status") or {}).get(name) or [])
        return made

    def mixed_all(objects: tuple[Object, ...]) -> tuple[Object, ...]:
        found = [o for o in map(mixed, objects) if o is not None]
        rng.shuffle(found)
        return tuple(found)

    return Snapshot(
        object=mixed(snapshot.object),
        pods=mixed_all(snapshot.pods),
        events=mixed_all(snapshot.events),
        last=mixed(snapshot.last),
    )


def _distinct(objects: tuple[Object, ...]) -> tuple[Object, ...]:
    """No two objects of a server have one name or UID."""
    made = copy.deepcopy(objects)
    for number, obj in enumerate(made):
        obj["metadata"] |= {"name": f"{obj['metadata']['name']}-{number}", "uid": f"{obj['metadata']['uid']}-{number}"}
    return made


@settings(deadline=None)
@given(st.sampled_from(sorted(TABLE)), st.lists(st.sampled_from(sorted(TABLE)), max_size=2), st.randoms())
def test_no_order_matters(case: str, others: list[str], rng: random.Random) -> None:
    kind, snapshot, *_ = TABLE[case]
    # More pods and events than any table has, so that there is something to take in the wrong order.
    mixed = Snapshot(
        object=snapshot.object,
        pods=_distinct(snapshot.pods + tuple(p for other in others for p in TABLE[other][1].pods)),
        events=_distinct(snapshot.events + tuple(e for other in others for e in TABLE[other][1].events)),
        last=snapshot.last,
    )
    for offset in (0.0, 3600.0):
        assert interpret(kind, _shuffled(mixed, rng), offset) == interpret(kind, mixed, offset)
    assert report(kind, _shuffled(mixed, rng)) == report(kind, mixed)


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("offset", [-3600.0, 0.0, 3600.0])
def test_times_are_by_this_machines_clock(case: str, offset: float) -> None:
    kind, snapshot, *_ = TABLE[case]
    plain, seen = interpret(kind, snapshot), interpret(kind, snapshot, offset)
    assert (seen.since is None) is (plain.since is None)
    assert plain.since is None or seen.since == plain.since - offset
    assert plain.submitted is None or seen.submitted == T0 - offset


@pytest.mark.parametrize(
    ("case", "since"),
    [
        ("in the queue, not looked at yet", 0),
        ("preempted", 60),
        ("let go, no pod yet", 5),
        ("running", 10),
        ("killed, the next pod is coming", 10),
        ("jobset restarts", 5),
        ("succeeded", 30),
        ("trainer failed", 30),
    ],
)
def test_since_is_when_the_clock_of_the_phase_began(case: str, since: float) -> None:
    kind, snapshot, *_ = TABLE[case]
    assert interpret(kind, snapshot).since == T0 + since


def test_the_run_clock_goes_on_over_a_restart() -> None:
    again = snap(job(RESUMED), pod(phase="Failed", trainer=ended(137)), pod("fghij", trainer=running(50)))
    assert interpret(JOB, again).since == T0 + 10


@pytest.mark.parametrize("case", TABLE)
def test_a_report_tells_the_conditions_and_the_cause(case: str) -> None:
    kind, snapshot, phase, reason, *_ = TABLE[case]
    text = report(kind, snapshot)
    assert text.startswith(kind.name) and all(line.strip() and len(line) <= 400 for line in text.splitlines())
    for found in snapshot.pods:
        assert found["metadata"]["name"] in text or case == "pods of an object before it"
    if phase is Phase.FAILED:
        assert reason in text


def test_a_report_stays_readable() -> None:
    pods = [pod(f"p{n:04}", phase="Failed", trainer=ended(4), meta={"creationTimestamp": at(n)}) for n in range(300)]
    events = tuple(event(pods[0], "FailedScheduling", "0/900 nodes " * 500, after=n, count=9) for n in range(300))
    text = report(JOB, snap(job(), *pods, events=events))
    assert len(text) < 10_000 and "292 older pods are left out" in text and "p0299" in text and "p0000 on" not in text


def test_events_are_told_once_and_again_when_they_count_on() -> None:
    waits = unschedulable(NO_GPU)
    first = event(waits, "FailedScheduling", NO_GPU, uid="e1")
    quiet = event(waits, "Created", "Created container", kind="Normal", after=8)
    other = event(waits, "Scheduled", "Successfully assigned", kind="Normal", after=9)
    seen: set[str] = set()
    lines = events_in_words(snap(job(), waits, events=(other, quiet, first)), seen)
    assert lines == [f"pod abcde: FailedScheduling: {NO_GPU}", "pod abcde: Scheduled: Successfully assigned"]
    assert events_in_words(snap(job(), waits, events=(first, other)), seen) == []
    more = event(waits, "FailedScheduling", NO_GPU, uid="e1", count=4, after=12)
    assert events_in_words(snap(job(), waits, events=(other, more)), seen) == [f"{lines[0]} (4 times)"]


def test_events_of_an_object_before_it_are_not_told() -> None:
    before = {"kind": "Job", "metadata": {"name": KEY.object_name(1), "uid": "another"}}
    events = (event(before, "FailedCreate", "old"), event(TOP, "FailedCreate", "new", after=8))
    assert [line.rpartition(" ")[2] for line in events_in_words(snap(job(), events=events), set())] == ["new"]


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        (pod(**PENDING, conditions=[]), [("trainer", 0, False, False)]),
        (pod(**PENDING, trainer=waiting("ContainerCreating")), [("trainer", 0, False, False)]),
        (pod(trainer=running()), [("trainer", 0, True, False)]),
        (pod(phase="Succeeded", trainer=ended(0)), [("trainer", 0, True, True)]),
        (pod(phase="Succeeded", init=ended(0), trainer=ended(0)), [("trainer", 0, True, True)]),
        (
            pod(phase="Failed", init=ended(1), trainer=waiting("PodInitializing")),
            [("gpu-burst-runtime", 0, True, True), ("trainer", 0, False, True)],
        ),
        (
            pod(trainer={**running(40), "restartCount": 2, "lastState": ended(1)}),
            [("trainer", 2, True, False)],
        ),
        (
            pod(trainer=running(), sidecar=running(), meta={"annotations": {}}),
            [("trainer", 0, True, False)],
        ),
    ],
)  # fmt: skip
def test_what_a_follower_needs(found: Object, facts: list[tuple[Any, ...]]) -> None:
    seen = pods_of(snap(job(), found))
    assert [(f.container, f.restarts, f.started, f.terminated) for f in seen] == facts
    assert {(f.name, f.uid, f.rank) for f in seen} == {(found["metadata"]["name"], found["metadata"]["uid"], None)}


def test_a_last_word_says_that_the_output_is_in_the_spool() -> None:
    table = {True: ended(7, message=word(7, "TrainerFailed", "x")), False: ended(137)}
    assert [pods_of(snap(job(), pod(trainer=state)))[0].orderly for state in table.values()] == list(table)


def test_ranks_and_foreign_containers_are_known() -> None:
    ranks = [pod(rank=n, trainer=running()) for n in (3, 0, 11)]
    assert sorted((f.rank for f in pods_of(snap(jobset(), *ranks))), key=str) == [0, 11, 3]
    theirs = pod(spec={"containers": [{"name": "main"}, {"name": "log"}]}, meta={"annotations": {}})
    assert [f.container for f in pods_of(snap(job(), theirs))] == ["main"]
