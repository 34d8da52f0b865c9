"""From a task's start to its pod, and from a pod's end to the trigger's event, beside the peer and a bare client."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.workloads.kinds import POD
from bench.cluster import Cluster, described
from bench.deferred import percentile
from bench.recording import Row, row

SUBMITTER, DEFERRED = (Path(__file__).parent / name for name in ("submitter.py", "deferred.py"))
SUBMISSIONS = 7
ENDS = 24
FIRST_END_S, LAST_END_S = 25.0, 70.0
"""How long after its start a pod ends: not before all have begun, and not all at once."""


class Pods:
    """
    When each job's pod came to be and when it ended, in seconds of this machine's wall clock.

    A pod's creation is when the API tells of it. Its end is that of its process, which runs on this very machine;
    the kubelet notices it within a second, and tells the API whole seconds.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.created: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.told: dict[str, float] = {}
        self._cluster = cluster
        self._watched: set[str] = set()
        self._stopping = threading.Event()
        self._streams: list[Any] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[Pods]:
        """Watch in threads while the block lasts."""
        threading.Thread(target=self._watch, daemon=True).start()
        time.sleep(1.0)
        yield self
        self._stopping.set()
        for stream in self._streams:
            stream.close()

    def wait_created(self, name: str, timeout_s: float = 60) -> float:
        """When the pod of that job was created."""
        deadline = time.monotonic() + timeout_s
        while name not in self.created:
            if time.monotonic() > deadline:
                raise SystemExit(f"no pod of {name} within {timeout_s:.0f} s")
            time.sleep(0.01)
        return self.created[name]

    def _watch(self) -> None:
        cluster, version = self._cluster, ""
        while not self._stopping.is_set():
            with contextlib.suppress(GpuBurstError):
                version = version or cluster.kube.list(POD, cluster.namespace).resource_version
                stream = cluster.kube.watch(POD, cluster.namespace, resource_version=version)
                self._streams.append(stream)
                with stream:
                    for what, pod in stream:
                        version = pod["metadata"]["resourceVersion"]
                        if what in ("ADDED", "MODIFIED"):
                            self._saw(pod, time.time())

    def _saw(self, pod: dict[str, Any], now: float) -> None:
        job = (pod["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-name", "")
        self.created.setdefault(job, now)
        states = [c.get("state") or {} for c in pod.get("status", {}).get("containerStatuses") or []]
        if any("terminated" in state for state in states):
            self.told.setdefault(job, now)
        uid = pod["metadata"]["uid"]
        if any("running" in state for state in states) and uid not in self._watched:
            self._watched.add(uid)
            container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
            threading.Thread(target=self._await_end, args=(job, _process_of(container)), daemon=True).start()

    def _await_end(self, job: str, pid: int) -> None:
        if pid:
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                select.select([descriptor], [], [])
                self.ended[job] = time.time()
                os.close(descriptor)


def _process_of(container: str) -> int:
    """The first process of a container; 0: none."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if container not in (folder / "cgroup").read_text():
                continue
            spaces = next(s for s in (folder / "status").read_text().splitlines() if s.startswith("NSpid:"))
            if spaces.split()[-1] == "1":
                return int(folder.name)
    return 0


def submissions(cluster: Cluster, home: str) -> list[Row]:
    """Task start to pod created: ours, a bare client with ours' manifest, and the peer, in turn."""
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": [], "peer": []}
    with Pods(cluster).watched() as pods:
        for number in range(SUBMISSIONS + 1):
            run = f"submit-{number}-{uuid.uuid4().hex[:6]}"
            name, ours = _submit(cluster, pods, "ours", run, home)
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump(_posted_again(cluster, name), file)
                file.flush()
                bare = _submit(cluster, pods, "bare", file.name, home)[1]
            peer = _submit(cluster, pods, "peer", f"peer-{run}", home)[1]
            print({"ours": ours, "bare": bare, "peer": peer}, flush=True)
            if number:  # the first warms up
                for which, took in (("ours", ours), ("bare", bare), ("peer", peer)):
                    found[which].append(took)

    def over(which: int) -> list[float]:
        return [ours[which] - bare[which] for ours, bare in zip(found["ours"], found["bare"], strict=True)]

    start, execute = ({which: [took[n] for took in values] for which, values in found.items()} for n in (0, 1))
    return [
        row("task start to pod created, over a bare client", "s", over(0), None, "", 0.5),
        row("task start to pod created", "s", start["ours"], start["peer"], "KubernetesJobOperator", 1.0),
        row("execute to pod created, over a bare client", "s", over(1), None, "", 0.5),
    ]


def _submit(cluster: Cluster, pods: Pods, which: str, argument: str, home: str) -> tuple[str, tuple[float, float]]:
    """The job, and the seconds to its pod: from the task's start (imports included), and from that of `execute`."""
    command = [sys.executable, str(SUBMITTER), which, argument]
    done = subprocess.run(command, env=cluster.env(home), capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"{which}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    result = json.loads(line.removeprefix("RESULT"))
    created = pods.wait_created(result["name"])
    return result["name"], (created - result["began"], created - result["executed"])


def _posted_again(cluster: Cluster, name: str) -> dict[str, Any]:
    """The manifest that made a job, under another name."""
    job = cluster.gpu.get("job", name, "-n", cluster.namespace)
    about, spec = job["metadata"], job["spec"]
    spec.pop("selector")
    for key in [key for key in spec["template"]["metadata"]["labels"] if "batch." in key or "controller-uid" in key]:
        del spec["template"]["metadata"]["labels"][key]
    spec["template"]["metadata"]["labels"].pop("job-name", None)
    kept = {key: about[key] for key in ("labels", "annotations")}
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**kept, "name": f"bare-{uuid.uuid4().hex[:12]}"},
        "spec": spec,
    }
    return {"kubeconfig": str(cluster.gpu.admin), "namespace": cluster.namespace, "manifest": manifest}


