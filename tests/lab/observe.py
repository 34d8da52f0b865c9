#!/usr/bin/env python3
"""Print every change of a training job, its Workload and its pods, on several clusters at once.

observe.py --dir .lab compute,gpu jobs/train-1 [--for SECONDS]
"""

from __future__ import annotations

import argparse
import base64
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from machine import default_dir

GROUPS = {
    "jobs": "apis/batch/v1",
    "jobsets": "apis/jobset.x-k8s.io/v1alpha2",
    "trainjobs": "apis/trainer.kubeflow.org/v1alpha1",
    "rayjobs": "apis/ray.io/v1",
    "sparkapplications": "apis/sparkoperator.k8s.io/v1beta2",
    "workloads": "apis/kueue.x-k8s.io/v1beta2",
    "pods": "api/v1",
    "events": "api/v1",
}


class Api:
    """Read-only access with the CA and token of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self.server = cluster["server"]
        self.tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        self.headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}

    def list(self, kind: str) -> list[dict[str, Any]]:
        request = urllib.request.Request(f"{self.server}/{GROUPS[kind]}/namespaces/train/{kind}", headers=self.headers)
        try:
            with urllib.request.urlopen(request, context=self.tls, timeout=2) as answer:
                return list(json.load(answer)["items"])
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            raise


def facts(kind: str, item: dict[str, Any]) -> Iterator[str]:
    spec, status = item.get("spec", {}), item.get("status", {})
    if "suspend" in spec:
        yield f"suspend={spec['suspend']}"
    if item["metadata"].get("deletionTimestamp"):
        yield "deleting"
    for key in (
        "active",
        "ready",
        "succeeded",
        "failed",
        "terminating",
        "phase",
        "jobDeploymentStatus",
        "jobStatus",
        "clusterName",
        "restarts",
        "terminalState",
        "nominatedClusterNames",
        "applicationState",
        "jobsStatus",
        "requeueState",
    ):
        if status.get(key) not in (None, {}, []):
            yield f"{key}={json.dumps(status[key])}"
    for check in status.get("admissionChecks") or []:
        yield f"check {check['name']}={check['state']} ({check.get('message', '')[:110]})"
    for condition in status.get("conditions") or []:
        if kind != "pods":
            what = f"{condition['type']}={condition['status']}/{condition.get('reason')}"
            yield f"{what} ({condition.get('message', '')[:110]})"
    for container in status.get("containerStatuses") or []:
        yield f"container={json.dumps(container['state'])[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=default_dir())
    parser.add_argument("clusters")
    parser.add_argument(
        "targets", help="comma-separated kind/name; Workloads and pods whose names contain a name are shown too"
    )
    parser.add_argument("--for", dest="seconds", type=float, default=60)
    args = parser.parse_args()
    apis = {c: Api(args.dir / "clusters" / c / "kubeconfig") for c in args.clusters.split(",")}
    targets = [t.split("/") for t in args.targets.split(",")]
    kinds = list(dict.fromkeys([*(k for k, _ in targets), "workloads", "pods"]))
    names = [n for _, n in targets]
    seen: dict[tuple[str, str, str], set[str]] = {}
    start = time.monotonic()
    while time.monotonic() - start < args.seconds:
        for cluster, api in apis.items():
            for kind in kinds:
                try:
                    items = {
                        i["metadata"]["name"]: i
                        for i in api.list(kind)
                        if any(n in i["metadata"]["name"] for n in names)
                    }
                except OSError as error:
                    text = f"unreachable: {error}"[:100]
                    if seen.get((cluster, kind, "-")) != {text}:
                        print(f"{time.monotonic() - start:7.2f} {cluster:8} {kind} {text}", flush=True)
                        seen[cluster, kind, "-"] = {text}
                    continue
                seen.pop((cluster, kind, "-"), None)
                for key in [k for k in seen if k[:2] == (cluster, kind) and k[2] not in items]:
                    print(f"{time.monotonic() - start:7.2f} {cluster:8} {kind}/{key[2]} GONE", flush=True)
                    del seen[key]
                for name, item in items.items():
                    now = set(facts(kind, item)) or {"(no status)"}
                    before = seen.get((cluster, kind, name), set())
                    for line in [f for f in facts(kind, item) if f not in before] or (
                        ["(no status)"] if not before else []
                    ):
                        print(f"{time.monotonic() - start:7.2f} {cluster:8} {kind}/{name} {line}", flush=True)
                    seen[cluster, kind, name] = now
        time.sleep(0.2)


if __name__ == "__main__":
    main()
