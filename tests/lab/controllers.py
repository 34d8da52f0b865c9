"""Kueue and the job controllers, run as host processes against one cluster.

Manifests come from the Go modules the binaries were built from, so versions cannot drift apart. Webhooks are turned
into URL form and served on the cluster's own loopback address with the cluster's own certificate.
"""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import kube
import yaml
from build import manifests
from cluster import GPUS, NAMESPACE, Cluster
from core import HERE, LabError, Server

MANAGER = "compute"
QUEUE = "gpu-batch"
FRAMEWORKS = [
    "batch/job",
    "jobset.x-k8s.io/jobset",
    "trainer.kubeflow.org/trainjob",
    "ray.io/rayjob",
    "ray.io/raycluster",
]
SPARK_FRAMEWORK = "sparkoperator.k8s.io/sparkapplication"
# Kueue reads its metrics certificate from this fixed place when it does not manage certificates itself.
KUEUE_METRICS_CERTS = Path("/etc/kueue/metrics/certs")
PORTS = {
    "kueue": (9443, 8081),
    "jobset": (9444, 8082),
    "trainer": (9445, 8083),
    "kuberay": (9446, 8084),
    "spark-operator": (9447, 8085),
}


def _crds(cluster: Cluster, name: str, folder: str = "crd/bases") -> list[kube.Manifest]:
    found = (manifests(cluster.lab, name) / folder).glob("*.yaml")
    return kube.load(*sorted(p for p in found if p.name != "kustomization.yaml"))


def _webhooks(cluster: Cluster, name: str) -> list[kube.Manifest]:
    return kube.load(manifests(cluster.lab, name) / "webhook" / "manifests.yaml")


def _certs(cluster: Cluster, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tls.crt", "tls.key"):
        shutil.copy(cluster.pki / name, folder / name)
    return folder


def _url(cluster: Cluster, name: str) -> str:
    return f"https://{cluster.local}:{PORTS[name][0]}"


def _health(cluster: Cluster, name: str) -> str:
    return f"{cluster.local}:{PORTS[name][1]}"


def _start(cluster: Cluster, name: str, *args: str, env: dict[str, str] | None = None) -> Server:
    """Start a controller and wait for its readiness probe. Its TMPDIR holds the default webhook certificates."""
    tmp = cluster.dir / "tmp" / name
    _certs(cluster, tmp / "k8s-webhook-server" / "serving-certs")
    server = cluster.process(name)
    server.start(
        cluster.lab.binary(name),
        *args,
        env={"KUBECONFIG": str(cluster.kubeconfig), "TMPDIR": str(tmp), **(env or {})},
        cwd=cluster.dir,
    )
    server.ready(lambda: urllib.request.urlopen(f"http://{_health(cluster, name)}/readyz", timeout=2).status == 200)
    return server


def _config(cluster: Cluster, name: str, content: kube.Manifest) -> str:
    path = cluster.dir / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                **content,
                "health": {"healthProbeBindAddress": _health(cluster, name)},
                "metrics": {"bindAddress": "0", **content.get("metrics", {})},
                "webhook": {"host": cluster.local, "port": PORTS[name][0], **content.get("webhook", {})},
                "leaderElection": {"leaderElect": False, **content.get("leaderElection", {})},
            }
        )
    )
    return str(path)


def jobset(cluster: Cluster) -> None:
    cluster.kubectl.apply_crds(_crds(cluster, "jobset"))
    if cluster.name == MANAGER:
        return
    config = _config(
        cluster,
        "jobset",
        {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "internalCertManagement": {"enable": False},
        },
    )
    _start(cluster, "jobset", f"--config={config}")
    hooks = _webhooks(cluster, "jobset")
    for hook in (h for doc in hooks for h in doc["webhooks"] if "pod" in h["name"]):
        hook["objectSelector"] = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}
    cluster.kubectl.apply(kube.webhooks_by_url(hooks, _url(cluster, "jobset"), cluster.pki / "ca.crt", "jobset"))


def trainer(cluster: Cluster) -> None:
    cluster.kubectl.apply_crds(_crds(cluster, "trainer", "crds"))
    if cluster.name != MANAGER:
        config = _config(
            cluster,
            "trainer",
            {
                "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
                "kind": "Configuration",
                "certManagement": {"enable": False},
            },
        )
        _start(cluster, "trainer", f"--config={config}")
        hooks = _webhooks(cluster, "trainer")
        cluster.kubectl.apply(kube.webhooks_by_url(hooks, _url(cluster, "trainer"), cluster.pki / "ca.crt", "trainer"))
    cluster.kubectl.apply(kube.load(HERE / "manifests" / "training-runtime.yaml"))


def kuberay(cluster: Cluster) -> None:
    cluster.kubectl.apply_crds(_crds(cluster, "kuberay"))
    if cluster.name == MANAGER:
        return
    _start(
        cluster,
        "kuberay",
        "--metrics-addr=0",
        f"--health-probe-bind-address={_health(cluster, 'kuberay')}",
        "--use-kubernetes-proxy",
        "--enable-leader-election=false",
        env={"ENABLE_WEBHOOKS": "false", "ENABLE_PROBES_INJECTION": "false"},
    )  # the probes call GNU wget


