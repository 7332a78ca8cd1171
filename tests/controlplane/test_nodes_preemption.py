"""Kubernetes' own preemption on real nodes: a worker told to go ends its work before the new pod starts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slackwater_controlplane.client import Object
from slackwater_controlplane.node.cluster import PRODUCT, NodeCluster, container_state
from slackwater_controlplane.node.pods import pod

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(180)]
H200 = {PRODUCT: "NVIDIA-H200"}
CLEAN = """
trap 'echo flushing; sleep 0.2; echo flushed; exit 75' TERM
echo cleaning on $NVIDIA_VISIBLE_DEVICES
while :; do sleep 0.05; done
"""


def runs(found: Object) -> bool:
    return "running" in container_state(found)


@pytest.fixture
def priorities(node_cluster: NodeCluster) -> Iterator[tuple[str, str]]:
    """Two PriorityClasses, low and high."""
    classes = {"test-cleaning": -1000, "test-inference": 1_000_000}
    for name, value in classes.items():
        meta = {"name": name}
        body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": meta, "value": value}
        node_cluster.admin.apply(body)
    yield "test-cleaning", "test-inference"
    for name in classes:
        node_cluster.admin.delete("priorityclasses.scheduling.k8s.io", name)


def test_a_cleaning_pod_flushes_and_the_inference_pod_gets_its_gpus(
    node_cluster: NodeCluster, node_namespace: str, priorities: tuple[str, str]
) -> None:
    low, high = priorities
    admin = node_cluster.admin
    worker = pod("cleaning", CLEAN, namespace=node_namespace, gpus=8, selector=H200, priority_class=low, grace_s=20)
    worker["metadata"]["finalizers"] = ["slackwater.test/keep"]
    admin.create(worker)
    admin.wait_for("pods", "cleaning", runs, node_namespace)

    with ThreadPoolExecutor(1) as pool:
        # Followed from the start: the kubelet removes a deleted pod's container with its log.
        following = pool.submit(node_cluster.kubectl, "logs", "--follow", "cleaning", "-n", node_namespace)
        admin.create(pod("replica", namespace=node_namespace, gpus=8, selector=H200, priority_class=high))
        replica = admin.wait_for("pods", "replica", runs, node_namespace)
        logs = following.result().stdout.splitlines()
    victim = admin.get("pods", "cleaning", node_namespace)
    admin.patch("pods", "cleaning", {"metadata": {"finalizers": None}}, node_namespace)

    ended = container_state(victim)["terminated"]
    assert ended["exitCode"] == 75
    assert logs[-2:] == ["flushing", "flushed"]
    # RFC 3339 times of one clock compare as text.
    assert ended["finishedAt"] <= container_state(replica)["running"]["startedAt"]
