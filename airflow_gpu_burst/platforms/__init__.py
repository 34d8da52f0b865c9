"""
GPU platforms as data: one YAML file each, here or in a folder of the user's own.

A platform says what a cluster's GPU nodes look like. Only the local route is built so far, so only what
the request is checked against is read; labels, tolerations and networks join with the routes to clusters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from airflow_gpu_burst.errors import NotInstalledError, SpecError

ENV_PLATFORMS = "GPU_BURST_PLATFORMS"
"""Folder with the user's own platform files; its names win over the packaged ones."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """
    What a GPU platform offers.

    :param gpus_per_node: GPUs of one node, the unit of placement for more than one node.
    """

    name: str
    gpus_per_node: int
    description: str = ""

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
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Platform(name=name, **data)
    except (TypeError, yaml.YAMLError) as error:
        raise SpecError(f"platform file {path.name} does not read as a platform: {error}") from error