def spark_operator(cluster: Cluster) -> None:
    """Only on the GPU clusters: a SparkApplication is sent there directly, MultiKueue is not involved."""
    if cluster.name == MANAGER:
        return
    cluster.kubectl.apply_crds(_crds(cluster, "spark-operator"))
    home = cluster.lab.cache / "pyspark" / "pyspark"
    if not home.exists():
        raise LabError("spark-operator calls spark-submit: run `lab.py image spark` first")
    cluster.kubectl.apply(kube.load(HERE / "manifests" / "spark-account.yaml"))
    _start(
        cluster,
        "spark-operator",
        "controller",
        "start",
        f"--namespaces={NAMESPACE}",
        "--enable-ui-service=false",
        f"--health-probe-bind-address={_health(cluster, 'spark-operator')}",
        env={  # spark-submit finds the API server the way in-cluster clients do
            "SPARK_HOME": str(home),
            "KUBERNETES_SERVICE_HOST": f"{cluster.service_net}.1",
            "KUBERNETES_SERVICE_PORT": "443",
        },
    )


OPERATORS: dict[str, Callable[[Cluster], None]] = {
    "jobset": jobset,
    "trainer": trainer,
    "kuberay": kuberay,
    "spark-operator": spark_operator,
}


def kueue(cluster: Cluster) -> None:
    ca, url = cluster.pki / "ca.crt", _url(cluster, "kueue")
    crds = _crds(cluster, "kueue")
    for crd in crds:  # the same CRDs that Kueue's own kustomization gives a conversion webhook
        if crd["spec"]["names"]["plural"] in (
            "localqueues",
            "clusterqueues",
            "cohorts",
            "workloads",
            "multikueueclusters",
        ):
            crd["spec"]["conversion"] = {
                "strategy": "Webhook",
                "webhook": {
                    "conversionReviewVersions": ["v1"],
                    "clientConfig": {"url": f"{url}/convert", "caBundle": kube.b64(ca)},
                },
            }
    cluster.kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}}])
    cluster.kubectl.apply_crds(crds)
    if not KUEUE_METRICS_CERTS.exists():
        _certs(cluster, KUEUE_METRICS_CERTS)
    have = cluster.kubectl("get", "crd", "-o", "name")
    frameworks = [
        f for f in [*FRAMEWORKS, SPARK_FRAMEWORK] if f == "batch/job" or f"{f.split('/')[1]}s.{f.split('/')[0]}" in have
    ]
    config = _config(
        cluster,
        "kueue",
        {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "internalCertManagement": {"enable": False},
            "clientConnection": {"qps": 50, "burst": 100},
            "multiKueue": {"gcInterval": "10s", "workerLostTimeout": "60s"},
            "webhook": {"certDir": str(cluster.pki)},
            "integrations": {"frameworks": frameworks},
        },
    )
    gates = ["VisibilityOnDemand=false"]  # its API server wants certificates of its own
    if SPARK_FRAMEWORK in frameworks:
        gates.append("SparkApplicationIntegration=true")  # alpha in Kueue 0.17
    _start(cluster, "kueue", f"--config={config}", "--zap-log-level=2", f"--feature-gates={','.join(gates)}")
    hooks = _webhooks(cluster, "kueue")
    for doc in hooks:  # only the enabled integrations; pods, deployments and statefulsets stay untouched
        wanted = {"clusterqueue", "cohort", "resourceflavor", "workload", *(f.split("/")[1] for f in frameworks)}
        doc["webhooks"] = [h for h in doc["webhooks"] if h["name"].split(".")[0][1:] in wanted]
    cluster.kubectl.apply(kube.webhooks_by_url(hooks, url, ca, "kueue"))


def queues(clusters: Sequence[Cluster]) -> None:
    """Quota on every cluster; on the manager, last, also the MultiKueue objects that point at the workers."""
    workers = [c for c in clusters if c.name != MANAGER]
    for cluster in sorted(clusters, key=lambda c: c.name == MANAGER):
        manager = cluster.name == MANAGER and workers
        total = sum(GPUS.get(w.name, 0) for w in workers) if manager else GPUS.get(cluster.name, 0)
        docs = kube.load(HERE / "manifests" / "queues.yaml")
        for doc in docs:
            if doc["kind"] == "ClusterQueue":
                doc["spec"]["resourceGroups"][0]["flavors"][0]["resources"].append(
                    {"name": "nvidia.com/gpu", "nominalQuota": total}
                )
                if manager:
                    doc["spec"]["admissionChecksStrategy"] = {"admissionChecks": [{"name": "multikueue"}]}
        cluster.kubectl.apply(docs + _multikueue(workers) if manager else docs)
        if manager:
            for worker in workers:
                _connected(cluster, worker.name)


def _connected(manager: Cluster, worker: str) -> None:
    """A worker that lacks the CRD of any framework enabled on the manager never connects: say so instead of hanging."""

    def condition(field: str) -> str:
        return manager.kubectl(
            "get", "multikueuecluster", worker, "-o", f'jsonpath={{.status.conditions[?(@.type=="Active")].{field}}}'
        )

    try:
        kube.wait(lambda: condition("status") == "True", f"MultiKueue connection to {worker}", 45)
    except LabError as error:
        raise LabError(f"{error}: {condition('message')}") from None


def _multikueue(workers: Sequence[Cluster]) -> list[kube.Manifest]:
    docs: list[kube.Manifest] = []
    for worker in workers:
        secret = f"{worker.name}-kubeconfig"
        docs += [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": secret, "namespace": "kueue-system"},
                "stringData": {"kubeconfig": worker.kubeconfig.read_text()},
            },
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "MultiKueueCluster",
                "metadata": {"name": worker.name},
                "spec": {"clusterSource": {"kubeConfig": {"locationType": "Secret", "location": secret}}},
            },
        ]
    return docs + [
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "MultiKueueConfig",
            "metadata": {"name": QUEUE},
            "spec": {"clusters": [w.name for w in workers]},
        },
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "AdmissionCheck",
            "metadata": {"name": "multikueue"},
            "spec": {
                "controllerName": "kueue.x-k8s.io/multikueue",
                "parameters": {"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": QUEUE},
            },
        },
    ]
