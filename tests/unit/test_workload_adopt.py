"""A user's own manifest gets our name, identity and contract, and is otherwise what it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.workloads import adopt_manifest, kind_of_manifest, parse_manifest, ranks_of_manifest
from airflow_gpu_burst.workloads.kinds import JOB, JOBSET
from airflow_gpu_burst.workloads.snapshot import Object
from tests.unit.workload_objects import KEY, request

JOB_YAML = """
# a comment, and one document after an empty one
---
apiVersion: batch/v1
kind: Job
metadata:
  generateName: mine-
  labels: {team: yield, app.kubernetes.io/managed-by: helm}
  annotations: {note: "as it was"}
spec:
  backoffLimit: 0
  template:
    metadata: {labels: {app: train}}
    spec:
      restartPolicy: Never
      containers:
      - name: main
        image: lab.local/base:1
        command: [gpu-burst, run, --, python, train.py]
        terminationMessagePath: /tmp/word
        env: [{name: HOME, value: /tmp}, {name: GPU_BURST_SCRATCH, value: /data}]
      - {name: side, image: "lab.local/base:1"}
"""
JOBSET_YAML = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: set}
spec:
  replicatedJobs:
  - name: leader
    template:
      spec: {template: {spec: {containers: [{name: a, image: i}]}}}
  - name: worker
    replicas: 2
    template:
      spec:
        completions: 3
        parallelism: 3
        template: {spec: {containers: [{name: b, image: i}]}}
  - name: plain
    template:
      spec: {completionMode: NonIndexed, template: {spec: {containers: [{name: c, image: i}]}}}
"""


def names(container: Object) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}


def changed(**values: Any) -> Object:
    """The Job with other metadata, spec or template metadata."""
    made = parse_manifest(JOB_YAML)
    for path, value in values.items():
        *way, last = path.split("__")
        place = made
        for step in way:
            place = place[step]
        place[last] = value
    return made


def test_a_job_as_text_becomes_ours() -> None:
    kind, made = adopt_manifest(JOB_YAML, request(priority="low"))
    assert kind is JOB
    meta = made["metadata"]
    assert meta["name"] == KEY.object_name(1) and meta["namespace"] == "train" and "generateName" not in meta
    assert meta["labels"]["team"] == "yield" and meta["annotations"]["note"] == "as it was"
    assert meta["labels"]["app.kubernetes.io/managed-by"] == "airflow-gpu-burst"
    assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-batch"
    assert json.loads(meta["annotations"]["gpu-burst/run-key"]) == KEY.to_dict()
    assert made["spec"]["suspend"] is True
    template = made["spec"]["template"]
    assert template["metadata"]["labels"] == {
        "app": "train",
        "app.kubernetes.io/managed-by": "airflow-gpu-burst",
        "gpu-burst/name": KEY.object_name(1),
    }
    main, side = map(names, template["spec"]["containers"])
    assert main["GPU_BURST_TERMINATION_FILE"] == "/tmp/word" and side["GPU_BURST_TERMINATION_FILE"].startswith("/dev/")
    assert main["GPU_BURST_STORE"] == "s3://checkpoints/fab" and main["HOME"] == "/tmp"
    assert main["GPU_BURST_SCRATCH"] == "/data" and "GPU_BURST_SCRATCH" not in side
    assert main["GPU_BURST_RANK"] == "0"
    assert main["AWS_SECRET_ACCESS_KEY"]["secretKeyRef"]["name"] == "fab-store"
    assert main["GPU_BURST_OWNER"]["fieldRef"]["fieldPath"].startswith("metadata.labels['batch.kubernetes.io/")


def stripped(made: Object, before: Object) -> Object:
    """What is left of an adopted manifest without what we set."""
    left = copy.deepcopy(made)
    left["metadata"] = before["metadata"]
    left["spec"]["template"]["metadata"] = before["spec"]["template"]["metadata"]
    left["spec"].pop("suspend")
    for container, old in zip(
        left["spec"]["template"]["spec"]["containers"], before["spec"]["template"]["spec"]["containers"], strict=True
    ):
        container["env"] = [e for e in container["env"] if e in old.get("env", [])]
        if "env" not in old:
            del container["env"]
    return left


LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
TREE = st.dictionaries(
    st.text(max_size=8), LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(st.text(max_size=5), LEAF)
)


@settings(deadline=None)
@given(TREE, TREE)
def test_everything_else_stays_and_the_input_is_never_changed(spec: dict[str, Any], pod: dict[str, Any]) -> None:
    mine = parse_manifest(JOB_YAML)
    own = {"suspend", "template", "metadata", "completionMode"}
    mine["spec"] |= {k: v for k, v in spec.items() if k not in own}
    mine["spec"]["template"]["spec"] |= {k: v for k, v in pod.items() if k != "containers"}
    before = copy.deepcopy(mine)
    _, made = adopt_manifest(mine, request())
    assert mine == before
    assert json.dumps(stripped(made, before), sort_keys=True) == json.dumps(before, sort_keys=True)
    made["spec"]["template"]["spec"]["containers"].clear()
    assert mine == before


