"""
`lab.py build`: everything that needs a network. Debian packages, servers in Go built from pinned modules, the manifests
that belong to them, and servers in Java. Kept by version in the cache, so that `up` needs neither Go nor a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

from core import HERE, Lab, LabError, sh
from images import fat_layers
from services import MAVEN, keycloak_built, maven

DEBIAN = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "openssl": "openssl",
    "javac": "openjdk-17-jdk-headless",
    "mvn": "maven",
}

# module folder under go/ -> {binary: package}. Few modules, so that compiled packages are shared.
GO = {
    "kubernetes": {
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    },
    "kueue": {
        "kueue": "sigs.k8s.io/kueue/cmd/kueue",
        "trainer": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",
    },
    "operators": {  # these still use controller-runtime 0.22, Kueue and Trainer 0.23
        "jobset": "sigs.k8s.io/jobset",
        "kuberay": "github.com/ray-project/kuberay/ray-operator",
        "spark-operator": "github.com/kubeflow/spark-operator/v2/cmd/operator",
        "coredns": "lab/operators/coredns",
    },
    "s3": {"versitygw": "github.com/versity/versitygw/cmd/versitygw"},
}
LATER = ("trainer", "kuberay", "spark-operator")  # no test needs them yet: `build --all`

# controller -> (module, folder of it with CRDs and webhooks)
MANIFESTS = {
    "kueue": ("sigs.k8s.io/kueue", "config/components"),
    "jobset": ("sigs.k8s.io/jobset", "config/components"),
    "trainer": ("github.com/kubeflow/trainer/v2", "manifests/base"),
    "kuberay": ("github.com/ray-project/kuberay/ray-operator", "config"),
    "spark-operator": ("github.com/kubeflow/spark-operator/v2", "config"),
}
COLD_GIB = 12  # Go caches of a cold build, its binaries and images


def _module(name: str) -> Path:
    """The folder under go/ that pins and builds a binary."""
    return HERE / "go" / next(folder for folder, packages in GO.items() if name in packages)


def _kept(lab: Lab, name: str) -> Path:
    return lab.cache / "manifests" / f"{name}-{hashlib.sha256(_stamp(_module(name)).encode()).hexdigest()[:12]}"


def manifests(lab: Lab, name: str) -> Path:
    """CRDs and webhooks of a controller, of the version that was built."""
    folder = _kept(lab, name)
    if not folder.exists():
        raise LabError(f"the manifests of {name} are not in the cache: run `make lab-build` (looked in {folder})")
    return folder


def _keep_manifests(lab: Lab, name: str) -> None:
    folder = _kept(lab, name)
    if folder.exists():
        return
    module, inner = MANIFESTS[name]
    source = json.loads(sh("go", "mod", "download", "-json", module, cwd=_module(name), env=_go_env(lab)))["Dir"]
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(Path(source) / inner, partial, copy_function=shutil.copyfile)
    sh("chmod", "-R", "u+w", partial)
    partial.rename(folder)


def _go_env(lab: Lab) -> dict[str, str]:
    """The caches of Go beside the binaries: without a HOME there are none, and CI jobs often have one each."""
    caches = {"GOCACHE": str(lab.cache / "go" / "build"), "GOMODCACHE": str(lab.cache / "go" / "mod")}
    return {**os.environ, **caches, "CGO_ENABLED": "0"}


def _stamp(folder: Path) -> str:
    """What a build depends on: the pinned versions, the flags and our own main packages."""
    return "\n".join(
        [_ldflags(folder), *(p.read_text() for p in sorted(folder.rglob("*")) if p.suffix in (".mod", ".sum", ".go"))]
    )


def _ldflags(folder: Path) -> str:
    """Stripped; Kubernetes also gets its version, without which clients such as Kueue refuse the API server."""
    pinned = re.search(r"k8s.io/kubernetes v((\d+)\.(\d+)\S*)", (folder / "go.mod").read_text())
    if not pinned:
        return "-s -w"
    values = {"gitVersion": f"v{pinned[1]}", "gitMajor": pinned[2], "gitMinor": pinned[3]}
    return " ".join(
        [
            "-s -w",
            *(
                f"-X {package}.{k}={v}"
                for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
                for k, v in values.items()
            ),
        ]
    )


def debian_packages() -> None:
    missing = [package for program, package in DEBIAN.items() if not shutil.which(program)]
    if missing:
        if os.geteuid():
            raise LabError(f"not installed: {', '.join(missing)}. As root: apt-get install {' '.join(missing)}")
        print("apt-get install", *missing, flush=True)
        sh(
            "apt-get",
            "install",
            "-y",
            "--no-install-recommends",
            *missing,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )


def go_binary(lab: Lab, name: str) -> None:
    """Build one server, unless the cache has it in this version."""
    source, kept = _module(name), lab.bin / f".{name}.stamp"
    stamp = _stamp(source)
    if (lab.bin / name).exists() and kept.exists() and kept.read_text() == stamp:
        return
    _need_go(lab)
    print(f"{name:26} building ...", flush=True)
    start = time.monotonic()
    package, flags = GO[source.name][name], f"-ldflags={_ldflags(source)}"
    partial = lab.bin / f".{name}.new"
    sh("nice", "go", "build", "-trimpath", flags, "-o", partial, package, cwd=source, env=_go_env(lab))
    partial.rename(lab.bin / name)
    kept.write_text(stamp)
    print(f"{name:26} {time.monotonic() - start:6.0f} s  {(lab.bin / name).stat().st_size >> 20} MiB", flush=True)


def _need_go(lab: Lab) -> None:
    if not shutil.which("go"):
        raise LabError("no Go toolchain on PATH: install Go 1.26 or newer from https://go.dev/dl/")
    free = shutil.disk_usage(lab.cache).free >> 30
    if free < COLD_GIB:
        raise LabError(
            f"{free} GiB are free at {lab.cache}, a build takes {COLD_GIB}: free some, or set LAB_CACHE elsewhere"
        )


def build(lab: Lab, *, everything: bool = False) -> None:
    """
    Make sure that all the lab needs is in the cache.

    :param everything: also what no test needs yet (`LATER`).
    """
    try:
        lab.bin.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(
            f"the cache {lab.cache} cannot be written ({error}): set LAB_CACHE to a folder of yours"
        ) from error
    debian_packages()
    names = [name for packages in GO.values() for name in packages if everything or name not in LATER]
    for name in names:
        go_binary(lab, name)
    for name in MANIFESTS:
        if name in names:
            _keep_manifests(lab, name)
    for artifact in MAVEN:
        maven(lab, artifact)
    keycloak_built(lab)
    fat_layers(lab)
    print("all that the lab needs is in", lab.cache, flush=True)
