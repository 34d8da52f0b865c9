"""One real one-node Kubernetes cluster: etcd, API server, controllers, scheduler, CoreDNS, containerd and a kubelet.

Nothing leaves the machine. Each cluster owns
* 127.0.1x.1   etcd, controller-manager, scheduler, webhooks (standard ports);
* 10.11x.0.1   the `kubernetes` Service address, on the loopback interface: the API server itself listens there on 443,
               so that pods reach it without a service proxy; CoreDNS listens on 10.11x.0.10:53;
* 198.18.0.1x  the node, on the loopback interface: kubelet and pods with `hostNetwork`;
* 10.12x.0.0/24  the other pods, on a bridge that is connected to nothing else.
"""

from __future__ import annotations

import base64
import secrets
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import kube
import node
from core import HERE, Lab, LabError, Server, require, send, sh
from image import import_order
from images import base_image
from machine import CGROUP_PREFIX, CGROUPS, cgroups, mounts, processes, remove_cgroup

CLUSTERS = {"compute": 0, "gpu": 1, "gpu2": 2}
GPUS = {"gpu": 8, "gpu2": 8}
CNI_PLUGINS = Path("/usr/lib/cni")  # where Debian puts them
PARTS = ("etcd", "apiserver", "controller-manager", "scheduler", "coredns", "containerd", "kubelet")
NAMESPACE = "train"
CLIENT = "airflow-gpu-burst"
ROLE = HERE.parent.parent / "deploy" / "rbac" / "gpu-cluster.yaml"
"""The account that is shipped: what the tests may do is what a user's Airflow may."""