def test_every_pod_template_of_a_jobset_becomes_ours() -> None:
    kind, made = adopt_manifest(JOBSET_YAML, request())
    assert kind is JOBSET and made["spec"]["suspend"] is True
    ranks = []
    for replicated in made["spec"]["replicatedJobs"]:
        template = replicated["template"]["spec"]["template"]
        assert template["metadata"]["labels"]["gpu-burst/name"] == KEY.object_name(1)
        found = names(template["spec"]["containers"][0])
        assert found["GPU_BURST_OWNER"]["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
        ranks.append(found["GPU_BURST_RANK"])
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert ranks == [index, index, "0"]


@pytest.mark.parametrize(
    ("manifest", "pods"),
    [
        (JOB_YAML, 1),
        (changed(spec__parallelism=3, spec__completions=9), 3),
        (changed(spec__parallelism=3, spec__completions=9, spec__completionMode="Indexed"), 9),
        (JOBSET_YAML, 1 + 2 * 3 + 1),
    ],
)
def test_how_many_pods_there_will_be(manifest: Any, pods: int) -> None:
    assert ranks_of_manifest(parse_manifest(manifest)) == pods


def test_its_own_queue_wins_and_without_any_it_is_not_suspended() -> None:
    theirs = changed(metadata__labels={"kueue.x-k8s.io/queue-name": "mine"})
    _, made = adopt_manifest(theirs, request(queue="other"))
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "mine" and made["spec"]["suspend"] is True
    _, made = adopt_manifest(JOB_YAML, request(queue=""))
    assert "suspend" not in made["spec"] and "kueue" not in json.dumps(made)
    _, made = adopt_manifest(changed(spec__suspend=False), request())
    assert made["spec"]["suspend"] is False


def test_its_own_keys_to_the_store_win() -> None:
    mine = changed()
    mine["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "AWS_SECRET_ACCESS_KEY", "value": "$(OTHER)"}]
    _, made = adopt_manifest(mine, request())
    entries = made["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [e for e in entries if e["name"] == "AWS_SECRET_ACCESS_KEY"] == [entries[-1]]
    assert entries[-1]["value"] == "$(OTHER)"


QUEUED_POD = {"labels": {"kueue.x-k8s.io/queue-name": "q"}}


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ("{", "not YAML"),
        ("", "0 documents"),
        (JOB_YAML + "---\n" + JOBSET_YAML, "2 documents"),
        ("just words", "is a mapping"),
        ({"apiVersion": "v1", "kind": "Pod"}, "v1 Pod cannot be run here; supported are batch/v1 Job, jobset"),
        ({"apiVersion": "batch/v1beta1", "kind": "Job"}, "batch/v1beta1 Job"),
        (changed(status={"active": 1}), "Take out status"),
        (changed(metadata__resourceVersion="7", metadata__uid="u"), "uid, resourceVersion"),
        (changed(metadata__ownerReferences=[{"kind": "Job", "name": "j"}]), "ownerReferences"),
        (changed(metadata__namespace="other"), "namespace 'other'"),
        (changed(spec__template__metadata=QUEUED_POD), "Move it to the labels of the Job"),
        (changed(spec__template__spec={"containers": []}), "no containers"),
        (changed(spec__template=[]), "template of spec must be a mapping"),
        (changed(spec__template__spec={"containers": [{"env": [{"name": "GPU_BURST_CONTEXT"}]}]}), "sets GPU_BURST"),
        (JOB_YAML.replace('"as it was"', "2026-01-01"), "Quote dates"),
        ({"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": {}}, "no replicatedJobs"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_the_way_out(manifest: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        adopt_manifest(manifest, request())


def test_the_examples_of_the_lab_can_be_run() -> None:
    folder = Path(__file__).parents[1] / "lab" / "examples"
    for name, kind in {"job-direct.yaml": JOB, "job-long.yaml": JOB, "jobset-multikueue.yaml": JOBSET}.items():
        found = parse_manifest((folder / name).read_text(encoding="utf-8"))
        assert kind_of_manifest(found) is kind and adopt_manifest(found, request())[0] is kind


@pytest.mark.parametrize("value", ["two", 1.5, True, [1]])
def test_a_count_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="parallelism of the manifest must be a whole number"):
        ranks_of_manifest(changed(spec__parallelism=value))


def test_a_count_that_is_not_given_is_one() -> None:
    assert ranks_of_manifest(changed(spec__parallelism=None)) == 1
