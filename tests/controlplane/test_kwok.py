"""Fake nodes and what their pods do, by annotation."""

import time
from typing import Any

import pytest

from slackwater_controlplane import stages
from slackwater_controlplane.client import Admin, Object
from slackwater_controlplane.kwok import GPU, PRODUCT, Kwok, is_ready


def pod(name: str, namespace: str, node: str = "", *, grace_s: int = 30, gpus: int = 1, **notes: str) -> Object:
    """notes: stages' names of annotations, in lower case."""
    annotations = {getattr(stages, key.upper()): value for key, value in notes.items()}
    container = {"name": "worker", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
    spec: dict[str, Any] = {"containers": [container], "restartPolicy": "Never", "nodeName": node or None}
    spec["terminationGracePeriodSeconds"] = grace_s
    meta = {"name": name, "namespace": namespace, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def run(admin: Admin, body: Object) -> Object:
    """Create a pod and wait until it is ready."""
    meta = admin.create(body)["metadata"]
    return admin.wait_for("pods", meta["name"], is_ready, meta["namespace"])


def leave(admin: Admin, name: str, namespace: str) -> tuple[Object, float]:
    """Delete a pod; the last that was seen of it, and how long it stayed."""
    since = admin.list_whole("pods", namespace)["metadata"]["resourceVersion"]
    begun_s = time.monotonic()
    admin.delete("pods", name, namespace)
    last: Object = {}
    for event in admin.watch("pods", namespace, since=since, timeout_s=20):
        if event["object"]["metadata"]["name"] == name:
            if event["type"] == "DELETED":
                break
            last = event["object"]
    return last, time.monotonic() - begun_s


def terminated(body: Object) -> Object:
    return body["status"]["containerStatuses"][0]["state"]["terminated"]  # type: ignore[no-any-return]  # JSON


def taints(node: Object) -> set[str]:
    return {taint["key"] for taint in node["spec"].get("taints", ())}


@pytest.fixture
def node(kwok: Kwok, namespace: str) -> str:
    return kwok.add_nodes(1, prefix=f"{namespace}-n")[0]


def test_many_nodes_with_gpus_are_ready_soon(kwok: Kwok, kube_admin: Admin, namespace: str) -> None:
    names = kwok.add_nodes(50, prefix=f"{namespace}-r", product="RTX-5090", gpus=4, labels={"zone": "b"})

    nodes = kube_admin.list("nodes", labels=f"{PRODUCT}=RTX-5090,zone=b")
    assert sorted(one["metadata"]["name"] for one in nodes) == sorted(names)
    assert all(one["status"]["allocatable"][GPU] == "4" and is_ready(one) for one in nodes)


def test_the_scheduler_counts_their_gpus(kwok: Kwok, kube_admin: Admin, namespace: str, node: str) -> None:
    selected = {"nodeSelector": {"kubernetes.io/hostname": node}}
    for name, gpus in (("first", 6), ("second", 4)):
        body = pod(name, namespace, gpus=gpus)
        kube_admin.create(body | {"spec": body["spec"] | selected})

    bound = kube_admin.wait_for("pods", "first", is_ready, namespace)
    waiting = kube_admin.wait_for("pods", "second", lambda it: bool(it["status"].get("conditions")), namespace)

    assert bound["spec"]["nodeName"] == node
    assert "Insufficient nvidia.com/gpu" in waiting["status"]["conditions"][0]["message"]


def test_a_pod_runs_after_its_delay_and_is_ready_after_another(kube_admin: Admin, namespace: str, node: str) -> None:
    kube_admin.create(pod("engine", namespace, node, start_s="0.5", ready_s="0.5"))
    begun_s = time.monotonic()

    running = kube_admin.wait_for("pods", "engine", lambda it: it["status"]["phase"] == "Running", namespace)
    running_s = time.monotonic() - begun_s
    kube_admin.wait_for("pods", "engine", is_ready, namespace)
    ready_s = time.monotonic() - begun_s

    assert running["status"]["podIP"]
    assert running["status"]["containerStatuses"][0]["ready"] is False
    assert running_s > 0.4
    assert ready_s > running_s + 0.3


def test_a_worker_asked_to_leave_flushes_leaves_its_receipt_and_goes(
    kube_admin: Admin, namespace: str, node: str
) -> None:
    receipt = '{"unit": 7, "digest": "abc \\"quoted\\""}'
    run(kube_admin, pod("worker", namespace, node, flush_s="0.4", message=receipt))

    last, stayed_s = leave(kube_admin, "worker", namespace)

    assert last["status"]["phase"] == "Failed"
    assert terminated(last)["exitCode"] == 75
    assert terminated(last)["message"] == receipt
    assert 0.35 < stayed_s < 15


@pytest.mark.parametrize(
    ("notes", "code", "phase"),
    [
        pytest.param({}, 0, "Succeeded", id="no receipt"),
        pytest.param({"exit_code": "3", "message": "no"}, 3, "Failed", id="its own code"),
        pytest.param({"exit_code": "0", "message": "done"}, 0, "Succeeded", id="a receipt of one that is done"),
    ],
)
def test_a_pod_asked_to_leave_ends_as_it_is_told(
    kube_admin: Admin, namespace: str, node: str, notes: dict[str, str], code: int, phase: str
) -> None:
    run(kube_admin, pod("worker", namespace, node, **notes))

    last, _ = leave(kube_admin, "worker", namespace)

    assert terminated(last)["exitCode"] == code
    assert last["status"]["phase"] == phase


def test_a_worker_that_takes_longer_than_its_grace_is_killed(kube_admin: Admin, namespace: str, node: str) -> None:
    run(kube_admin, pod("worker", namespace, node, grace_s=1, flush_s="60", message="too late"))

    last, stayed_s = leave(kube_admin, "worker", namespace)

    assert terminated(last)["exitCode"] == 137
    assert terminated(last).get("message", "") == ""
    assert 0.9 < stayed_s < 20


def test_a_stuck_pod_stays_until_it_is_forced(kube_admin: Admin, namespace: str, node: str) -> None:
    body = pod("worker", namespace, node, grace_s=1)
    body["metadata"]["labels"] = {stages.STUCK: "true"}
    run(kube_admin, body)

    kube_admin.delete("pods", "worker", namespace)
    run(kube_admin, pod("other", namespace, node))
    leave(kube_admin, "other", namespace)  # the same kwok has seen the end of one asked later
    stuck = kube_admin.get("pods", "worker", namespace)
    kube_admin.delete("pods", "worker", namespace, grace_s=0)

    assert stuck["metadata"]["deletionTimestamp"]
    assert stuck["status"]["phase"] == "Running"
    kube_admin.wait_gone("pods", "worker", namespace)


def test_a_failing_pod_ends_by_itself_and_stays_to_be_seen(kube_admin: Admin, namespace: str, node: str) -> None:
    run(kube_admin, pod("worker", namespace, node, end_s="0.3", end_code="2", end_message="no such file"))

    failed = kube_admin.wait_for("pods", "worker", lambda it: it["status"]["phase"] == "Failed", namespace)

    assert (terminated(failed)["exitCode"], terminated(failed)["message"]) == (2, "no such file")
    kube_admin.delete("pods", "worker", namespace)
    kube_admin.wait_gone("pods", "worker", namespace)


def test_a_pod_that_the_kubelet_refuses_never_starts(kube_admin: Admin, namespace: str, node: str) -> None:
    kube_admin.create(pod("worker", namespace, node, refuse="OutOfnvidia.com/gpu"))

    refused = kube_admin.wait_for("pods", "worker", lambda it: it["status"]["phase"] == "Failed", namespace)

    assert refused["status"]["reason"] == "OutOfnvidia.com/gpu"
    assert "containerStatuses" not in refused["status"]


def test_a_pod_that_leaves_before_it_started_is_just_gone(kube_admin: Admin, namespace: str, node: str) -> None:
    kube_admin.create(pod("worker", namespace, node, start_s="600"))

    last, stayed_s = leave(kube_admin, "worker", namespace)

    assert "containerStatuses" not in last["status"]
    assert stayed_s < 15


def test_a_broken_node_stays_broken_until_it_is_mended(kwok: Kwok, kube_admin: Admin, namespace: str) -> None:
    broken, sound = kwok.add_nodes(2, prefix=f"{namespace}-n")

    kwok.break_node(broken)
    kube_admin.wait_for("nodes", broken, lambda it: "node.kubernetes.io/unreachable" in taints(it))
    still_broken = not is_ready(kube_admin.get("nodes", broken))
    kwok.mend_node(broken)

    assert still_broken
    assert is_ready(kube_admin.get("nodes", sound))
    assert is_ready(kube_admin.get("nodes", broken))


def test_a_lost_gpu_is_gone_from_what_can_be_had(kwok: Kwok, kube_admin: Admin, node: str) -> None:
    kwok.set_gpus(node, 7)

    status = kube_admin.get("nodes", node)["status"]

    assert (status["capacity"][GPU], status["allocatable"][GPU]) == ("8", "7")
