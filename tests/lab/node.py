"""What the servers of one node are told: pod network, containers, kubelet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from cluster import Cluster


def bridge_network(cluster: Cluster) -> str:
    """CNI: a bridge that leads nowhere."""
    ipam = {
        "type": "host-local",
        "dataDir": str(cluster.dir / "cni-ipam"),
        "ranges": [[{"subnet": f"{cluster.pod_net}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": cluster.bridge,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": ipam,
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "lab", "plugins": [bridge]})


def containerd_config(cluster: Cluster, cni: Path, plugins: Path) -> str:
    """
    Everything below the cluster's folder.

    :param cni: folder with the network's configuration.
    :param plugins: folder with the CNI programs.
    """
    return f"""version = 2
root = "{cluster.dir}/ctr-root"
state = "{cluster.dir}/ctr-state"
[grpc]
  address = "{cluster.socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "lab.local/base:1"
  stream_server_address = "{cluster.local}"
  stream_server_port = "0"
  # the VM has no CAP_SYS_RESOURCE: runc may not lower oom_score_adj
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{cni}"
    bin_dir = "{plugins}"
"""


def kubelet_config(cluster: Cluster) -> str:
    """A node that is never full and never clean: images stay, evictions only for memory."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": cluster.node_ip,
            "port": 10250,
            "healthzBindAddress": cluster.local,
            "tlsCertFile": str(cluster.pki / "tls.crt"),
            "tlsPrivateKeyFile": str(cluster.pki / "tls.key"),
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cluster.cgroup}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "makeIPTablesUtilChains": False,  # they would stay behind
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{cluster.socket}",
            "podLogsDir": str(cluster.dir / "pod-logs"),
            "volumePluginDir": str(cluster.dir / "volume-plugins"),
            "clusterDNS": [f"{cluster.service_net}.10"],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "serializeImagePulls": False,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "50Mi"},
        }
    )
