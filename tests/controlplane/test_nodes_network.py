"""Pods reach the API server by its service address, find services by name, and are reached from the machine."""

import sys
import urllib.request

import pytest

from slackwater_controlplane.client import Object
from slackwater_controlplane.node.cluster import NodeCluster, container_state
from slackwater_controlplane.node.pods import pod, with_host_python

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(180)]
ASK = """
import json, os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
token = open(folder + "/token").read()
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
for name in (host, "kubernetes.default.svc"):
    request = urllib.request.Request(
        f"https://{name}:{port}/version", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=folder + "/ca.crt")) as answer:
        print(name, json.load(answer)["gitVersion"])
"""


def ended(found: Object) -> bool:
    return "terminated" in container_state(found)


def test_a_pod_asks_the_api_server_by_service_address_and_by_name(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    body = with_host_python(pod("asker", command=[sys.executable, "-c", ASK], namespace=node_namespace))

    node_cluster.admin.create(body)
    node_cluster.admin.wait_for("pods", "asker", ended, node_namespace)

    logs = node_cluster.kubectl("logs", "asker", "-n", node_namespace).stdout
    assert logs.splitlines() == ["10.96.0.1 v1.36.3", "kubernetes.default.svc v1.36.3"]


def test_a_service_leads_to_pods_on_both_nodes(node_cluster: NodeCluster, node_namespace: str) -> None:
    admin = node_cluster.admin
    serve = "mkdir /tmp/www; echo $HOSTNAME > /tmp/www/name; exec httpd -f -p 8080 -h /tmp/www"
    meta = {"name": "greeter", "namespace": node_namespace}
    spec = {"selector": {"app": "greeter"}, "ports": [{"port": 80, "targetPort": 8080}]}
    admin.create({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})
    for name in node_cluster.nodes:
        body = pod(f"on-{name}", serve, namespace=node_namespace, node=name, labels={"app": "greeter"})
        probe = {"httpGet": {"port": 8080, "path": "/name"}, "periodSeconds": 1}
        body["spec"]["containers"][0]["readinessProbe"] = probe
        admin.create(body)
    for name in node_cluster.nodes:
        admin.wait_for("pods", f"on-{name}", is_ready, node_namespace)

    # Rules follow the endpoints a moment later, hence until both were seen.  (Debian's static wget crashes with -T.)
    ask = (
        "for i in $(seq 100); do wget -q -O - http://greeter/name >> /tmp/seen; "
        "[ $(sort -u /tmp/seen | wc -l) = 2 ] && break; sleep 0.1; done; sort -u /tmp/seen"
    )
    admin.create(pod("asker", ask, namespace=node_namespace))
    admin.wait_for("pods", "asker", ended, node_namespace)

    seen = node_cluster.kubectl("logs", "asker", "-n", node_namespace).stdout.split()
    assert seen == sorted(f"on-{name}" for name in node_cluster.nodes)


def test_the_machine_reaches_a_pod_by_its_address(node_cluster: NodeCluster, node_namespace: str) -> None:
    serve = "mkdir /tmp/www; echo hello > /tmp/www/word; exec httpd -f -p 8080 -h /tmp/www"
    body = pod("server", serve, namespace=node_namespace)
    body["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"port": 8080, "path": "/word"}, "periodSeconds": 1}
    node_cluster.admin.create(body)
    found = node_cluster.admin.wait_for("pods", "server", is_ready, node_namespace)

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{found['status']['podIP']}:8080/word", timeout=5) as answer:
        assert answer.read() == b"hello\n"


def is_ready(found: Object) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True" for one in found.get("status", {}).get("conditions", [])
    )
