"""manifests/overlays/test on real nodes, with the operator's real image: it runs restricted, leads, and hands over."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slackwater_controlplane.client import Object
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import NodeCluster
from slackwater_operator.resources import names

OVERLAY = Path(__file__).parents[2] / "manifests/overlays/test"
LABELS = "app.kubernetes.io/name=slackwater-operator"
SYSTEM = names.OPERATOR_NAMESPACE

pytestmark = [pytest.mark.controlplane, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(node_cluster: NodeCluster, container_images: Images) -> Iterator[NodeCluster]:
    """Two nodes with the operator applied as a person does, both replicas ready."""
    node_cluster.load(container_images.ours("operator").archive)
    applied = node_cluster.kubectl("apply", "-k", str(OVERLAY))
    assert applied.returncode == 0, applied.stderr
    node_cluster.admin.wait_for("deployments.apps", names.SERVICE_ACCOUNT, has_both, SYSTEM, timeout_s=180)
    yield node_cluster
    deleted = node_cluster.kubectl("delete", "-k", str(OVERLAY), "--timeout=90s", timeout_s=120)
    assert deleted.returncode == 0, deleted.stderr


def has_both(deployment: Object) -> bool:
    return (deployment.get("status") or {}).get("readyReplicas") == 2


def pods(cluster: NodeCluster) -> list[Object]:
    found = cluster.admin.list("pods", SYSTEM, labels=LABELS)
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def leads(pod: Object) -> bool:
    text = httpx.get(f"http://{pod['status']['podIP']}:8080/metrics", timeout=5).text
    return "\nfleet_leader 1.0\n" in text


def holder(cluster: NodeCluster) -> str:
    lease = cluster.admin.get("leases.coordination.k8s.io", names.LEASE, SYSTEM)
    return str(lease["spec"].get("holderIdentity") or "")


def wait_for_leader(cluster: NodeCluster, *, other_than: str = "") -> str:
    """The name of the pod that leads."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        leaders = [
            pod["metadata"]["name"] for pod in pods(cluster) if holder(cluster).startswith(pod["metadata"]["name"])
        ]
        if leaders and leaders != [other_than]:
            return str(leaders[0])
        time.sleep(0.1)
    pytest.fail(f"nobody leads: the lease is held by {holder(cluster)!r}")


def test_the_replicas_stand_on_different_nodes_and_have_not_restarted(cluster: NodeCluster) -> None:
    replicas = pods(cluster)

    assert len({pod["spec"]["nodeName"] for pod in replicas}) == 2
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in replicas] == [0, 0]


def test_one_of_them_leads_and_says_so(cluster: NodeCluster) -> None:
    leader = wait_for_leader(cluster)

    deadline_s = time.monotonic() + 20  # it says so with its first look
    while (leading := [pod["metadata"]["name"] for pod in pods(cluster) if leads(pod)]) != [leader]:
        assert time.monotonic() < deadline_s, leading
        time.sleep(0.2)


def test_the_container_is_what_the_manifest_says(cluster: NodeCluster) -> None:
    name = pods(cluster)[0]["metadata"]["name"]

    log = cluster.admin.logs(name, SYSTEM)

    assert "watches" in log
    assert "Traceback" not in log
    assert "Forbidden" not in log


@pytest.mark.parametrize("grace_s", [pytest.param(0, id="at once"), pytest.param(None, id="with its grace")])
def test_another_takes_over_when_the_leader_is_deleted(cluster: NodeCluster, grace_s: int | None) -> None:
    cluster.admin.wait_for("deployments.apps", names.SERVICE_ACCOUNT, has_both, SYSTEM, timeout_s=90)
    leader = wait_for_leader(cluster)

    cluster.admin.delete("pods", leader, SYSTEM, grace_s=grace_s)

    assert wait_for_leader(cluster, other_than=leader) != leader


def test_nothing_that_the_operator_asked_for_was_forbidden(cluster: NodeCluster) -> None:
    account = f"system:serviceaccount:{SYSTEM}:{names.SERVICE_ACCOUNT}"

    refused = [event for event in cluster.plane.audit() if event.user == account and event.code == 403]

    assert refused == []
