"""
GPU platforms as data: one YAML file each, here or in a folder of the user's own.

A platform says what a cluster's GPU nodes look like. What crosses nodes (networks, NCCL environment, topology)
is used only by runs on more than one node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from airflow_gpu_burst.errors import NotInstalledError, SpecError

ENV_PLATFORMS = "GPU_BURST_PLATFORMS"
"""Folder with the user's own platform files; its names win over the packaged ones."""

_QUANTITY = re.compile(r"[0-9]+([EPTGMK]i|[EPTGMk])?")
_SCRATCH = {"host_path": {"host_path"}, "empty_dir": {"empty_dir"}, "storage_class": {"storage_class", "size"}}


@dataclass(frozen=True, kw_only=True)
class Platform:
    """
    What a GPU platform offers.

    :param gpus_per_node: GPUs of one node, the unit of placement for more than one node.
    :param gpu_resource: name under which nodes advertise GPUs.
    :param node_selector: labels of the nodes that a run may go to.
    :param tolerations: taints of these nodes, as a pod spec writes them.
    :param cpus_per_gpu: cores requested per GPU, no limit set; a run without GPUs gets one GPU's share. 0: none.
    :param memory_per_gpu: host memory per GPU, requested and the limit, e.g. `200Gi`; empty: neither.
    :param shm: size of `/dev/shm`, e.g. `64Gi`; it counts as the pod's memory. Empty: the container runtime's 64 MB,
        which is too small for most data loaders.
    :param scratch: where node-local NVMe is, mounted at `/scratch`: `{host_path: /mnt/nvme/gpu-burst}`,
        `{empty_dir: {size_limit: 1Ti}}`, or `{storage_class: NAME, size: 1Ti}`. Empty: the node's disk for pods.
    :param networks: secondary networks (Multus) of pods that talk to other nodes.
    :param network_resources: what these networks take of the node's device plugins, e.g. `{rdma/ib: 4}`.
    :param env: environment of every run.
    :param nccl_env: environment of runs on more than one node.
    :param topology: how close the nodes of one run must be, for Kueue: `{required: LABEL}` or `{preferred: LABEL}`.
    :param runtime_class: RuntimeClass of the pods, or empty.
    :param capabilities: Linux capabilities, e.g. `[IPC_LOCK]` for RDMA.
    """

    name: str
    gpus_per_node: int
    description: str = ""
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    cpus_per_gpu: int = 0
    memory_per_gpu: str = ""
    shm: str = ""
    scratch: Mapping[str, Any] = field(default_factory=dict)
    networks: tuple[str, ...] = ()
    network_resources: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    nccl_env: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, str] = field(default_factory=dict)
    runtime_class: str = ""
    capabilities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name))
        if self.gpus_per_node < 1:
            raise SpecError(f"gpus_per_node={self.gpus_per_node}: a node of a GPU platform has at least 1")
        for name in ("memory_per_gpu", "shm"):
            _check_quantity(name, getattr(self, name))
        _check_scratch(self.scratch)
        if len(self.topology) > 1 or not self.topology.keys() <= {"required", "preferred"}:
            raise SpecError(f"topology={dict(self.topology)}: write {{required: LABEL}} or {{preferred: LABEL}}")

    def check_gpus(self, gpus: int) -> int:
        """
        Number of nodes for so many GPUs: up to one node any number, beyond that whole nodes.

        :raises SpecError: says what would be right.
        """
        per_node = self.gpus_per_node
        if gpus <= per_node:
            return 1
        if gpus % per_node:
            below, above = gpus // per_node * per_node, (gpus // per_node + 1) * per_node
            raise SpecError(
                f"gpus={gpus} is not a whole number of nodes: platform {self.name!r} has {per_node} GPUs per node. "
                f"Ask for gpus={below} ({below // per_node} node{'s' * (below > per_node)}) "
                f"or gpus={above} ({above // per_node} nodes)"
            )
        return gpus // per_node


def load(name: str) -> Platform:
    """
    The platform of that name.

    :raises SpecError: no such platform (lists those there are), or a file that does not read as one.
    """
    folders = [Path(p) for p in (os.environ.get(ENV_PLATFORMS),) if p] + [Path(__file__).parent]
    for folder in folders:
        path = folder / f"{name}.yaml"
        if path.is_file():
            return _read(name, path)
    known = sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})
    raise SpecError(
        f"platform {name!r} is not known; there are {', '.join(known)}. "
        f"Your own go as NAME.yaml into a folder named by {ENV_PLATFORMS}"
    )


