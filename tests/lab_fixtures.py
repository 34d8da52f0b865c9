"""
The lab for pytest: `stack` is a handle on real servers, each of them started when a test first asks for it.

LAB_DIR names a lab that is up, or is to be (`make lab-test`, `make lab-up`); without it the session has one of its own
and takes it down. Whatever uses `stack` is marked `lab`, and a failure shows the last lines of the servers' logs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_burst.store import StoreConfig

LAB = Path(__file__).parent / "lab" / "lab.py"
TIMEOUT_S = 300  # of one test: the first one waits for its servers
TAIL = 15
# Suites whose cases over real servers take minutes; over a directory and moto all of them run in `make test`.
LONG = ("test_local_runs.py", "test_pod.py", "test_store_faults.py")
QUIET = ("etcd", "scheduler", "controller-manager")  # logs that say little about a failed test
HOST = os.environ.get("LAB_SERVICES_HOST", "198.18.0.9")
NAMESPACE, QUEUE = "train", "gpu-batch"
CATALOG_CONN = "iceberg_lake_default"


@dataclass(frozen=True)
class Stack:
    """
    The servers of one lab.

    :param dir: the lab's folder.
    :param owner: pid of the process that takes the lab down; None: somebody else does.
    """

    dir: Path
    owner: int | None = None

    def lab(self, *args: str, timeout_s: float = 240) -> str:
        """Run `lab.py`; what it printed."""
        command = [sys.executable, str(LAB), "--dir", str(self.dir), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"lab.py {' '.join(args)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def up(self, *parts: str) -> None:
        """Start what does not run yet, e.g. `--s3`."""
        self.lab("up", *(["--owner", str(self.owner)] if self.owner else []), *parts)

    @cached_property
    def _s3(self) -> dict[str, str]:
        self.up("--s3")
        return self.secrets()

    @cached_property
    def _services(self) -> dict[str, str]:
        self.up("--s3", "--keycloak", "--catalog")
        return self.secrets()

    def secrets(self) -> dict[str, str]:
        """S3 keys and client secrets, by name."""
        return dict(json.loads((self.dir / "secrets.json").read_text()))

    def store(self, prefix: str = "") -> StoreConfig:
        """A place in the bucket `checkpoints`: below `prefix`, or one that nobody has used."""
        keys = self._s3
        return StoreConfig(
            uri=f"s3://checkpoints/{prefix or uuid.uuid4().hex}",
            endpoint_url=f"http://{HOST}:9000",
            region="us-east-1",
            access_key_id=keys["s3_access_key"],
            secret_access_key=keys["s3_secret_key"],
        )

    def catalog(self, warehouse: str = "", client: str = "airflow-gpu-burst") -> dict[str, str]:
        """
        Properties of the REST catalog, secrets included.

        :param warehouse: empty: a new, empty one.
        :param client: OAuth2 client; tokens of `short-lived` live for 2 s, others for a minute.
        """
        keys = self._services
        return {
            "type": "rest",
            "uri": f"http://{HOST}:9001",
            "warehouse": warehouse or f"t-{uuid.uuid4().hex}",
            "credential": f"{client}:{keys[client]}",
            "oauth2-server-uri": f"http://{HOST}:9002/realms/fab/protocol/openid-connect/token",
            "scope": "lake",
            "header.Polaris-Realm": "FAB",
            "header.X-Iceberg-Access-Delegation": "",
            "s3.endpoint": f"http://{HOST}:9000",
            "s3.region": "us-east-1",
            "s3.access-key-id": keys["s3_access_key"],
            "s3.secret-access-key": keys["s3_secret_key"],
        }

    def catalog_requests(self) -> dict[str, int]:
        """How many requests the catalog has answered, by method and status, e.g. `GET 401`."""
        with urllib.request.urlopen(f"http://{HOST}:9001/lab/requests", timeout=10) as answer:
            return dict(json.load(answer))

    def connections(self) -> dict[str, dict[str, Any]]:
        """Airflow connections by id, as JSON: what a user of the lab would set."""
        _ = self._services
        lines = self.lab("guide").splitlines()
        found = (line.removeprefix("export AIRFLOW_CONN_").partition("=") for line in lines if "AIRFLOW_CONN_" in line)
        return {name.lower(): json.loads(value.strip("'")) for name, _, value in found}

    @cached_property
    def gpu(self) -> GpuCluster:
        """The cluster `gpu` with Kueue, JobSet, and the Secret that pods reach store and catalog with."""
        self.up("--clusters=gpu", "--kueue", "--jobset", "--s3", "--keycloak", "--catalog")
        return GpuCluster(self, "gpu")

    def tails(self) -> Iterator[tuple[str, str]]:
        """Name and last lines of each server's log."""
        for log in sorted((self.dir / "run").rglob("*.log")):
            if log.stem not in QUIET:
                lines = log.read_text(errors="replace").splitlines()[-TAIL:]
                yield str(log.relative_to(self.dir / "run")), "\n".join(line[:300] for line in lines)


