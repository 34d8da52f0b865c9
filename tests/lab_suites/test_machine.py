"""The lab as a tool: one per machine, parts that are killed and come back, and an account with few rights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lab_fixtures import LAB, GpuCluster, Stack


def lab(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LAB), "--dir", str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_lab_is_refused_and_its_end_does_not_touch_the_first(stack: Stack, tmp_path: Path) -> None:
    stack.up("--s3")
    refused = lab(tmp_path / "second", "up", "--s3")
    assert refused.returncode == 1
    assert f"another lab is up in {stack.dir}" in refused.stderr
    assert "make lab-down" in refused.stderr
    assert "Traceback" not in refused.stderr
    down = lab(tmp_path / "second", "down")
    assert (down.returncode, str(stack.dir) in down.stdout) == (0, True)
    stack.store()
    assert "s3" in stack.lab("status")


def test_a_running_lab_is_not_a_clean_machine(stack: Stack) -> None:
    stack.up("--s3")
    found = lab(stack.dir, "check-clean")
    assert found.returncode == 1
    for thing in ("process ", "address 198.18.0.9", "path "):
        assert thing in found.stderr


def gpus(cluster: GpuCluster) -> str:
    return cluster.kubectl("get", "node", cluster.node, "-o", r"jsonpath={.status.allocatable.nvidia\.com/gpu}")


def test_gpus_are_there_again_after_a_kubelet_was_killed(stack: Stack) -> None:
    with stack.gpu.without("kubelet"):
        pass
    assert gpus(stack.gpu) == "8"


def test_an_api_server_that_was_killed_comes_back(stack: Stack) -> None:
    with stack.gpu.without("apiserver"):
        assert stack.gpu.kubectl("get", "nodes", check=False) == ""
    assert stack.gpu.node in stack.gpu.kubectl("get", "nodes")


def test_the_account_is_the_one_that_is_shipped(stack: Stack) -> None:
    def may(*what: str) -> str:
        return stack.gpu.kubectl("auth", "can-i", *what, admin=False, check=False).strip()

    assert may("create", "jobs.batch") == "yes"
    assert may("get", "pods", "--subresource=log") == "yes"
    assert may("get", "secrets") == "no"
    assert may("create", "pods") == "no"
    assert stack.gpu.kubectl("get", "jobs", "-n", "default", admin=False, check=False) == ""
