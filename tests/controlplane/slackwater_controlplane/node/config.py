"""The configuration files of a node's programs: containerd, its network plug-ins, and the kubelet.

Owns the settings and their reasons; node.py writes and starts.  Two settings decide whether it works at all without
systemd and inside a container of somebody else: cgroups by file (`cgroupfs`, no tree per quality of service), and a
runtime that does not ask for better scores against the out-of-memory killer than it has itself.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from slackwater_controlplane.certs import Pair
from slackwater_controlplane.oci import BUSYBOX_IMAGE

CLUSTER_DNS = "10.96.0.10"
CLUSTER_DOMAIN = "cluster.local"
KUBELET_ROOT = "/var/lib/kubelet"
KUBELET_PORT = 10250
HEALTH_PORT = 10248
# What a kubelet wants of the kernel, and would set for the whole machine.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
_UNUSED_PLUGINS = (
    "io.containerd.internal.v1.opt",
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
)


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a node's things lie below its folder, as the machine sees it."""

    folder: Path

    @property
    def containerd_socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def kubelet(self) -> Path:
        """What the node's processes see as /var/lib/kubelet."""
        return self.folder / "kubelet"

    @property
    def device_plugins(self) -> Path:
        return self.kubelet / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        return self.kubelet / "pod-resources" / "kubelet.sock"

    @property
    def cni(self) -> Path:
        return self.folder / "cni"


def snapshotter(folder: Path, mounts: str) -> str:
    """How containerd stacks layers below a folder.  mounts: the text of /proc/mounts.

    An overlay cannot lie on an overlay, which is what a container of somebody else has for its root; there layers are
    copied instead.
    """
    kinds = {}
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        kinds[point] = kind  # the last one hides the others
    place = next(str(parent) for parent in (folder, *folder.parents) if str(parent) in kinds)
    return "native" if kinds[place] == "overlay" else "overlayfs"


def containerd(paths: Paths, *, runc: Path, cni_plugins: Path, snapshotter: str = "overlayfs") -> str:
    """The text of containerd's config.toml."""
    runtime = 'plugins."io.containerd.cri.v1.runtime"'
    return f"""\
version = 3
root = "{paths.folder}/containerd"
state = "/run/containerd"
disabled_plugins = {json.dumps(_UNUSED_PLUGINS)}

[grpc]
address = "{paths.containerd_socket}"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "{snapshotter}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{BUSYBOX_IMAGE}"

[{runtime}]
restrict_oom_score_adj = true

[{runtime}.containerd]
default_runtime_name = "runc"

[{runtime}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{runtime}.containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false

[{runtime}.cni]
bin_dirs = ["{cni_plugins}"]
conf_dir = "{paths.cni}"
"""


def network(pod_range: str) -> str:
    """A pod network of point-to-point links: every pod's address is routed to its own device."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        # Gone with the node's other state, so that a new node of this name finds all addresses free.
        "dataDir": "/run/cni-addresses",
    }
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]})


def kubelet(paths: Paths, *, address: str, client_ca: Path, serving: Pair) -> str:
    """The text of the kubelet's KubeletConfiguration."""
    full = dict.fromkeys(
        ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"), "0%"
    )
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address,
            "port": KUBELET_PORT,
            "tlsCertFile": str(serving.cert),
            "tlsPrivateKeyFile": str(serving.key),
            "healthzBindAddress": address,
            "healthzPort": HEALTH_PORT,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(client_ca)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            # A full disk of the machine is no reason to evict pods of a test.
            "evictionHard": full,
            "imageGCHighThresholdPercent": 100,
            "containerRuntimeEndpoint": f"unix://{paths.containerd_socket}",
            "podLogsDir": f"{paths.folder}/pod-logs",
            "volumePluginDir": f"{paths.folder}/volume-plugins",
            "resolvConf": "/dev/null",
            "clusterDNS": [CLUSTER_DNS],
            "clusterDomain": CLUSTER_DOMAIN,
            # A device that fails is told at once; the default looks every 10 s.
            "nodeStatusUpdateFrequency": "1s",
            "nodeStatusReportFrequency": "5m",
            "registerNode": True,
            "maxPods": 200,
        },
        sort_keys=False,
    )