@dataclass(frozen=True)
class GpuCluster:
    """One cluster of the lab: one node with 8 simulated GPUs, namespace `train`, LocalQueue `gpu-batch`."""

    stack: Stack
    name: str

    @property
    def dir(self) -> Path:
        return self.stack.dir / "clusters" / self.name

    @property
    def node(self) -> str:
        return f"{self.name}-node"

    @property
    def kubeconfig(self) -> Path:
        """Of the account in deploy/rbac, which the package is tested with."""
        return self.dir / "kubeconfig-airflow-gpu-burst"

    @property
    def admin(self) -> Path:
        return self.dir / "kubeconfig"

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True, admin: bool = True) -> str:
        """What kubectl prints, in the namespace `train` unless told otherwise."""
        config = self.admin if admin else self.kubeconfig
        program = str(_cache() / "bin" / "kubectl")
        command = [program, "--kubeconfig", str(config), "--cache-dir", str(self.stack.dir / "tmp" / "kubectl")]
        place = [] if "-n" in args or "-A" in args else ["-n", NAMESPACE]
        done = subprocess.run(
            [*command, *place, *args], input=stdin, capture_output=True, text=True, timeout=120, check=False
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def get(self, *args: str) -> Any:
        """`kubectl get` as data; None when it is not there."""
        text = self.kubectl("get", *args, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def apply(self, manifest: Mapping[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def image(self, *names: str) -> None:
        """Build images of the lab from the working tree and load them, e.g. `gpu-burst`."""
        self.stack.lab("image", *names)

    def stop(self, part: str) -> None:
        """SIGKILL to `apiserver`, `kubelet`, `containerd`, ... ; pods go on."""
        self.stack.lab("stop", self.name, part)

    def start(self, part: str) -> None:
        """Bring it back, and wait until it works. After a kubelet's start the GPUs are there again."""
        self.stack.lab("start", self.name, part)

    @contextmanager
    def without(self, part: str) -> Iterator[None]:
        """A block in which a part is gone."""
        self.stop(part)
        try:
            yield
        finally:
            self.start(part)

    @contextmanager
    def drained(self, grace_s: int = 5) -> Iterator[None]:
        """A block in which the node is drained and takes no pods."""
        options = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--grace-period={grace_s}"]
        self.kubectl("drain", self.node, *options, "--timeout=60s")
        try:
            yield
        finally:
            self.kubectl("uncordon", self.node)

    def clear(self) -> None:
        """Delete all jobs of the namespace, with their pods."""
        self.kubectl("delete", "jobs,jobsets", "--all", "--cascade=foreground", "--timeout=60s", check=False)
        self.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--timeout=60s", check=False)


def _cache() -> Path:
    """As core.default_cache has it; this program has no import path to the lab's modules."""
    return Path(os.environ.get("LAB_CACHE") or "/var/cache/gpu-burst-lab")


# --- pytest --------------------------------------------------------------------------------------------------------

_stacks: list[Stack] = []


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The lab. Costs nothing before a test asks it for a server."""
    given = os.environ.get("LAB_DIR")
    folder = given or tempfile.mkdtemp(prefix="lab-", dir="/tmp")  # short: unix sockets lie in it
    found = Stack(Path(folder), owner=None if given else os.getpid())
    _stacks.append(found)
    yield found
    if not given:
        found.lab("down")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` looks: what needs the lab is marked so, and has the time to start it."""
    for item in items:
        if "stack" in getattr(item, "fixturenames", ()):
            item.add_marker("lab")
        if item.get_closest_marker("lab") and item.path.name in LONG:
            item.add_marker("lab_full")
        if item.get_closest_marker("lab") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The servers' last lines, with each failure."""
    report = yield
    if report.failed and item.get_closest_marker("lab"):
        report.sections += [(f"lab: {name}", text) for stack in _stacks for name, text in stack.tails()]
    return report
