"""What we submit: within every limit, by reference where it is secret, and as the API's validation wants it."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.errors import ExitCode, SpecError
from airflow_gpu_burst.platforms import Platform, load
from airflow_gpu_burst.spec import RunSpec, Timeouts
from airflow_gpu_burst.state import RunKey
from airflow_gpu_burst.workloads import render
from airflow_gpu_burst.workloads.identity import label_value, run_key_text
from airflow_gpu_burst.workloads.kinds import EVENT, JOB, JOBSET, POD, by_name
from airflow_gpu_burst.workloads.rendering import FINAL_CODES
from airflow_gpu_burst.workloads.snapshot import Object
from tests.unit.workload_objects import KEY, PLAIN_ENV, request

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?")
KEYS = st.builds(
    RunKey,
    dag_id=st.text(min_size=1, max_size=250),
    task_id=st.text(min_size=1, max_size=250),
    run_id=st.text(min_size=1, max_size=250),
    map_index=st.integers(-1, 2000),
)


def pod_template(manifest: Object) -> Object:
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        (replicated,) = spec["replicatedJobs"]
        spec = replicated["template"]["spec"]
    found: Object = spec["template"]
    return found


def trainer(manifest: Object) -> Object:
    (found,) = pod_template(manifest)["spec"]["containers"]
    return dict(found)


def env(manifest: Object) -> dict[str, Any]:
    entries = trainer(manifest)["env"]
    found = {e["name"]: e.get("value", e.get("valueFrom")) for e in entries}
    assert len(found) == len(entries)
    return found


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (JOB, "/apis/batch/v1/namespaces/ns/jobs/x"),
        (JOBSET, "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ns/jobsets/x"),
        (POD, "/api/v1/namespaces/ns/pods/x"),
        (EVENT, "/api/v1/namespaces/ns/events/x"),
    ],
)
def test_every_kind_has_its_path(kind: Any, path: str) -> None:
    assert kind.path("ns", "x") == path and kind.path("ns") == path[: -len("/x")]
    assert by_name(kind.name) is kind


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="Job, JobSet, Pod, Event"):
        by_name("RayJob")


@settings(deadline=None)
@given(KEYS, st.integers(1, 9999), st.text(max_size=60), st.sampled_from([0, 1, 8, 16, 80, 8000]))
def test_every_derived_name_is_within_its_limit(key: RunKey, generation: int, salt: str, gpus: int) -> None:
    name = key.object_name(generation, salt=salt)
    kind, manifest = render(request(name=name, run_key=key, generation=generation, gpus=gpus))
    nodes = max(gpus // 8, 1)
    # Kueue copies `<kind>-<name>-<5 hex>` into a label.
    names = [name, f"{kind.name.lower()}-{name}-12345"]
    # The webhook of JobSet refuses what makes such names of child jobs and pods too long.
    names += [f"{name}-node-0", f"{name}-node-0-{nodes - 1}-abcde"] if kind is JOBSET else [f"{name}-abcde"]
    for made in names:
        assert DNS_1035.fullmatch(made) and len(made) <= 63, made
    for labels in (manifest["metadata"]["labels"], pod_template(manifest)["metadata"]["labels"]):
        assert all(LABEL.fullmatch(value) and len(value) <= 63 for value in labels.values()), labels
    if kind is JOBSET:
        host, domain = env(manifest)["MASTER_ADDR"].split(".")
        assert (host, domain) == (f"{name}-node-0-0", name)
    assert json.loads(manifest["metadata"]["annotations"]["gpu-burst/run-key"]) == key.to_dict()
    assert json.loads(json.dumps(manifest)) == manifest


@settings(deadline=None)
@given(KEYS, KEYS)
def test_equal_text_of_a_run_key_means_equal_run_key(one: RunKey, other: RunKey) -> None:
    assert (run_key_text(one.to_dict()) == run_key_text(other.to_dict())) is (one == other)
    assert run_key_text(dict(reversed(one.to_dict().items()))) == run_key_text(one.to_dict())


@settings(deadline=None)
@given(st.text(max_size=300))
def test_a_label_value_is_one_whatever_the_text(text: str) -> None:
    value = label_value(text)
    assert not value or (LABEL.fullmatch(value) and len(value) <= 63)


def test_a_name_that_leaves_no_room_for_so_many_nodes_is_refused() -> None:
    with pytest.raises(SpecError, match="Use one that is 1 shorter"):
        render(request(name="x" * 48, gpus=800))
    with pytest.raises(SpecError, match="image is empty"):
        render(request(image=""))


def test_one_node_is_a_job() -> None:
    kind, manifest = render(request(gpus=4, priority="low"))
    assert kind is JOB and (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
    spec, pod = manifest["spec"], pod_template(manifest)["spec"]
    assert spec["suspend"] is True and spec["backoffLimit"] == 3 and spec["ttlSecondsAfterFinished"] == 3600
    assert "completionMode" not in spec and "activeDeadlineSeconds" not in spec
    assert trainer(manifest)["command"] == ["gpu-burst", "run", "--", "python", "train.py"]
    assert trainer(manifest)["resources"] == {
        "requests": {"cpu": "60", "memory": "880Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "880Gi", "nvidia.com/gpu": "4"},
    }
    assert pod["terminationGracePeriodSeconds"] == 50  # twice the grace of 10 s, and 30 s
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    assert pod["nodeSelector"]["accelerator"] == "nvidia-b300" and pod["tolerations"][0]["key"] == "dedicated"
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "low"
    found = env(manifest)
    assert found["GPU_BURST_RANK"] == "0" and "MASTER_ADDR" not in found and "NCCL_SOCKET_IFNAME" not in found
    assert found["GPU_BURST_OWNER"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert "k8s.v1.cni.cncf.io/networks" not in pod_template(manifest)["metadata"]["annotations"]
    assert trainer(manifest)["securityContext"] == {"allowPrivilegeEscalation": False}


def test_several_nodes_are_a_jobset_that_uses_what_crosses_nodes() -> None:
    kind, manifest = render(request(gpus=32))
    assert kind is JOBSET
    spec = manifest["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert job["backoffLimit"] == 15  # three rounds in which all four ranks fail, not the fourth
    assert spec["suspend"] is True and "suspend" not in job and spec["ttlSecondsAfterFinished"] == 3600
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert trainer(manifest)["resources"]["limits"] == {"memory": "1760Gi", "nvidia.com/gpu": "8", "rdma/ib": "4"}
    assert trainer(manifest)["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    notes = pod_template(manifest)["metadata"]["annotations"]
    assert notes["k8s.v1.cni.cncf.io/networks"] == "net1,net2,net3,net4"
    found = env(manifest)
    assert found["NCCL_SOCKET_IFNAME"] == "eth0" and found["MASTER_PORT"] == "29500"
    assert found["GPU_BURST_OWNER"]["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["GPU_BURST_RANK"]["fieldRef"]["fieldPath"] == index


def test_no_gpu_is_a_run_without_a_gpu_resource() -> None:
    _, manifest = render(request(gpus=0))
    assert trainer(manifest)["resources"]["limits"] == {"memory": "220Gi"}
    _, bare = render(request(gpus=0, platform=Platform(name="p", gpus_per_node=8)))
    assert trainer(bare)["resources"] == {}


@pytest.mark.parametrize("gpus", [1, 16])
def test_the_queue_is_named_on_the_top_object_only(gpus: int) -> None:
    _, manifest = render(request(gpus=gpus, priority="low"))
    labels = manifest["metadata"].pop("labels")
    assert labels["kueue.x-k8s.io/queue-name"] == "gpu-batch"
    assert "queue-name" not in json.dumps(manifest) and "priority-class" not in json.dumps(manifest)
    assert pod_template(manifest)["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "airflow-gpu-burst",
        "gpu-burst/name": KEY.object_name(1),
    }
    _, free = render(request(gpus=gpus, queue=""))
    assert "suspend" not in free["spec"] and "kueue" not in json.dumps(free)


@pytest.mark.parametrize("how", ["required", "preferred"])
def test_topology_goes_to_the_pods_of_a_queued_run_on_several_nodes(how: str) -> None:
    platform = Platform(name="p", gpus_per_node=8, topology={how: "rack"})
    key = f"kueue.x-k8s.io/podset-{how}-topology"
    for gpus, queue, there in ((16, "q", True), (8, "q", False), (16, "", False)):
        _, manifest = render(request(gpus=gpus, queue=queue, platform=platform))
        assert (pod_template(manifest)["metadata"]["annotations"].get(key) == "rack") is there
        assert key not in manifest["metadata"]["annotations"]


def test_the_identity_is_whole() -> None:
    _, manifest = render(request(try_number=3, generation=7))
    notes = manifest["metadata"]["annotations"]
    assert notes["gpu-burst/generation"] == "7" and notes["gpu-burst/try-number"] == "3"
    assert notes["gpu-burst/store"] == "s3://checkpoints/fab"
    assert notes["gpu-burst/spec-digest"] == request().spec.digest
    labels = manifest["metadata"]["labels"]
    assert (labels["gpu-burst/dag"], labels["gpu-burst/task"], labels["gpu-burst/generation"]) == (
        "yield_rca",
        "train",
        "7",
    )


def test_the_policy_knows_every_exit_code() -> None:
    _, manifest = render(request())
    spec = manifest["spec"]
    disrupted, final = spec["podFailurePolicy"]["rules"]
    # The first rule that matches decides: a drained pod may well end with a code of its own.
    assert (disrupted["action"], final["action"]) == ("Ignore", "FailJob")
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert final["onExitCodes"]["containerName"] == "trainer"
    values = final["onExitCodes"]["values"]
    # As the API's validation wants them: sorted, different, not 0.
    assert values == sorted(FINAL_CODES) and 0 not in values
    assert set(map(int, ExitCode)) - set(values) == {0, 4}
    # Both are demanded where there is a pod failure policy.
    assert spec["podReplacementPolicy"] == "Failed" and spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("timeouts", "deadline"),
    [
        (Timeouts(), None),
        (Timeouts(run_s=3600.0), 1800 + 3600 + 50 + 300),
        (Timeouts(run_s=0.5, start_s=0.2, queue_s=9e9), 1 + 50 + 300),
        (Timeouts(run_s=3600.0, start_s=None), None),
    ],
)
@pytest.mark.parametrize("gpus", [1, 16])
def test_the_servers_deadline_comes_after_ours(timeouts: Timeouts, deadline: int | None, gpus: int) -> None:
    _, manifest = render(request(timeouts=timeouts, gpus=gpus))
    spec = manifest["spec"]
    job = spec if gpus == 1 else spec["replicatedJobs"][0]["template"]["spec"]
    assert job.get("activeDeadlineSeconds") == deadline
    assert deadline is None or deadline > (timeouts.run_s or 0) + (timeouts.start_s or 0)


@pytest.mark.parametrize(
    ("scratch", "volume"),
    [
        ({}, {"emptyDir": {}}),
        ({"empty_dir": {}}, {"emptyDir": {}}),
        ({"empty_dir": {"size_limit": "1Ti"}}, {"emptyDir": {"sizeLimit": "1Ti"}}),
        ({"host_path": "/mnt/nvme"}, {"hostPath": {"path": "/mnt/nvme", "type": "DirectoryOrCreate"}}),
        (
            {"storage_class": "local-nvme", "size": "2Ti"},
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "local-nvme",
                            "resources": {"requests": {"storage": "2Ti"}},
                        }
                    }
                }
            },
        ),
    ],
)
def test_scratch_is_where_the_platform_says(scratch: Any, volume: Object) -> None:
    _, manifest = render(request(platform=Platform(name="p", gpus_per_node=8, scratch=scratch)))
    assert pod_template(manifest)["spec"]["volumes"] == [{"name": "scratch", **volume}]
    assert trainer(manifest)["volumeMounts"] == [{"name": "scratch", "mountPath": "/scratch"}]
    assert env(manifest)["GPU_BURST_SCRATCH"] == "/scratch"


def test_shared_memory_and_runtime_class_are_the_platforms() -> None:
    platform = Platform(name="p", gpus_per_node=8, shm="64Gi", runtime_class="nvidia", env={"A": "1"})
    _, manifest = render(request(platform=platform))
    spec = pod_template(manifest)["spec"]
    assert spec["runtimeClassName"] == "nvidia" and env(manifest)["A"] == "1"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in trainer(manifest)["volumeMounts"]


def test_the_runtime_can_come_by_an_init_container() -> None:
    _, manifest = render(request(runtime_image="lab.local/runtime:1", image_pull_policy="Never"))
    spec = pod_template(manifest)["spec"]
    (init,) = spec["initContainers"]
    assert init["name"] == "gpu-burst-runtime" and init["command"] == ["/opt/gpu-burst/install", "/gpu-burst"]
    assert init["image"] == "lab.local/runtime:1" and init["imagePullPolicy"] == "Never"
    main = trainer(manifest)
    assert main["command"] == ["python3", "/gpu-burst/run.py", "run", "--", "python", "train.py"]
    assert {"name": "runtime", "mountPath": "/gpu-burst", "readOnly": True} in main["volumeMounts"]
    assert {"name": "runtime", "emptyDir": {}} in spec["volumes"] and main["imagePullPolicy"] == "Never"


def test_accounts_and_pull_secrets() -> None:
    _, manifest = render(request(service_account="trainer", image_pull_secrets=("a", "b")))
    spec = pod_template(manifest)["spec"]
    assert spec["serviceAccountName"] == "trainer" and "automountServiceAccountToken" not in spec
    assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def kubelet(text: str, known: dict[str, str]) -> str:
    """What a kubelet makes of `$(NAME)` in commands and values: third_party/forked/golang/expansion of Kubernetes."""
    made, place = "", 0
    while place < len(text):
        if text[place] != "$" or place + 1 == len(text):
            made, place = made + text[place], place + 1
        elif text[place + 1] == "$":
            made, place = made + "$", place + 2
        elif text[place + 1] == "(" and (end := text.find(")", place)) >= 0:
            name = text[place + 2 : end]
            made, place = made + known.get(name, f"$({name})"), end + 1
        else:
            made, place = made + text[place], place + 1
    return made


@settings(deadline=None)
@given(st.lists(st.text(alphabet="$()A x", min_size=1, max_size=12), min_size=1, max_size=4))
def test_the_users_words_arrive_as_they_are(words: list[str]) -> None:
    given_env = {**PLAIN_ENV, "GPU_BURST_STORE": words[0]}
    _, manifest = render(request(command=tuple(words), env=given_env))
    arrived = [kubelet(part, {"A": "filled in", "": "filled in"}) for part in trainer(manifest)["command"]]
    assert arrived[-len(words) :] == words
    assert kubelet(env(manifest)["GPU_BURST_STORE"], {"A": "filled in"}) == words[0]


NAMES = st.text(alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1, max_size=20).filter(
    lambda name: not name.startswith("GPU_BURST_")
)


@settings(deadline=None)
@given(st.frozensets(NAMES, max_size=5), st.dictionaries(NAMES, st.text(max_size=30), max_size=5))
def test_a_secret_comes_by_reference_only(secret: frozenset[str], plain: dict[str, str]) -> None:
    plain = {name: value for name, value in plain.items() if name not in secret}
    _, manifest = render(request(env=plain, secret_env=secret))
    entries = {e["name"]: e for e in trainer(manifest)["env"]}
    for name in secret:
        reference = {"name": "fab-store", "key": name, "optional": True}
        assert entries[name] == {"name": name, "valueFrom": {"secretKeyRef": reference}}
    assert len(entries) == len(trainer(manifest)["env"])


def test_a_secret_with_a_value_is_refused() -> None:
    with pytest.raises(SpecError, match="AWS_SECRET_ACCESS_KEY in env and in secret_env"):
        request(env={"AWS_SECRET_ACCESS_KEY": "hunter2"})
    with pytest.raises(SpecError, match="name the Kubernetes Secret"):
        request(secret="")


@pytest.mark.parametrize("field", ["queue", "priority"])
def test_names_that_no_cluster_takes_are_refused_early(field: str) -> None:
    for wrong in ("GPU", "a b", "-a", "ü", "x" * 64):
        with pytest.raises(SpecError, match="lower-case letters"):
            request(**{field: wrong})


def test_the_trainers_own_environment_goes_through_the_contract() -> None:
    spec = RunSpec(command=("true",), env={"EPOCHS": "3"}, platform="b300")
    _, manifest = render(request(spec=spec))
    assert "EPOCHS" not in json.dumps(manifest)


def test_rendering_changes_nothing_and_says_the_same_twice() -> None:
    asked = request(gpus=16)
    before = copy.deepcopy(asked)
    _, one = render(asked)
    one["metadata"]["labels"].clear()
    trainer(one)["env"].clear()
    assert render(asked)[1] == render(before)[1] and asked == before
    assert load("b300") == asked.platform