def _read(name: str, path: Path) -> Platform:
    try:
        import yaml
    except ImportError as error:
        raise NotInstalledError("platforms are YAML files: pip install 'airflow-gpu-burst[airflow]'") from error
    wrong = f"platform file {path.name} does not read as a platform"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{wrong}: {error}. Compare it with the packaged b300.yaml") from error
    known = [f.name for f in fields(Platform) if f.name != "name"]
    unknown = sorted(str(key) for key in data if key not in known) if isinstance(data, dict) else ["(not a mapping)"]
    if unknown:
        raise SpecError(f"{wrong}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    if "gpus_per_node" not in data:
        raise SpecError(f"{wrong}: gpus_per_node is missing; write gpus_per_node: 8")
    # YAML's lists become tuples, and a number where text is due becomes text: `NCCL_IB_SL: 1` is what people write.
    values = {key: _plain(key, value) for key, value in data.items()}
    try:
        return Platform(name=name, **values)
    except SpecError as error:
        raise SpecError(f"{wrong}: {error}") from error


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict) and name in {"env", "nccl_env", "node_selector"}:
        return {str(k): str(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in value.items()}
    return value


_TEXTS = "a mapping of text to text"
_FIELDS: Mapping[str, str] = {
    "gpus_per_node": "a whole number",
    "cpus_per_gpu": "a whole number",
    "node_selector": _TEXTS,
    "env": _TEXTS,
    "nccl_env": _TEXTS,
    "topology": _TEXTS,
    "network_resources": "a mapping of text to whole numbers",
    "tolerations": "a list of mappings",
    "networks": "a list of text",
    "capabilities": "a list of text",
    "scratch": "a mapping",
}
_ELEMENTS: Mapping[str, type[Any]] = {
    _TEXTS: str,
    "a mapping of text to whole numbers": int,
    "a list of mappings": Mapping,
    "a list of text": str,
}


def _check_type(name: str, value: Any) -> None:
    wanted = _FIELDS.get(name, "text")
    element = _ELEMENTS.get(wanted, object)
    if wanted.startswith("a mapping"):
        right = isinstance(value, Mapping) and all(isinstance(k, str) and _is(v, element) for k, v in value.items())
    elif wanted.startswith("a list"):
        right = isinstance(value, tuple) and all(_is(v, element) for v in value)
    else:
        right = _is(value, int) if wanted == "a whole number" else isinstance(value, str)
    if not right:
        raise SpecError(f"{name}={value!r}: must be {wanted}; quote what YAML takes for a number or true/false")


def _is(value: Any, kind: type[Any]) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, kind)


def _check_quantity(name: str, value: Any) -> None:
    if value and not (isinstance(value, str) and _QUANTITY.fullmatch(value)):
        raise SpecError(f"{name}={value!r}: write a whole number with a unit, e.g. 200Gi")


def _check_scratch(scratch: Mapping[str, Any]) -> None:
    if not scratch:
        return
    (kind, *more) = sorted(scratch.keys() & _SCRATCH.keys()) or [""]
    if more or set(scratch) != _SCRATCH.get(kind):
        raise SpecError(
            f"scratch={dict(scratch)}: write one of {{host_path: /mnt/nvme/gpu-burst}}, "
            "{empty_dir: {size_limit: 1Ti}}, {storage_class: NAME, size: 1Ti}"
        )
    if kind == "empty_dir":
        folder = scratch[kind]
        if not isinstance(folder, Mapping) or not folder.keys() <= {"size_limit"}:
            raise SpecError(f"scratch empty_dir={folder!r}: write {{size_limit: 1Ti}} or {{}}")
        _check_quantity("size_limit", folder.get("size_limit", ""))
    elif not isinstance(scratch[kind], str) or (kind == "host_path" and not scratch[kind].startswith("/")):
        raise SpecError(f"scratch {kind}={scratch[kind]!r}: must be text, and a host_path begins with /")
    else:
        _check_quantity("size", scratch.get("size", ""))
