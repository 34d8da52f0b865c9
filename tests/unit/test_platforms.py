"""Platform files: what is wrong in one is named, with what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst import platforms
from airflow_gpu_burst.errors import SpecError
from airflow_gpu_burst.platforms import Platform

PACKAGED = sorted(p.stem for p in Path(platforms.__file__).parent.glob("*.yaml"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(platforms.ENV_PLATFORMS, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_platforms_read(name: str) -> None:
    found = platforms.load(name)
    assert found.name == name and found.description and found.gpus_per_node == 8


def test_b300_is_the_documented_node() -> None:
    found = platforms.load("b300")
    assert found.node_selector["accelerator"] == "nvidia-b300" and found.networks == ("net1", "net2", "net3", "net4")
    assert found.cpus_per_gpu * found.gpus_per_node <= 128
    assert int(found.memory_per_gpu.removesuffix("Gi")) * 8 * 2**30 < 2 * 10**12
    tolerated = {"key": "dedicated", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}
    assert tolerated in found.tolerations


def test_a_file_of_ones_own_reads_whole(folder: Path) -> None:
    (folder / "mine.yaml").write_text(
        "gpus_per_node: 4\n"
        "gpu_resource: amd.com/gpu\n"
        "node_selector: {rack: 7, pool: gpu}\n"
        "tolerations: [{key: a, operator: Exists}]\n"
        "nccl_env: {NCCL_IB_SL: 1}\n"
        "network_resources: {rdma/ib: 2}\n"
        "capabilities: [IPC_LOCK]\n"
        "scratch: {empty_dir: {size_limit: 1Ti}}\n"
        "topology: {required: rack}\n"
        "runtime_class: nvidia\n"
    )
    assert platforms.load("mine") == Platform(
        name="mine",
        gpus_per_node=4,
        gpu_resource="amd.com/gpu",
        node_selector={"rack": "7", "pool": "gpu"},
        tolerations=({"key": "a", "operator": "Exists"},),
        nccl_env={"NCCL_IB_SL": "1"},
        network_resources={"rdma/ib": 2},
        capabilities=("IPC_LOCK",),
        scratch={"empty_dir": {"size_limit": "1Ti"}},
        topology={"required": "rack"},
        runtime_class="nvidia",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus_per_node: 8\ngpu_per_node: 8\n", "unknown gpu_per_node; known are gpus_per_node, description"),
        ("description: x\n", "gpus_per_node is missing"),
        ("- a\n", "not a mapping"),
        ("", "not a mapping"),
        ("a: [\n", "does not read as a platform"),
        ("gpus_per_node: eight\n", "must be a whole number"),
        ("gpus_per_node: true\n", "must be a whole number"),
        ("gpus_per_node: 0\n", "at least 1"),
        ("gpus_per_node: 8\ncpus_per_gpu: -1\n", "must be a whole number"),
        ("gpus_per_node: 8\nmemory_per_gpu: 200 GB\n", "e.g. 200Gi"),
        ("gpus_per_node: 8\nmemory_per_gpu: 200\n", "must be text"),
        ("gpus_per_node: 8\nnode_selector: [a]\n", "must be a mapping of text to text"),
        ("gpus_per_node: 8\nnccl_env: {NCCL_DEBUG: yes}\n", "quote what YAML takes"),
        ("gpus_per_node: 8\ntolerations: {key: a}\n", "must be a list of mappings"),
        ("gpus_per_node: 8\nnetworks: net1\n", "must be a list of text"),
        ("gpus_per_node: 8\nnetwork_resources: {rdma/ib: four}\n", "whole numbers"),
        ("gpus_per_node: 8\nscratch: {host_path: nvme}\n", "begins with /"),
        ("gpus_per_node: 8\nscratch: {storage_class: fast}\n", "storage_class: NAME, size: 1Ti"),
        ("gpus_per_node: 8\nscratch: {host_path: /a, empty_dir: {}}\n", "write one of"),
        ("gpus_per_node: 8\nscratch: {empty_dir: {size: 1Ti}}\n", "size_limit: 1Ti"),
        ("gpus_per_node: 8\nscratch: {storage_class: fast, size: big}\n", "with a unit"),
        ("gpus_per_node: 8\ntopology: {near: rack}\n", "required: LABEL"),
        ("gpus_per_node: 8\nname: other\n", "unknown name"),
    ],
)
def test_a_wrong_file_is_refused_and_named(folder: Path, text: str, says: str) -> None:
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(SpecError, match=says) as error:
        platforms.load("mine")
    assert "mine.yaml" in str(error.value)


@pytest.mark.parametrize("values", [{"networks": ["net1"]}, {"tolerations": [{}]}, {"shm": "lots"}, {"env": {"A": 1}}])
def test_a_platform_made_in_code_is_checked_as_well(values: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        Platform(name="p", gpus_per_node=8, **values)
