"""One watch for all runs: what each subscriber sees, and what the server is asked while things go wrong."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_burst.errors import ClusterForbidden, ClusterUnauthorized, ClusterUnreachable
from airflow_gpu_burst.routes import KubeConfig
from airflow_gpu_burst.routes.kube import Kube
from airflow_gpu_burst.routes.mirror import EVENTS_PER_RUN, UNKNOWN_UIDS, Mirror, trimmed
from airflow_gpu_burst.routes.watching import Pace, Subscription, Watcher, watcher_of
from airflow_gpu_burst.workloads.kinds import EVENT, JOB, JOBSET, POD
from tests.fake_apiserver import ALWAYS, FakeApi

fault = pytest.mark.fault
OURS = {"app.kubernetes.io/managed-by": "airflow-gpu-burst"}
FAST = Pace(space_s=0.05, poll_s=0.1, backoff_s=0.3, forbidden_s=0.2, late_s=0.1)


def labels(name: str) -> dict[str, str]:
    return {**OURS, "gpu-burst/name": name}


def job(name: str, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels(name), "managedFields": [{"manager": "kubectl"}]},
        "spec": {
            "template": {"spec": {"containers": [{"name": "trainer", "env": [{"name": "A", "value": "b" * 500}]}]}}
        },
        "status": status,
    }


def pod(name: str, rank: int = 0, phase: str = "Pending") -> dict[str, Any]:
    about = {"name": f"{name}-{rank}", "labels": labels(name)}
    spec = {"nodeName": "n1", "containers": [{"name": "trainer", "image": "i"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec, "status": {"phase": phase}}


def event(name: str, uid: str, reason: str = "FailedScheduling", about: dict[str, str] | None = None) -> dict[str, Any]:
    involved = {"kind": "Pod", "uid": uid, **(about or {})}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name},
        "involvedObject": involved,
        "reason": reason,
    }


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        yield server


class Run:
    """A subscriber that counts how often it was woken."""

    def __init__(self, watcher: Watcher, name: str, uid: str, kind: Any = JOB) -> None:
        self.woken = 0
        self.subscription: Subscription = watcher.subscribe(kind, name, uid, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    @property
    def phases(self) -> list[str]:
        snapshot = self.subscription.snapshot()
        return sorted(p["status"]["phase"] for p in snapshot.pods) if snapshot else []

    @property
    def gone(self) -> bool:
        snapshot = self.subscription.snapshot()
        return snapshot is not None and snapshot.object is None

    @property
    def reasons(self) -> list[str]:
        snapshot = self.subscription.snapshot()
        return sorted(e["reason"] for e in snapshot.events) if snapshot else []


class Lab:
    def __init__(self, api: FakeApi, pace: Pace) -> None:
        self.api = api
        self.watcher = Watcher(Kube(KubeConfig(kubeconfig=api.kubeconfig())), "train", pace)
        self.runs: list[Run] = []

    def run(self, name: str, uid: str = "", kind: Any = JOB) -> Run:
        found = Run(self.watcher, name, uid or self.api.objects[(kind.plural, "train", name)]["metadata"]["uid"], kind)
        self.runs.append(found)
        return found


@pytest.fixture
def lab(api: FakeApi) -> Iterator[Lab]:
    made = Lab(api, FAST)
    yield made
    for run in made.runs:
        run.subscription.close()


def eventually(true: Callable[[], Any], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.01)


def watch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gpu-burst-watch")]


# ---- what a subscriber sees


def test_a_change_wakes_only_its_own_run(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    api.put(job("b"))
    a, b = lab.run("a"), lab.run("b")
    eventually(lambda: a.subscription.snapshot() and b.subscription.snapshot() and api.count("watch") == 3)
    time.sleep(0.1)
    before = b.woken
    woken = a.woken
    api.put(pod("a"))
    eventually(lambda: a.phases == ["Pending"])
    assert a.woken == woken + 1
    assert (b.woken, b.phases) == (before, [])


def test_only_what_is_needed_is_kept(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    snapshot = a.subscription.snapshot()
    assert snapshot is not None and snapshot.object is not None
    assert "managedFields" not in snapshot.object["metadata"]
    assert snapshot.object["spec"]["template"]["spec"]["containers"] == [{"name": "trainer"}]
    assert snapshot.object["metadata"]["labels"] == labels("a")


def test_the_same_snapshot_until_something_changes(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    first = a.subscription.snapshot()
    assert a.subscription.snapshot() is first
    api.put(job("a", active=1))
    eventually(lambda: a.subscription.snapshot() is not first)


def test_events_find_their_run(api: FakeApi, lab: Lab) -> None:
    uid = api.put(job("a"))["metadata"]["uid"]
    a = lab.run("a")
    eventually(lambda: api.count("watch", "events"))
    api.put(event("late-pod", "pod-uid"))  # before its pod
    api.put(event("stranger", "another-uid", reason="NotOurs"))
    api.put(event("of-job", uid, reason="SuccessfulCreate"))
    eventually(lambda: a.reasons == ["SuccessfulCreate"])
    made = pod("a")
    made["metadata"]["uid"] = "pod-uid"
    api.put(made)
    eventually(lambda: a.reasons == ["FailedScheduling", "SuccessfulCreate"])


def test_events_of_before_the_subscription_are_there(api: FakeApi, lab: Lab) -> None:
    uid = api.put(job("a"))["metadata"]["uid"]
    api.put(event("early", uid, reason="Suspended"))
    a = lab.run("a")
    eventually(lambda: a.reasons == ["Suspended"])


def test_a_jobsets_child_job_has_events_too(api: FakeApi, lab: Lab) -> None:
    api.put({**job("a"), "kind": "JobSet", "apiVersion": "jobset.x-k8s.io/v1alpha2"})
    a = lab.run("a", kind=JOBSET)
    eventually(lambda: a.subscription.snapshot() and api.count("watch", "events"))
    api.put(event("e", "child-uid", reason="FailedCreate", about={"kind": "Job", "name": "a-node-pool-0"}))
    eventually(lambda: a.reasons == ["FailedCreate"])


def test_jobsets_are_asked_for_only_when_wanted(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    assert api.count(resource="jobsets") == 0


def test_a_deleted_object_leaves_its_last_state(api: FakeApi, lab: Lab) -> None:
    api.put(job("a", succeeded=1))
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    api.delete("jobs", "a")
    eventually(lambda: a.gone)
    snapshot = a.subscription.snapshot()
    assert snapshot is not None and snapshot.last is not None
    assert snapshot.last["status"] == {"succeeded": 1}


def test_another_object_under_the_name_is_not_the_run(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    api.delete("jobs", "a")
    api.put(job("a"))
    eventually(lambda: a.gone)
    again = lab.run("a")
    eventually(lambda: again.subscription.snapshot() and not again.gone)


def test_an_object_that_the_watch_lags_behind_is_not_called_gone(api: FakeApi, lab: Lab) -> None:
    """Created a moment ago, subscribed to at once: the list is of before, the watch has not brought it."""
    api.put(job("other"))
    other = lab.run("other")
    eventually(other.subscription.snapshot)
    seen: list[Any] = []
    new = lab.run("new", uid="uid-of-new")
    made = job("new")
    made["metadata"]["uid"] = "uid-of-new"
    seen.append(new.subscription.snapshot())
    api.put(made)
    eventually(lambda: new.subscription.snapshot())
    assert seen == [None]
    assert not new.gone


def test_an_object_that_never_was_is_gone_after_a_list(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    ghost = lab.run("ghost", uid="never")
    assert ghost.subscription.snapshot() is None
    eventually(lambda: ghost.gone)
    assert ghost.woken


# ---- its life


def test_threads_end_with_the_last_subscription_and_begin_again(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    first, second = lab.run("a"), lab.run("a")
    eventually(lambda: api.count("watch") == 3 and len(watch_threads()) == 3)
    first.subscription.close()
    first.subscription.close()
    time.sleep(0.1)
    assert len(watch_threads()) == 3
    second.subscription.close()
    eventually(lambda: not watch_threads(), timeout_s=1.0)
    third = lab.run("a")
    eventually(third.subscription.snapshot)


def test_threads_end_also_while_there_is_no_server(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    api.stop()
    eventually(lambda: a.subscription.trouble)
    a.subscription.close()
    eventually(lambda: not watch_threads(), timeout_s=1.0)


def test_a_watcher_is_shared(api: FakeApi) -> None:
    kube = Kube(KubeConfig(kubeconfig=api.kubeconfig()))
    assert watcher_of(kube, "train") is watcher_of(kube, "train")
    assert watcher_of(kube, "train") is not watcher_of(kube, "other")


def test_a_subscriber_that_fails_is_its_own_problem(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))

    def closed_loop() -> None:
        raise RuntimeError("Event loop is closed")

    broken = lab.watcher.subscribe(JOB, "a", "u", closed_loop)
    a = lab.run("a")
    api.put(job("a", active=1))
    eventually(lambda: a.subscription.snapshot() and a.woken)
    broken.close()


# ---- faults: what is seen after them, and at most so many requests meanwhile


@fault(
    "stale, cut, frozen or expired watch (410), 401, 429, 5xx",
    outcome="relist or go on; every change is seen; bounded requests",
)
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "expired", "verb": "watch", "times": 3},
        {"kind": "status", "verb": "watch", "status": 410, "reason": "Expired", "times": 3},
        {"kind": "status", "verb": "list", "status": 410, "reason": "Expired", "times": 2},
        {"kind": "close", "verb": "watch", "times": 12},
        {"kind": "cut", "verb": "watch", "times": 3},
        {"kind": "drop", "verb": "watch", "times": 3},
        {"kind": "drop", "times": 8},
        {"kind": "status", "verb": "watch", "status": 500, "times": 4},
        {"kind": "status", "verb": "list", "status": 503, "times": 4},
        {"kind": "status", "verb": "watch", "status": 429, "retry_after": "0", "times": 4},
        {"kind": "html", "status": 404, "times": 6},
        {"kind": "slow", "delay_s": 0.2, "times": 6},
    ],
    ids=lambda f: f"{f['kind']}-{f.get('status', '')}-{f.get('verb', 'any')}",
)
def test_changes_are_seen_after_a_fault(api: FakeApi, lab: Lab, fault: dict[str, Any]) -> None:
    api.put(job("a"))
    api.put(job("b"))
    api.fault(**fault)
    a, b = lab.run("a"), lab.run("b")
    time.sleep(0.2)
    api.put(pod("a", phase="Running"))
    api.delete("jobs", "b")
    eventually(lambda: a.phases == ["Running"] and b.gone, timeout_s=8)
    eventually(lambda: a.subscription.trouble is None)


def test_what_was_deleted_while_away_is_noticed(api: FakeApi, lab: Lab) -> None:
    for name in ("a", "b"):
        api.put(job(name))
        api.put(pod(name))
    a, b = lab.run("a"), lab.run("b")
    eventually(lambda: a.phases and b.phases)
    api.stop()
    eventually(lambda: isinstance(a.subscription.trouble, ClusterUnreachable))
    api.delete("jobs", "a")
    api.delete("pods", "a-0")
    api.put(pod("b", phase="Failed"))
    api.compact()
    api.start()
    eventually(lambda: a.gone and a.phases == [] and b.phases == ["Failed"])
    eventually(lambda: a.subscription.trouble is None)


def test_a_version_that_leads_nowhere_is_given_up(api: FakeApi, lab: Lab) -> None:
    """The watch is answered 200 and ends at once, for ever: only a list gives a version that works."""
    api.put(job("a"))
    a = lab.run("a")
    eventually(lambda: a.subscription.snapshot() and api.count("watch") == 3)
    with api.changed:  # nobody is told of these
        api.put(job("other"))
        api.put(pod("a"))
        api.history.clear()
        api.stale_below = api.version
    api.cut_connections()
    eventually(lambda: a.phases == ["Pending"])
    assert a.subscription.trouble is None


def test_a_version_that_is_too_old_is_not_tried_twice(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(lambda: a.subscription.snapshot() and api.count("watch") == 3)
    api.compact()
    before = len(api.requests)
    api.cut_connections()
    api.put(pod("a"))
    eventually(lambda: a.phases == ["Pending"] and api.count("watch") == 9)
    versions = Counter((r.resource, r.query["resourceVersion"]) for r in api.requests[before:] if r.verb == "watch")
    assert set(versions.values()) == {1}, versions


def test_a_dropped_connection_is_no_trouble(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    a = lab.run("a")
    eventually(lambda: a.subscription.snapshot() and api.count("watch") == 3)
    seen: list[Any] = []
    for number in range(5):
        api.cut_connections()
        api.put(pod("a", rank=number))
        eventually(lambda want=number + 1: len(a.phases) == want)
        seen.append(a.subscription.trouble)
    assert seen == [None] * 5


def test_an_expired_token_is_trouble_until_it_is_renewed(api: FakeApi, tmp_path: Any) -> None:
    path = tmp_path / "config"
    path.write_text(api.kubeconfig(token="old"))
    api.tokens = {"old"}
    api.put(job("a"))
    tick = iter(range(0, 10**6, 10))
    kube = Kube(KubeConfig(kubeconfig_path=str(path)), monotonic=lambda: float(next(tick)))
    a = Run(Watcher(kube, "train", FAST), "a", api.objects[("jobs", "train", "a")]["metadata"]["uid"])
    eventually(a.subscription.snapshot)
    api.tokens = {"new"}
    api.cut_connections()
    eventually(lambda: isinstance(a.subscription.trouble, ClusterUnauthorized))
    path.write_text(api.kubeconfig(token="new"))
    eventually(lambda: a.subscription.trouble is None)
    a.subscription.close()


@fault("watch revoked, list allowed", outcome="a list every 10 s")
def test_a_watch_that_is_forbidden_becomes_a_poll(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    api.forbid("watch", "jobs")
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    api.put(job("a", active=1))
    eventually(lambda: (s := a.subscription.snapshot()) and s.object and s.object["status"] == {"active": 1})
    assert a.subscription.trouble is None
    eventually(lambda: api.count("list", "jobs") >= 3)
    notes = a.subscription.notes()
    assert len(notes) == 1
    assert 'apiGroups: ["batch"], resources: [jobs], verbs: [watch]' in notes[0]
    assert a.subscription.notes() == []


@pytest.mark.parametrize("verb", ["list", ""])
def test_events_that_are_forbidden_are_said_once_to_each(api: FakeApi, lab: Lab, verb: str) -> None:
    api.put(job("a"))
    api.forbid(verb, "events")
    a = lab.run("a")
    eventually(lambda: api.count(resource="events") >= 3)
    b = lab.run("a")
    for run in (a, b):
        notes = run.subscription.notes()
        assert len(notes) == 1
        assert '- {apiGroups: [""], resources: [events], verbs: [list]}' in notes[0]
        assert run.subscription.notes() == []
        assert run.subscription.trouble is None
        assert run.subscription.snapshot()


def test_pods_that_may_not_be_listed_are_trouble(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    forbidden = api.forbid("list", "pods")
    a = lab.run("a")
    eventually(lambda: isinstance(a.subscription.trouble, ClusterForbidden))
    assert "resources: [pods], verbs: [list]" in str(a.subscription.trouble)
    forbidden.end()
    eventually(lambda: a.subscription.trouble is None and a.subscription.snapshot())


def test_a_silent_watch_does_not_hide_changes_for_ever(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_gpu_burst.routes.kube.WATCH_SILENCE_S", 0.2)
    pace = Pace(space_s=0.05, backoff_s=0.3, watch_s=0.1)
    lab = Lab(api, pace)
    api.put(job("a"))
    api.fault("freeze", verb="watch", times=3)
    a = lab.run("a")
    eventually(a.subscription.snapshot)
    api.put(job("a", active=1))
    eventually(lambda: (s := a.subscription.snapshot()) and s.object and s.object["status"])
    a.subscription.close()


def test_everything_is_listed_again_now_and_then(api: FakeApi) -> None:
    """What the watch lost (here: a change that the server never sent) is found by the list."""
    lab = Lab(api, Pace(space_s=0.05, relist_s=0.5))
    api.put(job("a"))
    a = lab.run("a")
    eventually(lambda: a.subscription.snapshot() and api.count("watch") == 3)
    with api.changed:
        api.objects[("jobs", "train", "a")]["status"] = {"failed": 1}
    eventually(lambda: (s := a.subscription.snapshot()) and s.object and s.object["status"] == {"failed": 1})
    a.subscription.close()


@fault("a watch that answers 200 and closes at once", outcome="at most one request a second")
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "close", "verb": "watch"},
        {"kind": "expired", "verb": "watch"},
        {"kind": "drop"},
        {"kind": "status", "status": 500},
        {"kind": "status", "status": 429, "retry_after": "1"},
        {"kind": "forbidden"},
    ],
    ids=lambda f: f"{f['kind']}-{f.get('status', '')}",
)
def test_never_a_tight_loop(api: FakeApi, fault: dict[str, Any]) -> None:
    """At the real pace: each kind asks about once a second at first, and less and less."""
    lab = Lab(api, Pace())
    api.put(job("a"))
    api.fault(times=ALWAYS, **fault)
    a = lab.run("a")
    time.sleep(4)
    a.subscription.close()
    asked = Counter((r.verb, r.resource) for r in api.requests)
    # 5: one at once and four in as many seconds; a read whose connection broke is sent twice
    allowed = 10 if fault["kind"] == "drop" else 5
    assert all(count <= allowed for count in asked.values()), asked


def test_less_and_less_while_there_is_no_answer(api: FakeApi) -> None:
    lab = Lab(api, Pace(space_s=0.02, backoff_s=10))
    api.put(job("a"))
    api.fault("status", status=500, times=ALWAYS)
    a = lab.run("a")
    time.sleep(2)
    a.subscription.close()
    asked = Counter(r.resource for r in api.requests)
    assert 3 < asked["jobs"] < 12  # 100 without


def test_a_watch_waits_as_the_server_asks(api: FakeApi, lab: Lab) -> None:
    api.put(job("a"))
    api.fault("status", verb="watch", status=429, retry_after="2", times=ALWAYS)
    a = lab.run("a")
    time.sleep(1.5)
    assert isinstance(a.subscription.trouble, ClusterUnreachable)
    assert api.count("watch", "jobs") == 1


# ---- size


def test_a_thousand_runs(api: FakeApi) -> None:
    """Requests, memory and work do not grow with what the runs do not do."""
    count = 1000
    lab = Lab(api, Pace())
    for number in range(count):
        api.put(job(f"j{number}"))
        api.put(pod(f"j{number}"))
    tracemalloc.start()
    runs = [lab.run(f"j{number}") for number in range(count)]
    eventually(lambda: all(r.subscription.snapshot() for r in runs), timeout_s=30)
    per_run = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    assert per_run < 100_000  # bytes, the fake server's own included
    time.sleep(2.5)  # longer than late_s
    assert len(api.requests) <= 12
    before = [r.woken for r in runs]
    api.put(job("j500", active=1))
    eventually(lambda: runs[500].woken > before[500])
    assert sum(r.woken for r in runs) == sum(before) + 1
    for run in runs:
        run.subscription.close()


# ---- the mirror by itself


def complete(item: dict[str, Any], uid: str) -> dict[str, Any]:
    return {**item, "metadata": {**item["metadata"], "uid": uid}}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("01"), st.sampled_from(["put", "delete", "list"]))))
def test_watch_and_list_lead_to_the_same(steps: list[tuple[str, str, str]]) -> None:
    """However changes and lists are mixed, what is seen is what is there; and nothing is left when all is gone."""
    mirror, truth = Mirror(), dict[str, dict[str, Any]]()
    for name in "abc":
        mirror.want(name, 1)
    for turn, (name, rank, what) in enumerate(steps):
        uid = f"{name}{rank}"
        if what == "delete":
            gone = truth.pop(uid, None)
            if gone:
                assert mirror.change(POD, "DELETED", gone) == {name}
            continue
        item = complete(pod(name, int(rank), phase=str(turn)), uid)
        truth[uid] = item
        if what == "put":
            assert mirror.change(POD, "MODIFIED", item) == {name}
        else:
            truth = {uid: item}
            assert name in mirror.replace(POD, [item])
    for name in "abc":
        seen = mirror.snapshot(name, "").pods
        assert sorted(p["metadata"]["uid"] for p in seen) == sorted(u for u in truth if u[0] == name)
        mirror.want(name, -1)
    mirror.replace(POD, [])
    assert (mirror._runs, mirror._owners) == ({}, {})


def test_events_are_bounded() -> None:
    mirror = Mirror()
    mirror.change(JOB, "ADDED", complete(job("a"), "u"))
    for number in range(3 * EVENTS_PER_RUN):
        mirror.change(EVENT, "ADDED", trimmed(complete(event(f"e{number}", "u"), f"e{number}")))
    assert len(mirror.snapshot("a", "u").events) == EVENTS_PER_RUN
    for number in range(3 * UNKNOWN_UIDS):
        mirror.change(EVENT, "ADDED", trimmed(complete(event(f"x{number}", f"x{number}"), f"x{number}")))
    assert len(mirror._unknown) == UNKNOWN_UIDS
