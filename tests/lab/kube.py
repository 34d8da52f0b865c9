"""Talking to one cluster with kubectl, and the certificates the cluster's servers show."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from core import Lab, LabError, sh

Manifest = dict[str, Any]


def b64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def config(name: str, server: str, ca: Path, user: str, token: str, namespace: str = "default") -> str:
    """A kubeconfig with a CA and a token: no client certificate, no skipped verification."""
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": b64(ca)}}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": user, "namespace": namespace}}],
        }
    )


@dataclass(frozen=True)
class Kubectl:
    lab: Lab
    kubeconfig: Path

    def __call__(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        options = ("--kubeconfig", self.kubeconfig, "--cache-dir", self.lab.tmp / "kubectl")
        return sh(self.lab.binary("kubectl"), *options, *args, stdin=stdin, check=check)

    def apply(self, docs: Iterable[Manifest]) -> None:
        """Server-side apply, tried again for a few seconds: a fresh webhook or CRD may not answer at once."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(docs)})
        end = time.monotonic() + 30
        while True:
            try:
                self("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
                return
            except LabError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def apply_crds(self, docs: Sequence[Manifest]) -> None:
        """Install CRDs and wait by reading each one: `kubectl wait crd --all` races with their first status."""
        self.apply(docs)
        names = {d["metadata"]["name"] for d in docs}

        def established() -> bool:
            items = json.loads(self("get", "crd", "-o", "json"))["items"]
            done = {
                i["metadata"]["name"]
                for i in items
                for c in i.get("status", {}).get("conditions") or []
                if c["type"] == "Established" and c["status"] == "True"
            }
            return names <= done

        wait(established, "CRDs established")

    def patch_status(self, kind: str, name: str, patch: Manifest) -> None:
        self("patch", kind, name, "--subresource=status", "--type=merge", "-p", json.dumps(patch))


def wait(probe: Callable[[], bool], what: str, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            if probe():
                return
        except LabError:
            pass
        time.sleep(0.2)
    raise LabError(f"gave up after {timeout:.0f} s waiting for: {what}")


def load(*paths: Path) -> list[Manifest]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # CRDs are large: the C parser is 10 times faster
    return [doc for path in paths for doc in yaml.load_all(path.read_text(), loader) if doc]


def webhooks_by_url(docs: Sequence[Manifest], url: str, ca: Path, prefix: str) -> list[Manifest]:
    """Point webhook configurations at a host process instead of an in-cluster Service."""
    for doc in docs:
        doc["metadata"]["name"] = f"{prefix}-{doc['metadata']['name']}"
        for hook in doc["webhooks"]:
            service = hook["clientConfig"].pop("service")
            hook["clientConfig"].update(url=url + service["path"], caBundle=b64(ca))
    return list(docs)


def make_ca(folder: Path, name: str, addresses: Sequence[str], names: Sequence[str]) -> None:
    """A CA and one server certificate for every server of the cluster, in `folder`."""
    if (folder / "tls.crt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    sh(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "365",
        "-keyout",
        folder / "ca.key",
        "-out",
        folder / "ca.crt",
        "-subj",
        f"/CN={name}-ca",
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
    )
    sh(
        "openssl",
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        folder / "tls.key",
        "-out",
        folder / "tls.csr",
        "-subj",
        f"/CN={name}",
    )
    san = ",".join([f"IP:{a}" for a in addresses] + [f"DNS:{n}" for n in names])
    (folder / "ext").write_text(f"subjectAltName={san}\nextendedKeyUsage=serverAuth\n")
    sh(
        "openssl",
        "x509",
        "-req",
        "-in",
        folder / "tls.csr",
        "-CA",
        folder / "ca.crt",
        "-CAkey",
        folder / "ca.key",
        "-CAcreateserial",
        "-days",
        "365",
        "-out",
        folder / "tls.crt",
        "-extfile",
        folder / "ext",
    )
    sh("openssl", "genrsa", "-out", folder / "sa.key", "2048")
