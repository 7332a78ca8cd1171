"""Our images as pods of real nodes under the `restricted` standard, and the real engine from the checkout."""

import json
import time

import httpx
import pytest

from slackwater_controlplane.client import Object
from slackwater_controlplane.envoy import is_pod_ready
from slackwater_controlplane.images import Image, Images
from slackwater_controlplane.node.cluster import NodeCluster, container_state
from slackwater_controlplane.node.pods import CHECKOUT, pod, with_host_python
from slackwater_controlplane.speech import RESTRICTED, RESTRICTED_POD

pytestmark = [pytest.mark.controlplane, pytest.mark.long]


def restricted(name: str, image: Image, namespace: str, *args: str, grace_s: int = 20) -> Object:
    """A pod as the operator makes them: nothing but /tmp can be written, no privilege, the image's own entry point."""
    made = pod(name, namespace=namespace, grace_s=grace_s)
    made["spec"]["securityContext"] = RESTRICTED_POD
    made["spec"]["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    [container] = made["spec"]["containers"]
    container |= {"image": image.name, "args": list(args), "securityContext": RESTRICTED}
    container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    made["spec"]["containers"] = [container]
    return made


def has_ended(found: Object) -> bool:
    return found["status"].get("phase") in ("Succeeded", "Failed")


@pytest.fixture
def restricted_namespace(node_cluster: NodeCluster, node_namespace: str) -> str:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    node_cluster.admin.patch("namespaces", node_namespace, {"metadata": {"labels": labels}})
    return node_namespace


@pytest.fixture(scope="module")
def loaded(node_cluster: NodeCluster, container_images: Images) -> dict[str, Image]:
    images = {name: container_images.ours(name) for name in ("operator", "worker")}
    node_cluster.load(*(image.archive for image in images.values()))
    return images


@pytest.mark.parametrize(
    ("image", "args"),
    [
        pytest.param("operator", ("--version",), id="operator"),
        pytest.param("worker", ("clean", "run", "--help"), id="worker"),
    ],
)
def test_an_image_runs_in_a_restricted_pod(
    node_cluster: NodeCluster,
    restricted_namespace: str,
    loaded: dict[str, Image],
    image: str,
    args: tuple[str, ...],
) -> None:
    admin = node_cluster.admin

    admin.create(restricted("one", loaded[image], restricted_namespace, *args))
    ended = admin.wait_for("pods", "one", has_ended, restricted_namespace)

    assert ended["status"]["phase"] == "Succeeded", admin.logs("one", restricted_namespace)


def test_a_gateway_that_is_told_to_go_ends_by_its_own_will(
    node_cluster: NodeCluster, restricted_namespace: str, loaded: dict[str, Image]
) -> None:
    admin = node_cluster.admin
    args = ("gateway", "--host", "0.0.0.0", "--port", "8080", "--control-port", "9090")
    admin.create(restricted("gateway", loaded["operator"], restricted_namespace, *args, grace_s=60))
    running = admin.wait_for("pods", "gateway", is_pod_ready, restricted_namespace)
    url = f"http://{running['status']['podIP']}:9090/signals"
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        try:
            httpx.get(url, trust_env=False)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    # A finalizer of ours keeps the object, so that its end can be read.
    admin.patch("pods", "gateway", {"metadata": {"finalizers": ["slackwater.dev/test"]}}, restricted_namespace)

    admin.delete("pods", "gateway", restricted_namespace)
    ended = admin.wait_for("pods", "gateway", has_ended, restricted_namespace)
    admin.patch("pods", "gateway", {"metadata": {"finalizers": None}}, restricted_namespace)

    assert container_state(ended)["terminated"]["exitCode"] == 0


def test_the_real_engine_speaks_from_a_pod(node_cluster: NodeCluster, node_namespace: str) -> None:
    admin = node_cluster.admin
    program = f"{CHECKOUT}/.venv/bin/slackwater"
    command = [program, "engine", "serve", "--host", "0.0.0.0", "--port", "8080"]
    made = with_host_python(pod("engine", namespace=node_namespace, command=command, gpus=1))
    made["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"path": "/readyz", "port": 8080}, "periodSeconds": 1}
    asked = json.dumps({"text": "Slack water is the moment between two tides.", "format": "mp3"})

    admin.create(made)
    running = admin.wait_for("pods", "engine", is_pod_ready, node_namespace, timeout_s=90)
    url = f"http://{running['status']['podIP']}:8080/v1/tts"
    heard = httpx.post(url, content=asked, headers={"Content-Type": "application/json"}, timeout=60, trust_env=False)

    assert heard.status_code == 200, heard.text
    assert len(heard.content) > 5000