@dataclass(frozen=True)
class Cluster:
    lab: Lab
    name: str

    def __post_init__(self) -> None:
        if self.name not in CLUSTERS:
            raise LabError(f"no cluster named {self.name}; known: {', '.join(CLUSTERS)}")

    @property
    def index(self) -> int:
        return CLUSTERS[self.name]

    @property
    def dir(self) -> Path:
        return self.lab.dir / "clusters" / self.name

    @property
    def pki(self) -> Path:
        return self.dir / "pki"

    @property
    def local(self) -> str:
        return f"127.0.{10 + self.index}.1"

    @property
    def node_ip(self) -> str:
        return f"198.18.0.{10 + self.index}"

    @property
    def service_net(self) -> str:
        return f"10.{110 + self.index}.0"

    @property
    def pod_net(self) -> str:
        return f"10.{120 + self.index}.0"

    @property
    def bridge(self) -> str:
        return f"{CGROUP_PREFIX}{self.name}"

    @property
    def server(self) -> str:
        return f"https://{self.service_net}.1:443"

    @property
    def kubeconfig(self) -> Path:
        return self.dir / "kubeconfig"

    @property
    def client_kubeconfig(self) -> Path:
        """The least-privilege account that a client package is tested with."""
        return self.dir / f"kubeconfig-{CLIENT}"

    @property
    def kubectl(self) -> kube.Kubectl:
        return kube.Kubectl(self.lab, self.kubeconfig)

    @property
    def socket(self) -> Path:
        return self.dir / "containerd.sock"

    @property
    def cgroup(self) -> str:
        return f"{CGROUP_PREFIX}{self.name}"

    def process(self, name: str) -> Server:
        return Server(self.lab, f"{self.name}/{name}")

    def ctr(self, *args: str | Path, check: bool = True) -> str:
        return sh("ctr", "-a", self.socket, "-n", "k8s.io", *args, check=check)

    # --- up --------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        require("containerd", "ctr", "runc", "ip", "openssl", str(CNI_PLUGINS / "bridge"))
        for name in (
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kubectl",
            "coredns",
        ):
            self.lab.binary(name)
        self.dir.mkdir(parents=True, exist_ok=True)
        if len(str(self.socket)) > 90:
            raise LabError(f"{self.socket} is too long for a unix socket: use a shorter --dir")
        self._addresses("add")
        self._credentials()
        self._control_plane()
        self._node()
        self._tenants()

    def _addresses(self, verb: str) -> None:
        for address in (self.node_ip, f"{self.service_net}.1", f"{self.service_net}.10"):
            sh("ip", "address", verb, f"{address}/32", "dev", "lo", check=False)

    def _credentials(self) -> None:
        kube.make_ca(
            self.pki,
            self.name,
            [self.local, self.node_ip, f"{self.service_net}.1", "127.0.0.1"],
            [
                "localhost",
                "kubernetes",
                "kubernetes.default",
                "kubernetes.default.svc",
                "kubernetes.default.svc.cluster.local",
            ],
        )
        if not self.kubeconfig.exists():
            token = secrets.token_urlsafe(24)
            (self.pki / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
            self.kubeconfig.write_text(kube.config(self.name, self.server, self.pki / "ca.crt", "admin", token))

    def _control_plane(self) -> None:
        etcd, pki, binary = f"http://{self.local}:2379", self.pki, self.lab.binary
        peer = f"http://{self.local}:2380"
        self.process("etcd").start(
            binary("etcd"),
            "--data-dir",
            self.dir / "etcd",
            "--unsafe-no-fsync",
            "--log-level=warn",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        self.start_apiserver()
        common = [f"--kubeconfig={self.kubeconfig}", f"--bind-address={self.local}", "--leader-elect=false"]
        self.process("controller-manager").start(
            binary("kube-controller-manager"),
            *common,
            f"--root-ca-file={pki / 'ca.crt'}",
            f"--service-account-private-key-file={pki / 'sa.key'}",
            f"--cert-dir={self.dir / 'certs-kcm'}",
        )
        self.process("scheduler").start(binary("kube-scheduler"), *common, f"--cert-dir={self.dir / 'certs-scheduler'}")

    def start_apiserver(self) -> None:
        """Also used to bring the API server back after a test stopped it."""
        pki, server = self.pki, self.process("apiserver")
        server.start(
            self.lab.binary("kube-apiserver"),
            f"--etcd-servers=http://{self.local}:2379",
            f"--bind-address={self.service_net}.1",
            "--secure-port=443",
            f"--advertise-address={self.node_ip}",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={pki / 'tls.crt'}",
            f"--tls-private-key-file={pki / 'tls.key'}",
            f"--token-auth-file={pki / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--cert-dir={self.dir / 'certs-api'}",
            f"--service-account-key-file={pki / 'sa.key'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={self.service_net}.0/16",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        )
        server.ready(lambda: self.kubectl("get", "--raw=/readyz") == "ok")

    def _node(self) -> None:
        self._containerd()
        self._kubelet()
        name = f"{self.name}-node"
        kube.wait(
            lambda: (
                "True"
                in self.kubectl("get", "node", name, "-o", 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')
            ),
            f"node {name} ready",
        )
        kube.wait(
            lambda: "Successfully registered node" in self.process("kubelet").log.read_text(), f"{name} registered"
        )
        self._gpus(name)
        (self.dir / "Corefile").write_text(
            f".:53 {{\n  bind {self.service_net}.10\n  errors\n"
            f"  kubernetes cluster.local {{\n    kubeconfig {self.kubeconfig}\n    pods insecure\n  }}\n}}\n"
        )
        self.process("coredns").start(self.lab.binary("coredns"), "-conf", self.dir / "Corefile")

    def start(self, part: str) -> None:
        """Bring one part back after a test stopped it."""
        if part == "apiserver":
            self.start_apiserver()
        elif part in ("kubelet", "containerd", "coredns"):
            self._node()
        else:
            self._control_plane()

    def _gpus(self, name: str) -> None:
        """
        Simulate the devices. A kubelet that starts sets the number to 0 once, with or soon after its registration:
        hence until the number has stood for 2 s.
        """
        amount = str(GPUS.get(self.name, 0))
        if amount == "0":
            return
        path = "jsonpath={.status.allocatable.nvidia\\.com/gpu}"
        since = time.monotonic()
        while time.monotonic() < since + 2:
            if self.kubectl("get", "node", name, "-o", path) != amount:
                since = time.monotonic()
                both = {kind: {"nvidia.com/gpu": amount} for kind in ("capacity", "allocatable")}
                self.kubectl.patch_status("node", name, {"status": both})
            time.sleep(0.2)

    def _containerd(self) -> None:
        cni, config = self.dir / "cni", self.dir / "containerd.toml"
        cni.mkdir(exist_ok=True)
        (cni / "10-bridge.conflist").write_text(node.bridge_network(self))
        config.write_text(node.containerd_config(self, cni, CNI_PLUGINS))
        containerd = self.process("containerd")
        containerd.start("containerd", "-c", config, cwd=self.dir)
        containerd.ready(lambda: bool(self.ctr("version")))
        self.load_image(base_image(self.lab))

    def load_image(self, tarball: Path) -> None:
        """Import an image and what it stands on, unless they are there. New pods get it under the same name."""
        for ref, digest, path in import_order(tarball):
            if digest not in self.ctr("images", "list", f"name=={ref}"):
                self.ctr("images", "import", path)

    def _kubelet(self) -> None:
        for controller in self._cgroups():
            controller.mkdir(parents=True, exist_ok=True)
            if controller.parent.name == "cpuset":
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (controller / name).write_text((controller.parent / name).read_text())
        config = self.dir / "kubelet.yaml"
        config.write_text(node.kubelet_config(self))
        self.process("kubelet").start(
            self.lab.binary("kubelet"),
            f"--config={config}",
            f"--kubeconfig={self.kubeconfig}",
            f"--root-dir={self.dir / 'kubelet'}",
            f"--cert-dir={self.dir / 'certs-kubelet'}",
            f"--hostname-override={self.name}-node",
            f"--node-ip={self.node_ip}",
            cwd=self.dir,
        )

    def _tenants(self) -> None:
        """The namespace of the training jobs, and the account a client is tested with."""
        namespace, token_secret = kube.load(HERE / "manifests" / "tenants.yaml")
        self.kubectl.apply([namespace])
        self.kubectl.apply(kube.load(ROLE))
        self.kubectl.apply([token_secret])  # last: without its account it is collected at once
        secret = f"{CLIENT}-token"

        def token() -> str:
            return self.kubectl("-n", NAMESPACE, "get", "secret", secret, "-o", "jsonpath={.data.token}", check=False)

        kube.wait(lambda: bool(token()), f"token of {CLIENT} in {self.name}")
        plain = base64.b64decode(token()).decode()
        self.client_kubeconfig.write_text(
            kube.config(self.name, self.server, self.pki / "ca.crt", CLIENT, plain, NAMESPACE)
        )

    # --- down ------------------------------------------------------------------------------------------------------

    def down(self) -> None:
        """Stop pods, then servers, then undo mounts, cgroups and addresses. Safe to repeat, safe after a crash."""
        for name in ("kubelet", "scheduler", "controller-manager", "coredns"):
            self.process(name).stop()
        self._kill_containers()
        for name in ("containerd", "apiserver", "etcd"):
            self.process(name).stop()
        self._remove_cgroups()
        for target in mounts(self.dir):
            sh("umount", "-l", target, check=False)
        if left := mounts(self.dir):  # deleting on would reach what is mounted there, host folders included
            raise LabError(f"cannot unmount {', '.join(left)}: see what uses it (`fuser -vm {left[0]}`), then again")
        sh("ip", "link", "delete", self.bridge, check=False)
        self._addresses("del")
        shutil.rmtree(self.dir, ignore_errors=True)

    def _kill_containers(self) -> None:
        if self.process("containerd").pid():
            for task in self.ctr("tasks", "list", "-q", check=False).split():
                self.ctr("tasks", "kill", "-s", "SIGKILL", task, check=False)
                self.ctr("tasks", "delete", "--force", task, check=False)
        for pid, line in processes(str(self.lab.dir)):  # shims outlive their containerd, on purpose
            if "containerd-shim" in line and str(self.socket) in line:
                send(pid, signal.SIGKILL)

    def _cgroups(self) -> list[Path]:
        if (CGROUPS / "cgroup.controllers").exists():
            return [CGROUPS / self.cgroup]
        return [
            CGROUPS / c / self.cgroup
            for c in ("cpu", "cpuacct", "cpuset", "memory", "pids", "freezer", "blkio", "devices", "systemd")
            if (CGROUPS / c).exists()
        ]

    def _remove_cgroups(self) -> None:
        """Pods without containerd die here: nothing but their cgroup still knows them."""
        for top in cgroups(self.cgroup):
            inner = sorted((p for p in top.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts))
            for folder in (*inner, top):
                remove_cgroup(folder)
