"""What breaks on real nodes: a kubelet, a GPU, a whole cluster's owner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slackwater_controlplane import leftovers, netns
from slackwater_controlplane.client import Object
from slackwater_controlplane.node.cluster import NodeCluster, container_state
from slackwater_controlplane.node.pods import pod

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(240)]


def runs(found: Object) -> bool:
    return "running" in container_state(found)


def until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_containers_and_their_gpus_outlive_a_killed_kubelet(node_cluster: NodeCluster, node_namespace: str) -> None:
    node = node_cluster.nodes["h200-0"]
    admin = node_cluster.admin
    admin.create(pod("survivor", namespace=node_namespace, gpus=1, node="h200-0"))
    before = container_state(admin.wait_for("pods", "survivor", runs, node_namespace))
    held = node.devices.holders()

    node.kill_kubelet()
    admin.create(pod("next", namespace=node_namespace, gpus=1, node="h200-0"))
    time.sleep(1.0)
    assert not runs(admin.get("pods", "next", node_namespace))

    node.restart_kubelet()
    admin.wait_for("pods", "next", runs, node_namespace, timeout_s=60)

    node_cluster.wait_ready("h200-0")
    assert container_state(admin.get("pods", "survivor", node_namespace)) == before
    assert held.items() <= node.devices.holders().items()
    assert len(node.devices.holders()) == 2


def test_an_unhealthy_gpu_leaves_the_allocatable_ones(node_cluster: NodeCluster) -> None:
    node = node_cluster.nodes["rtx5090-0"]
    admin = node_cluster.admin

    node.devices.mark("GPU-rtx5090-0-3", healthy=False)
    found = admin.wait_for("nodes", "rtx5090-0", lambda one: one["status"]["allocatable"]["nvidia.com/gpu"] == "7")
    assert found["status"]["capacity"]["nvidia.com/gpu"] == "8"

    node.devices.mark("GPU-rtx5090-0-3", healthy=True)
    admin.wait_for("nodes", "rtx5090-0", lambda one: one["status"]["allocatable"]["nvidia.com/gpu"] == "8")


def test_a_node_that_lost_power_comes_back_without_its_pods_and_with_free_gpus(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    node = node_cluster.nodes["rtx5090-0"]
    admin = node_cluster.admin
    admin.create(pod("before", namespace=node_namespace, gpus=8, node="rtx5090-0"))
    admin.wait_for("pods", "before", runs, node_namespace)

    processes = node.processes()
    node.stop()
    # kubelet, containerd, plug-in, a shim, the pod's two containers, and the one that started them.
    assert len(processes) >= 7
    assert not [process for process in processes if process.is_alive]

    node.start()
    found = admin.wait_for("pods", "before", lambda one: one["status"]["phase"] == "Failed", node_namespace)
    admin.create(pod("after", namespace=node_namespace, gpus=8, node="rtx5090-0"))
    admin.wait_for("pods", "after", runs, node_namespace)

    # Not 137: nobody saw how the container ended.
    ended = container_state(found)["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (255, "Unknown")
    assert set(node.devices.holders().values()) == {(node_namespace, "after")}


OWNER = """
import os, sys, time
from pathlib import Path
from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.node.cluster import TWO_FLAVORS, NodeCluster
from slackwater_controlplane.node.pods import pod

cluster = NodeCluster(Programs(cache_folder(os.environ), os.environ), Path(sys.argv[1]), TWO_FLAVORS[:1])
with cluster:
    cluster.admin.create(pod("one", gpus=1))
    cluster.admin.wait_for("pods", "one", lambda found: found["status"]["phase"] == "Running")
    print(cluster.network.name, cluster.folder, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("is_killed", [pytest.param(False, id="closed"), pytest.param(True, id="killed")])
def test_nothing_is_left_of_a_cluster(node_cluster: NodeCluster, tmp_path: Path, is_killed: bool) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert owner.stdout is not None
    network, folder = owner.stdout.readline().split()
    inode = (netns.NAMESPACES / network).stat().st_ino
    cgroups = f"*/{network}.*"
    assert netns.members(inode)
    assert list(Path("/sys/fs/cgroup").glob(cgroups))

    if is_killed:
        owner.send_signal(signal.SIGKILL)
    owner.communicate("end\n")
    if is_killed:
        assert until(lambda: not _containers(folder))
        assert leftovers.sweep(tmp_path)

    assert not netns.members(inode)
    assert not (netns.NAMESPACES / network).exists()
    assert not Path(folder).exists()
    assert not list(Path("/sys/fs/cgroup").glob(cgroups))
    assert folder not in Path("/proc/self/mountinfo").read_text()
    assert not list(tmp_path.glob("*.json"))


def _containers(folder: str) -> list[str]:
    """Processes whose command line names the cluster's folder or containerd's shim with it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue
        if "containerd" in words and folder in words:
            found.append(words)
    return found
