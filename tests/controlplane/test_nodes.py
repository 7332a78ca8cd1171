"""Real nodes: pods run, get GPUs by name, say how they ended, and answer logs and exec."""

from collections.abc import Callable

import pytest

from slackwater_controlplane.client import Object
from slackwater_controlplane.node.cluster import PRODUCT, NodeCluster, container_state, is_node_ready
from slackwater_controlplane.node.pods import pod

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(180)]


def runs(found: Object) -> bool:
    return "running" in container_state(found)


def ended(found: Object) -> bool:
    return "terminated" in container_state(found)


@pytest.fixture
def start(node_cluster: NodeCluster, node_namespace: str) -> Callable[..., Object]:
    """Create a pod and return it once it is as asked."""

    def start(body: Object, until: Callable[[Object], bool] = runs) -> Object:
        node_cluster.admin.create(body)
        return node_cluster.admin.wait_for("pods", body["metadata"]["name"], until, node_namespace)

    return start


def test_both_nodes_are_ready_with_their_gpus_and_flavors(node_cluster: NodeCluster) -> None:
    nodes = {node["metadata"]["name"]: node for node in node_cluster.admin.list("nodes")}

    assert set(nodes) == {"h200-0", "rtx5090-0"}
    assert all(is_node_ready(node) for node in nodes.values())
    assert {node["status"]["allocatable"]["nvidia.com/gpu"] for node in nodes.values()} == {"8"}
    assert nodes["h200-0"]["metadata"]["labels"][PRODUCT] == "NVIDIA-H200"
    assert nodes["h200-0"]["status"]["nodeInfo"]["kubeletVersion"] == "v1.36.3"


def test_a_pod_runs_and_answers_logs_and_exec(
    node_cluster: NodeCluster, node_namespace: str, start: Callable[..., Object]
) -> None:
    start(pod("talker", "echo hello from $HOSTNAME; exec sleep 1000", namespace=node_namespace))

    logs = node_cluster.kubectl("logs", "talker", "-n", node_namespace)
    answer = node_cluster.kubectl("exec", "talker", "-n", node_namespace, "--", "cat", "/etc/hostname")

    assert logs.stdout == "hello from talker\n", logs.stderr
    assert answer.stdout == "talker\n", answer.stderr


def test_a_pod_finds_its_gpus_by_name_and_the_kubelet_knows_the_holder(
    node_cluster: NodeCluster, node_namespace: str, start: Callable[..., Object]
) -> None:
    script = "echo $NVIDIA_VISIBLE_DEVICES; exec sleep 1000"

    start(pod("pair", script, namespace=node_namespace, gpus=2, selector={PRODUCT: "NVIDIA-H200"}))
    given = node_cluster.kubectl("logs", "pair", "-n", node_namespace).stdout.strip().split(",")

    node = node_cluster.nodes["h200-0"]
    assert len(given) == 2
    assert set(given) <= set(node.spec.device_ids)
    assert {device for device, holder in node.devices.holders().items() if holder == (node_namespace, "pair")} == set(
        given
    )


def test_two_pods_of_one_node_get_different_gpus(
    node_cluster: NodeCluster, node_namespace: str, start: Callable[..., Object]
) -> None:
    for name in ("one", "two"):
        start(pod(name, namespace=node_namespace, gpus=4, node="rtx5090-0"))

    holders = node_cluster.nodes["rtx5090-0"].devices.holders()

    assert sorted(holders.values()) == [(node_namespace, "one")] * 4 + [(node_namespace, "two")] * 4


def test_the_kubelet_refuses_a_bound_pod_without_free_gpus(
    node_cluster: NodeCluster, node_namespace: str, start: Callable[..., Object]
) -> None:
    start(pod("all", namespace=node_namespace, gpus=8, node="h200-0"))

    refused = start(
        pod("late", namespace=node_namespace, gpus=1, node="h200-0"), lambda found: found["status"]["phase"] == "Failed"
    )

    # A kubelet whose device plug-in has nothing left says so before it counts resources (OutOfnvidia.com/gpu).
    assert refused["status"]["reason"] == "UnexpectedAdmissionError"


def test_exit_code_and_last_message_arrive_when_a_pod_is_deleted(
    node_cluster: NodeCluster, node_namespace: str, start: Callable[..., Object]
) -> None:
    script = (
        "trap 'echo receipt 17 > /dev/termination-log; exit 75' TERM; touch /tmp/ready; while :; do sleep 0.05; done"
    )
    body = pod("worker", script, namespace=node_namespace, grace_s=10)
    # Kept by a finalizer, so that the status of its end can be read.
    body["metadata"]["finalizers"] = ["slackwater.test/keep"]
    start(body)
    assert node_cluster.kubectl("exec", "worker", "-n", node_namespace, "--", "ls", "/tmp/ready").returncode == 0

    node_cluster.admin.delete("pods", "worker", node_namespace)
    found = node_cluster.admin.wait_for("pods", "worker", ended, node_namespace)
    node_cluster.admin.patch("pods", "worker", {"metadata": {"finalizers": None}}, node_namespace)

    state = container_state(found)["terminated"]
    assert (state["exitCode"], state["message"]) == (75, "receipt 17\n")
    assert found["status"]["phase"] == "Failed"


def test_a_pod_that_does_not_end_is_killed_after_its_grace(
    node_cluster: NodeCluster, node_namespace: str, start: Callable[..., Object]
) -> None:
    body = pod("stuck", "trap '' TERM; while :; do sleep 0.1; done", namespace=node_namespace, grace_s=1)
    body["metadata"]["finalizers"] = ["slackwater.test/keep"]
    start(body)

    node_cluster.admin.delete("pods", "stuck", node_namespace)
    found = node_cluster.admin.wait_for("pods", "stuck", ended, node_namespace)
    node_cluster.admin.patch("pods", "stuck", {"metadata": {"finalizers": None}}, node_namespace)

    assert container_state(found)["terminated"]["exitCode"] == 137