WATCHERS = (
    ("ours", "ours", 10.0),
    ("KubernetesJobTrigger, 10 s", "peer", 10.0),
    ("KubernetesJobTrigger, 1 s", "peer", 1.0),
)


def ends(cluster: Cluster, home: str) -> list[Row]:
    """
    Pod end to event, all three on the same jobs at the same time. Ours may be earlier: the run's success is in its log
    some hundredths of a second before its process ends; that counts as 0.
    """
    dice = random.Random(3)
    with Pods(cluster).watched() as pods:
        handles = cluster.ending(ENDS, lambda number: dice.uniform(FIRST_END_S, LAST_END_S))
        jobs = described(handles, time.time())
        with ThreadPoolExecutor() as pool:
            watchers = {name: pool.submit(_watcher, cluster, which, jobs, poll, home) for name, which, poll in WATCHERS}
            events = {name: watcher.result() for name, watcher in watchers.items()}
    names = [handle.name for handle in handles if handle.name in pods.ended]
    if len(names) < ENDS * 0.8:
        raise SystemExit(f"only {len(names)} of {ENDS} pods were seen to end")
    waits = {name: [max(0.0, found[job] - pods.ended[job]) for job in names] for name, found in events.items()}
    after_told = [max(0.0, events["ours"][job] - pods.told[job]) for job in names]
    kubelet = [pods.told[job] - pods.ended[job] for job in names]
    for name, values in {**waits, "the API after the process": kubelet, "ours after the API": after_told}.items():
        print(f"{name}: median {percentile(values, 0.5):.2f}, p95 {percentile(values, 0.95):.2f} s", flush=True)
    rows = [
        row("end to event p95", "s", [percentile(waits["ours"], 0.95)], None, "", 1.0),
        row("end to event p95, from the API's notice", "s", [percentile(after_told, 0.95)], None, "", 1.0),
    ]
    for name, _, _ in WATCHERS[1:]:
        p95 = [percentile(waits[each], 0.95) for each in ("ours", name)]
        rows.append(row(f"end to event p95 beside {name}", "s", [p95[0]], [p95[1]], name, 1.0))
    return rows


def _watcher(cluster: Cluster, which: str, jobs: list[dict[str, Any]], poll_s: float, home: str) -> dict[str, float]:
    """A process that defers on the jobs until all have fired; job → when its event came."""
    plan = {"jobs": jobs, "seconds": 0, "settle_s": 0, "poll_s": poll_s, "host": ""}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        command = [sys.executable, str(DEFERRED), which, file.name]
        done = subprocess.run(command, env=cluster.env(home), capture_output=True, text=True, check=True)
    events = [json.loads(line.removeprefix("EVENT")) for line in done.stdout.splitlines() if line.startswith("EVENT")]
    for event in events:
        if event["how"].upper() not in ("SUCCEEDED", "SUCCESS", "FAILED", "ERROR"):
            raise SystemExit(f"not an end: {event}")
    return {event["name"]: event["at"] for event in events}
