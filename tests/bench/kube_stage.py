"""The stage of `operator_e2e`: a real Kubernetes with two real nodes, and all of ours installed as a person would.

Owns the nodes, images, volumes and resources, and where each part is reached.  Engines run from this checkout's own
environment, which is mounted by volumes: an image with torch has 5 GB and would say nothing more.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soundfile

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.client import Object
from slackwater_controlplane.envoy import CONTROLLER, EnvoyGateway, envoy_image
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import PRODUCT, SITE, NodeCluster, why_not
from slackwater_controlplane.node.node import NodeSpec
from slackwater_controlplane.node.pods import CHECKOUT, host_volume, python_paths
from slackwater_operator.resources import names

ROOT = Path(__file__).parents[2]
OPERATORS = "app.kubernetes.io/name=slackwater-operator"
OVERLAY = ROOT / "manifests/overlays/test"
SERVING, DATA = "slackwater-inference", "slackwater-workers"  # the namespaces of the installation
NODES = (
    NodeSpec("h200-0", 0, {PRODUCT: "NVIDIA-H200", SITE: "dc-east"}, gpus=3),
    NodeSpec("rtx5090-0", 1, {PRODUCT: "NVIDIA-GeForce-RTX-5090", SITE: "dc-east"}, gpus=1),
)
GPUS = sum(node.gpus for node in NODES)  # few: each worker shares this machine's cores with everything else
FLAVORS = {"h200": "NVIDIA-H200", "rtx5090": "NVIDIA-GeForce-RTX-5090"}
SLOTS = 2  # of an engine
USER = 65532
PATIENCE_S = 240.0


class Stage:
    """All of it, running.  Made by `stage`."""

    def __init__(self, cluster: NodeCluster, envoy: EnvoyGateway, folder: Path) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self.envoy = envoy
        self.ledger = folder / "ledger"
        self.url = ""

    def pods(self, namespace: str, kind: str) -> list[Object]:
        """Living pods of a kind."""
        found = self.admin.list("pods", namespace, labels=f"{names.LABEL_KIND}={kind}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"] and not is_over(pod)]

    def targets(self) -> list[str]:
        """What a Prometheus scrapes: the operator's replicas, gateways and engines."""
        operators = self.admin.list(
            "pods", names.OPERATOR_NAMESPACE, labels="app.kubernetes.io/name=slackwater-operator"
        )
        found = [(pod, 8080) for pod in operators if not is_over(pod)]
        found += [(pod, 9090) for pod in self.pods(SERVING, names.POD_GATEWAY)]
        found += [(pod, 8080) for pod in self.pods(SERVING, names.POD_INFERENCE)]
        return [f"{pod['status']['podIP']}:{port}" for pod, port in found if pod["status"].get("podIP")]

    def holders(self) -> dict[str, tuple[str, str]]:
        """Which pod holds each GPU, by the kubelets' own account."""
        return {device: pod for node in self.cluster.nodes.values() for device, pod in node.devices.holders().items()}

    def verify(self) -> dict[str, Any]:
        """`slackwater clean verify` on the job's ledger."""
        command = [str(ROOT / ".venv/bin/slackwater"), "clean", "verify", str(self.ledger), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report: dict[str, Any] = json.loads(done.stdout)
        return report


def is_over(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def until(is_so: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Look again and again.  Raises TimeoutError that says what was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)


@contextmanager
def stage(folder: Path, say: Callable[[str], None]) -> Iterator[Stage]:
    """Everything running, cleaning on every GPU but one.  Raises RuntimeError that says what is missing."""
    cache = cache_folder(os.environ)
    programs = Programs(cache, os.environ)
    images = Images(cache, os.environ, say=say)
    if why := why_not(programs) or programs.why_not(CONTROLLER) or images.why_not():
        raise RuntimeError(why)
    base = images.base()
    ours = [base, *(images.ours(name) for name in ("operator", "worker"))]
    with NodeCluster(programs, cache / "controlplane/runs", NODES) as cluster:
        say(f"two nodes with {GPUS} GPUs: {cluster.started_in_s}")
        cluster.load(*(image.archive for image in ours))
        envoy = EnvoyGateway(cluster, envoy_image(images, programs, os.environ), programs.module_folder(CONTROLLER))
        envoy.install()
        install(cluster)
        found = Stage(cluster, envoy, folder)
        for body in (*volumes(folder), *resources(base.name)):
            cluster.admin.apply(body)
        envoy.apply()
        found.url = envoy.url()
        say("operator, Envoy Gateway and resources are there")
        until(lambda: answers(found.url), "an engine speaks through the ingress")
        until(lambda: len(found.pods(DATA, names.POD_CLEANING)) == GPUS - 1, "cleaning holds every other GPU")
        yield found


def answers(url: str) -> bool:
    try:
        asked = {"text": "Hello.", "format": "wav"}
        return httpx.post(f"{url}/v1/tts", json=asked, timeout=30, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def install(cluster: NodeCluster) -> None:
    """As manifests/README.md says."""
    for attempt in range(5):  # a custom resource's kind is known some moments after its definition
        done = cluster.kubectl("apply", "--server-side", "-k", str(OVERLAY))
        if done.returncode == 0:
            break
        time.sleep(1 + attempt)
    else:
        raise RuntimeError(done.stderr)
    cluster.admin.wait_for(
        "deployments.apps",
        names.SERVICE_ACCOUNT,
        lambda one: (one.get("status") or {}).get("readyReplicas") == 2,
        names.OPERATOR_NAMESPACE,
        timeout_s=PATIENCE_S,
    )


def recordings(folder: Path, source: Path, copies: int) -> None:
    """Real recordings, each some times at another loudness: equal content would be one item."""
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".wav", ".ogg"))
    for number, file in enumerate(files):
        samples, rate = soundfile.read(file, dtype="float32")
        for copy in range(copies):
            quieter = (samples * np.float32(0.98**copy)).astype("float32")
            soundfile.write(folder / f"{number:05d}-{copy}.wav", quieter, rate, subtype="PCM_16")


def volumes(folder: Path) -> list[Object]:
    """Folders of this machine as volumes: the recordings, the ledger, and the environment that engines run from."""
    made = []
    for name, path in (("recordings", folder / "input"), ("ledger", folder / "ledger")):
        path.mkdir(exist_ok=True)
        os.chown(path, USER, USER)
        made += host_volume(DATA, name, path)
    for number, path in enumerate(python_paths()):
        made += host_volume(SERVING, f"python-{number}", Path(path))
    return made


def resources(image: str) -> list[Object]:
    """A small site.  image: one in which this machine's Python runs."""
    flavors = [ours("GPUFlavor", name, {"nodeSelector": {PRODUCT: product}}) for name, product in FLAVORS.items()]
    pool = {
        "flavors": [{"name": name} for name in FLAVORS],
        "lending": {"lendAfter": "1s"},
        "reclaim": {"deadline": "15s", "retargetAfter": "8s"},
    }
    return [*flavors, ours("CapacityPool", "east", pool), service(image), job()]


def service(image: str) -> Object:
    """One engine at the least; a burst needs more."""
    engine: Object = {
        "name": names.ENGINE_CONTAINER,
        "image": image,
        "imagePullPolicy": "Never",
        "command": [f"{CHECKOUT}/.venv/bin/python", "-m", "slackwater_operator"],
        "args": ["engine", "serve", "--host", "0.0.0.0", "--port", "8080", "--slots", str(SLOTS), "--pace", "30"],
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"requests": {"cpu": "500m"}},
    }
    mounts, claims = [], []
    for number, path in enumerate(python_paths()):
        mounts.append({"name": f"python-{number}", "mountPath": path, "readOnly": True})
        claims.append({"name": f"python-{number}", "persistentVolumeClaim": {"claimName": f"python-{number}"}})
    spec = {
        "model": "tiny",
        "pools": ["east"],
        "minReplicas": 1,
        "maxReplicas": 3,
        "variants": [{"flavor": name, "slotsPerReplica": SLOTS, "preference": n} for n, name in enumerate(FLAVORS)],
        "autoscaling": {"stableWindow": "20s", "scaleDown": {"window": "10s", "deadband": 0}},
        "drain": {"grace": "60s"},
        "template": {"spec": {"containers": [engine | {"volumeMounts": mounts}], "volumes": claims}},
    }
    return ours("InferenceDeployment", "tts", spec, SERVING)


def job() -> Object:
    worker = {
        "name": names.WORKER_CONTAINER,
        "image": "slackwater/worker:0.1.0",
        "imagePullPolicy": "Never",
        "resources": {"requests": {"cpu": "50m"}},
    }
    spec = {
        "pools": ["east"],
        "flavors": list(FLAVORS),
        "maxWorkers": GPUS,
        "ledger": {"claimName": "ledger"},
        "input": {"claimName": "recordings"},
        "template": {"spec": {"terminationGracePeriodSeconds": 20, "containers": [worker]}},
    }
    return ours("CleaningJob", "podcasts", spec, DATA)


def ours(kind: str, name: str, spec: Object, namespace: str = "") -> Object:
    metadata = {"name": name, "namespace": namespace} if namespace else {"name": name}
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}
