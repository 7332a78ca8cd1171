"""A speech service on a node cluster without an operator: our gateway's pods, and a replica that is scripted.

Owns the objects as the operator is to make them (Deployment and Service `NAME-gateway`), for tests of what stands
before them.
"""

import time
from pathlib import Path

import httpx

from slackwater_controlplane.client import Object
from slackwater_controlplane.envoy import is_pod_ready
from slackwater_controlplane.images import Image
from slackwater_controlplane.node.cluster import NodeCluster

PORT, CONTROL_PORT, REPLICA_PORT = 8080, 9090, 9000
PRE_STOP_S = 5
GRACE_S = 90
QUEUE_TIMEOUT_S = 1
NAMES = ("slackwater-system", "slackwater-inference")

_SCRIPT = Path(__file__).with_name("scripted_replica.py")
_READY_S = 60.0
_POLL_S = 0.1
RESTRICTED: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
RESTRICTED_POD: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


class Speech:
    """Gateway pods and one scripted replica of a service.

    image: the operator's, which runs the gateway, too.
    """

    def __init__(self, cluster: NodeCluster, image: Image, name: str = "tts", namespace: str = NAMES[1]) -> None:
        self._admin = cluster.admin
        self._image = image
        self.name = name
        self.namespace = namespace
        self._labels = {"slackwater.dev/kind": "gateway", "slackwater.dev/owner": name}
        self._client = httpx.Client(trust_env=False, timeout=5.0)

    def start(self, gateways: int = 2) -> None:
        """Make all of it, and return once every gateway knows its replica and is ready."""
        for namespace in NAMES:
            labels = {"pod-security.kubernetes.io/enforce": "restricted"}
            self._admin.apply(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
            )
        self._admin.wait_for("serviceaccounts", "default", namespace=self.namespace)
        self._admin.wait_for("configmaps", "kube-root-ca.crt", namespace=self.namespace)
        for body in (self._script(), self._replica(), self._service(), self._deployment(gateways)):
            self._admin.apply(body)
        self._admin.wait_for("pods", "replica-0", is_pod_ready, self.namespace, timeout_s=_READY_S)
        self.settle(gateways)

    def settle(self, gateways: int) -> None:
        """Tell every gateway its replica, and return once so many are ready and none is leaving."""
        deadline_s = time.monotonic() + _READY_S
        while True:
            pods = self.gateways()
            for pod in pods:
                self.tell(pod, [self.replica()])
            if len(pods) == gateways and all(is_pod_ready(pod) for pod in pods):
                return
            assert time.monotonic() < deadline_s, [pod["status"] for pod in pods]
            time.sleep(_POLL_S)

    def gateways(self) -> list[Object]:
        """The gateway pods that have an address and are not leaving."""
        labels = ",".join(f"{key}={value}" for key, value in self._labels.items())
        found = self._admin.list("pods", self.namespace, labels=labels)
        return [pod for pod in found if pod["status"].get("podIP") and "deletionTimestamp" not in pod["metadata"]]

    def replica(self) -> Object:
        """The replica as a gateway is told of it."""
        pod = self._admin.get("pods", "replica-0", self.namespace)
        url = f"http://{pod['status']['podIP']}:{REPLICA_PORT}"
        return {"uid": f"{self.namespace}/replica-0", "url": url, "slots": 64}

    def tell(self, pod: Object, replicas: list[Object]) -> None:
        """As the operator does; a gateway that does not listen yet is told next time."""
        try:
            self._client.put(f"{self._control(pod)}/replicas", json={"replicas": replicas}).raise_for_status()
        except httpx.TransportError:
            return

    def in_flight(self, pod: Object) -> int:
        """How many requests a gateway holds."""
        return int(self._client.get(f"{self._control(pod)}/signals").json()["in_flight"])

    def scale(self, gateways: int) -> None:
        """Another number of gateway pods."""
        self._admin.patch("deployments.apps", f"{self.name}-gateway", {"spec": {"replicas": gateways}}, self.namespace)

    def _control(self, pod: Object) -> str:
        return f"http://{pod['status']['podIP']}:{CONTROL_PORT}"

    # ---- objects

    def _metadata(self, name: str) -> Object:
        return {"name": name, "namespace": self.namespace}

    def _script(self) -> Object:
        data = {_SCRIPT.name: _SCRIPT.read_text()}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata("replica"), "data": data}

    def _replica(self) -> Object:
        container: Object = {
            "name": "engine",
            "image": self._image.name,
            "imagePullPolicy": "Never",
            "command": ["python", f"/script/{_SCRIPT.name}", str(REPLICA_PORT)],
            "readinessProbe": {"httpGet": {"path": "/", "port": REPLICA_PORT}, "periodSeconds": 1},
            "securityContext": RESTRICTED,
            "volumeMounts": [{"name": "script", "mountPath": "/script"}],
        }
        spec = {
            "containers": [container],
            "securityContext": RESTRICTED_POD,
            "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "script", "configMap": {"name": "replica"}}],
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": self._metadata("replica-0"), "spec": spec}

    def _service(self) -> Object:
        ports = [{"name": "http", "port": PORT, "targetPort": PORT}]
        spec = {"selector": self._labels, "ports": ports}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(f"{self.name}-gateway"), "spec": spec}

    def _deployment(self, gateways: int) -> Object:
        container: Object = {
            "name": "gateway",
            "image": self._image.name,
            "imagePullPolicy": "Never",
            "args": [
                *("gateway", "--host", "0.0.0.0", "--port", str(PORT), "--control-port", str(CONTROL_PORT)),
                *("--queue-timeout", str(QUEUE_TIMEOUT_S), "--grace", str(GRACE_S - PRE_STOP_S - 5)),
            ],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": CONTROL_PORT}, "periodSeconds": 1},
            "livenessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 10, "timeoutSeconds": 5},
            "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
            "securityContext": RESTRICTED,
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        spec = {
            "containers": [container],
            "securityContext": RESTRICTED_POD,
            "terminationGracePeriodSeconds": GRACE_S,
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self._metadata(f"{self.name}-gateway"),
            "spec": {
                "replicas": gateways,
                "selector": {"matchLabels": self._labels},
                "template": {"metadata": {"labels": self._labels}, "spec": spec},
            },
        }
