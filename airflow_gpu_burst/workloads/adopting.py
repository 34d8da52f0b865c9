"""A user's own Job or JobSet: the same care as for a generated one, and otherwise left as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from airflow_gpu_burst import contract
from airflow_gpu_burst.errors import NotInstalledError, SpecError
from airflow_gpu_burst.workloads import identity
from airflow_gpu_burst.workloads.environment import TERMINATION_FILE, variables
from airflow_gpu_burst.workloads.kinds import JOB, JOBSET, Kind
from airflow_gpu_burst.workloads.request import Request
from airflow_gpu_burst.workloads.snapshot import Object

SUPPORTED = (JOB, JOBSET)
SERVER_SET = (
    "ownerReferences",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "managedFields",
    "selfLink",
)
_USERS_OWN = {contract.ENV_SCRATCH}
"""Contract variables that a manifest may set itself: only its author knows the volumes."""


def adopt_manifest(manifest: Mapping[str, Any] | str, request: Request) -> tuple[Kind, Object]:
    """
    The user's manifest as ours to submit: our name, namespace, identity, queue, and the contract in every container.

    `gpu-burst run` then works in it. Nothing else is changed, and the input never is. Platform, image and GPUs of the
    request are not used.

    :param manifest: a dict, or YAML text with one document.
    :raises SpecError: another kind, more than one document, or something that cannot be kept; says what to change.
    """
    found = parse_manifest(manifest)
    kind = kind_of_manifest(found)
    metadata = _mapping(found, "metadata", "manifest")
    _refuse(found, metadata, request)
    metadata.pop("generateName", None)
    metadata |= {"name": request.name, "namespace": request.namespace}
    own = dict(_mapping(metadata, "labels", "metadata"))
    metadata["labels"] = {**own, **identity.object_labels(request)}
    for label in (identity.QUEUE, identity.PRIORITY):
        if label in own:
            metadata["labels"][label] = own[label]
    metadata["annotations"] = {**_mapping(metadata, "annotations", "metadata"), **identity.object_annotations(request)}
    spec = _mapping(found, "spec", "manifest")
    if metadata["labels"].get(identity.QUEUE):
        # As for generated ones: nothing must start past the queue.
        spec.setdefault("suspend", True)
    for job in _jobs(kind, spec):
        _adopt_job(kind, job, request)
    return kind, found


def _adopt_job(kind: Kind, job: Object, request: Request) -> None:
    template = _mapping(job, "template", "spec")
    metadata = _mapping(template, "metadata", "template")
    labels = _mapping(metadata, "labels", "template.metadata")
    for label in (identity.QUEUE, identity.PRIORITY):
        if label in labels:
            raise SpecError(
                f"the pod template has the label {label}: Kueue would then queue every pod by itself, beside the "
                f"{kind.name}. Move it to the labels of the {kind.name}, or leave it out and set queue_name"
            )
    metadata["labels"] = {**labels, **identity.pod_labels(request)}
    containers = _mapping(template, "spec", "template").get("containers")
    if not isinstance(containers, list) or not all(isinstance(c, dict) for c in containers) or not containers:
        raise SpecError("the pod template has no containers: write spec.template.spec.containers as a list")
    for container in containers:
        container["env"] = _environment(kind, container, request, indexed=_mode(kind, job) == "Indexed")


def _environment(kind: Kind, container: Object, request: Request, *, indexed: bool) -> list[Object]:
    theirs = container.get("env") or []
    names = {entry.get("name") for entry in theirs if isinstance(entry, dict)}
    taken = sorted(str(n) for n in names - _USERS_OWN if str(n).startswith("GPU_BURST_"))
    if taken:
        raise SpecError(
            f"container {container.get('name')!r} sets {', '.join(taken)}: these name one run and are set when it is "
            "submitted. Take them out of the manifest"
        )
    path = container.get("terminationMessagePath") or TERMINATION_FILE
    ours = variables(kind, request, indexed=indexed, plain={contract.ENV_TERMINATION_FILE: path})
    # A manifest that brings its own keys to the store keeps them. Ours come first, so that theirs may refer to them.
    return [*(entry for entry in ours if entry["name"] not in names), *theirs]


def _refuse(found: Object, metadata: Object, request: Request) -> None:
    if found.get("status"):
        raise SpecError("the manifest has a status: it was read from a cluster. Take out status before you submit it")
    copied = [name for name in SERVER_SET if metadata.get(name)]
    if copied:
        raise SpecError(
            f"metadata has {', '.join(copied)}, which its cluster sets: the manifest was read from there. Take them out"
        )
    namespace = metadata.get("namespace")
    if namespace and namespace != request.namespace:
        raise SpecError(
            f"the manifest is for namespace {namespace!r}, and the connection for {request.namespace!r}. Leave "
            "namespace out of the manifest, or use a connection for that namespace"
        )


def parse_manifest(manifest: Mapping[str, Any] | str) -> Object:
    """
    A manifest as plain JSON, a copy of its own.

    :param manifest: a dict, or YAML text with one document.
    :raises SpecError: not one mapping of one of the kinds that can be run; says what would be right.
    """
    found = _plain(_parse(manifest) if isinstance(manifest, str) else manifest)
    kind_of_manifest(found)
    return found


def kind_of_manifest(found: Mapping[str, Any]) -> Kind:
    """
    What a manifest is.

    :raises SpecError: a kind that cannot be run here; lists those that can.
    """
    for kind in SUPPORTED:
        if found.get("kind") == kind.name and found.get("apiVersion") == kind.api_version:
            return kind
    names = ", ".join(f"{kind.api_version} {kind.name}" for kind in SUPPORTED)
    raise SpecError(
        f"a manifest of {found.get('apiVersion')} {found.get('kind')} cannot be run here; supported are {names}"
    )


def ranks_of_manifest(manifest: Mapping[str, Any]) -> int:
    """
    How many pods a manifest wants for one attempt: the completions of an Indexed job, else its parallelism.

    Where it does not say: 1, as the cluster has it.

    :raises SpecError: not one of the kinds that can be run, or no job in it.
    """
    found = _plain(manifest)
    kind = kind_of_manifest(found)
    spec = _mapping(found, "spec", "manifest")
    jobs = _jobs(kind, spec)
    replicas = [1] if kind is JOB else [_count(group, "replicas") for group in spec["replicatedJobs"]]
    return sum(copies * _pods(kind, job) for copies, job in zip(replicas, jobs, strict=True))


def _pods(kind: Kind, job: Object) -> int:
    return _count(job, "completions" if _mode(kind, job) == "Indexed" else "parallelism")


def _count(parent: Object, name: str) -> int:
    value = parent.get(name)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{name} of the manifest must be a whole number, not {value!r:.80}")
    return value


def _mode(kind: Kind, job: Object) -> str:
    """A JobSet's jobs have an index unless they say otherwise; a Job's do only if they say so."""
    return str(job.get("completionMode") or ("Indexed" if kind is JOBSET else "NonIndexed"))


def _jobs(kind: Kind, spec: Object) -> list[Object]:
    if kind is JOB:
        return [spec]
    replicated = spec.get("replicatedJobs")
    if not isinstance(replicated, list) or not replicated or not all(isinstance(r, dict) for r in replicated):
        raise SpecError("the JobSet has no replicatedJobs: write spec.replicatedJobs as a list")
    return [_mapping(_mapping(r, "template", "replicatedJobs"), "spec", "replicatedJobs.template") for r in replicated]


def _parse(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise NotInstalledError("a manifest as text is YAML: pip install 'airflow-gpu-burst[airflow]'") from error
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise SpecError(f"the manifest is not YAML: {error}. Check its indentation and quotes") from error
    if len(documents) != 1:
        raise SpecError(
            f"the manifest has {len(documents)} documents, and one Job or JobSet is submitted per task. "
            "Give one document; what else it needs belongs to the cluster's set-up"
        )
    return documents[0]


def _plain(manifest: Any) -> Object:
    """A copy that is JSON and nothing else."""
    if not isinstance(manifest, Mapping):
        raise SpecError(f"a manifest is a mapping with apiVersion, kind, metadata and spec, not {manifest!r:.80}")
    try:
        copy: Object = json.loads(json.dumps(dict(manifest), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"the manifest does not read as JSON: {error}. Quote dates and other values that YAML takes for more "
            "than text"
        ) from error
    return copy


def _mapping(parent: Object, name: str, where: str) -> Object:
    value = parent.get(name)
    if value is None:
        value = parent[name] = {}
    if not isinstance(value, dict):
        raise SpecError(f"{name} of {where} must be a mapping, not {value!r:.80}")
    return value
