"""A lab from outside: taken down, taken over from a dead process, lent to one command, described to a person."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import machine
import services
from build import build
from cluster import CLUSTERS, NAMESPACE, PARTS, Cluster
from controllers import QUEUE
from core import HERE, MARK, Lab, LabError, servers

STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def down(lab: Lab) -> None:
    """
    Stop everything and remove it: controllers and services first, newest first; then each cluster with its pods.

    Safe to repeat, and after a crash of whatever was to do it. With LAB_LOGS set, the servers' logs are kept there.
    Leaves another lab alone, whose addresses and cgroups have the same names.
    """
    known = machine.record()
    if known and known.dir != lab.dir:
        return
    in_clusters = {f"{cluster}/{part}" for cluster in CLUSTERS for part in PARTS}
    for server in reversed(servers(lab)):
        if server.name not in in_clusters:
            server.stop()
    for name in CLUSTERS:
        Cluster(lab, name).down()
    machine.kill_processes(str(lab.dir))  # who started it was killed before it could write down the pid
    services.address("del")
    if (logs := os.environ.get("LAB_LOGS")) and lab.run_dir.exists():
        shutil.copytree(lab.run_dir, logs, dirs_exist_ok=True)
    shutil.rmtree(lab.dir, ignore_errors=True)
    machine.release()


def take_over() -> None:
    """Take down a lab whose owner died without doing it."""
    known = machine.record()
    if known and known.abandoned():
        print(f"taking down the lab in {known.dir}: the process it was for is gone", flush=True)
        left = Lab(known.dir)
        machine.kill_processes(_command_mark(left))
        down(left)


def supervised(lab: Lab, command: list[str]) -> int:
    """
    Run a command with a lab of its own, named by LAB_DIR; what it needs it starts itself. Its exit code, or 1 when
    anything is left behind. The lab is down afterwards: after a failure, Ctrl-C and SIGTERM as well.
    """
    machine.preflight(lab, clusters=True)
    take_over()
    if other := machine.record():
        raise LabError(
            f"a lab is up in {other.dir}, and a machine has room for one. Use it (LAB_DIR={other.dir} pytest -m lab), "
            "or take it down first (make lab-down)"
        )
    build(lab)
    with tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # sockets: short
        own = Lab(Path(folder), lab.cache)
        machine.claim(own, owner=os.getpid())
        with _cleaned(own):
            code = _run(command, {**os.environ, "LAB_DIR": str(own.dir), MARK: _command_mark(own)})
    return code


def _command_mark(lab: Lab) -> str:
    return f"{lab.dir}/command"


@contextmanager
def _cleaned(lab: Lab) -> Iterator[None]:
    def interrupted(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, interrupted) for number in STOPPED_BY}
    try:
        yield
    finally:
        for number in before:  # a second Ctrl-C must not leave half of it
            signal.signal(number, signal.SIG_IGN)
        print("taking the lab down ...", flush=True)
        machine.kill_processes(_command_mark(lab))  # what is left of the command might go on starting servers
        with machine.exclusive(lab):
            down(lab)
        if found := machine.settled(lab):
            raise LabError("left behind:\n  " + "\n  ".join(found))
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(command: list[str], env: dict[str, str]) -> int:
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)  # pytest prints what it has
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


# --- for people ----------------------------------------------------------------------------------------------------


def guide(lab: Lab) -> str:
    """Where everything is, and the connections for the example DAGs as lines for a shell."""
    keys = services.secrets_of(lab)
    lines = [f"lab in {lab.dir}; logs in {lab.run_dir}; make lab-down takes it away", ""]
    lines += [f"  S3        {services.S3}  buckets {', '.join(services.BUCKETS)}  key {keys['s3_access_key']}"]
    lines += [f"  catalog   {services.CATALOG}  warehouse lake", f"  Keycloak  {services.KEYCLOAK}/realms/fab", ""]
    for name in CLUSTERS:
        cluster = Cluster(lab, name)
        if cluster.kubeconfig.exists():
            lines += [f"  cluster {name}: export KUBECONFIG={cluster.kubeconfig} PATH={lab.bin}:$PATH"]
    lines += ["", f"export GPU_BURST_PLATFORMS={HERE / 'platforms'}"]
    for name, value in connections(lab).items():
        lines.append(f"export AIRFLOW_CONN_{name.upper()}='{json.dumps(value)}'")
    return "\n".join(lines)


def connections(lab: Lab) -> dict[str, dict[str, Any]]:
    """The connections of the example DAGs, for this lab."""
    keys = services.secrets_of(lab)
    secret = keys["s3_secret_key"]
    lake = {
        "conn_type": "iceberg_lake",
        "host": services.CATALOG,
        "login": "airflow-gpu-burst",
        "password": keys["airflow-gpu-burst"],
        "extra": {
            "type": "rest",
            "warehouse": "lake",
            "oauth2_server_uri": services.TOKENS,
            "scope": services.SCOPE,
            "realm": services.REALM,
            "s3_endpoint": services.S3,
            "s3_region": "us-east-1",
            "s3_access_key_id": keys["s3_access_key"],
            "s3_secret_access_key": secret,
            "access_delegation": "none",
        },
    }
    store = {
        "conn_type": "object_store",
        "login": keys["s3_access_key"],
        "password": secret,
        "extra": {"uri": "s3://checkpoints/runs", "endpoint_url": services.S3, "region": "us-east-1"},
    }
    cluster = {
        "conn_type": "gpu_cluster",
        "extra": {
            "route": "direct",
            "kubeconfig_path": str(Cluster(lab, "gpu").client_kubeconfig),
            "namespace": NAMESPACE,
            "queue": QUEUE,
            "platform": "lab",
            "image": "lab.local/gpu-burst:1",
            "image_pull_policy": "Never",
            "working_dir": "/opt/dags",
        },
    }
    return {
        "iceberg_lake_default": lake,
        "object_store_default": store,
        "gpu_cluster_default": cluster,
        "gpu_cluster_lab": cluster,
    }


def pod_secret(lab: Lab) -> dict[str, Any]:
    """The Kubernetes Secret with which pods reach the store and the catalog, as the docs tell users to make it."""
    keys, lake = services.secrets_of(lab), connections(lab)["iceberg_lake_default"]
    catalog = {
        "credential": f"{lake['login']}:{lake['password']}",
        "s3.access-key-id": keys["s3_access_key"],
        "s3.secret-access-key": keys["s3_secret_key"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "gpu-burst", "namespace": NAMESPACE},
        "stringData": {
            "AWS_ACCESS_KEY_ID": keys["s3_access_key"],
            "AWS_SECRET_ACCESS_KEY": keys["s3_secret_key"],
            "GPU_BURST_CATALOG_SECRETS": json.dumps({"iceberg_lake_default": catalog}),
        },
    }
