"""A small site on real nodes, for tests of what people do to it and of what breaks: installed as a person would.

Owns the nodes, the installation, recordings, volumes and the bodies of services and jobs.  The operator's replica is a
process beside the cluster, so that stand-ins on this machine's loopback reach it; everything else is in pods.  Engines
are stand-ins that hold a GPU and leave when they are told; workers are the real ones.  Owns no expectation.
"""

import json
import os
import subprocess
import sys
import tempfile
import wave
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.client import Object
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import PRODUCT, NodeCluster
from slackwater_controlplane.node.node import NodeSpec
from slackwater_controlplane.node.pods import host_volume
from slackwater_controlplane.oci import BUSYBOX_IMAGE
from slackwater_controlplane.operator_rig import ACCOUNT, GROUPS
from slackwater_controlplane.threaded import Gateway
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import OperatorProcess, wait_until
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

OVERLAY = Path(__file__).parents[3] / "manifests/overlays/test"
SERVING, DATA = "slackwater-inference", "slackwater-workers"  # the namespaces of the installation
GPUS = 2  # of each node
NODES = tuple(NodeSpec(f"h200-{number}", number, {PRODUCT: "NVIDIA-H200"}, gpus=GPUS) for number in range(3))
OPERATOR_IMAGE, WORKER_IMAGE = "slackwater/operator:0.1.0", "slackwater/worker:0.1.0"
SLOTS = 8  # of a stand-in engine
MANY, SOME = 1000, 300  # recordings in the two folders
ITEM_S, RATE = 20, 16_000
USER = 65532
ENGINE = "trap 'echo told to go; exit 0' TERM; echo serving; while :; do sleep 0.05; done"
SAYS_YES: Object = {"exec": {"command": ["/bin/sh", "-c", "exit 0"]}, "timeoutSeconds": 10}
PATIENCE_S = 120.0


class Site:
    """All of it, running.  Made by `site`."""

    def __init__(self, cluster: NodeCluster, gateway: Gateway, folder: Path) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self.gateway = gateway
        self.folder = folder
        self._jobs = self._operators = 0

    @contextmanager
    def operator(self) -> Iterator[OperatorProcess]:
        """The operator, as the installation's own service account."""
        kubeconfig = self.cluster.plane.kubeconfig(ACCOUNT, GROUPS)
        more = ("--gateway-image", OPERATOR_IMAGE)
        self._operators += 1
        name = f"operator-{self._operators}"  # each with a log of its own
        with OperatorProcess(name, kubeconfig, self.folder, os.environ, *more) as process:
            wait_until(process.leads, PATIENCE_S, process.words)
            yield process

    def kubectl(self, *words: str, timeout_s: float = 180.0) -> str:
        """What kubectl says.  Raises AssertionError when it fails."""
        done = self.cluster.kubectl(*words, timeout_s=timeout_s)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def follow(self, pod: str, namespace: str) -> "subprocess.Popen[str]":
        """`kubectl logs --follow`, which ends with the pod."""
        kubeconfig = f"--kubeconfig={self.cluster.plane.kubeconfig()}"
        words = [str(self.cluster.programs.path("kubectl")), kubeconfig, "logs", "--follow", pod, "-n", namespace]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    # --- what is there --------------------------------------------------------------------------

    def pods(self, kind: str, *, node: str = "", leaving: bool = False) -> list[Object]:
        """Pods of a kind that are not over; those that leave only if asked for."""
        namespace = SERVING if kind in (names.POD_INFERENCE, names.POD_GATEWAY) else DATA
        found = self.admin.list("pods", namespace, labels=f"{names.LABEL_KIND}={kind}")
        return [
            pod
            for pod in found
            if pod["status"].get("phase") not in ("Succeeded", "Failed")
            and node in ("", pod["spec"].get("nodeName"))
            and (leaving or not pod["metadata"].get("deletionTimestamp"))
        ]

    def running(self, kind: str, *, node: str = "") -> list[str]:
        """Names of the ready ones."""
        return sorted(pod["metadata"]["name"] for pod in self.pods(kind, node=node) if is_ready(pod))

    def holders(self) -> dict[str, tuple[str, str]]:
        """Which pod holds each GPU, by the kubelets' own account; of the nodes that answer."""
        found: dict[str, tuple[str, str]] = {}
        for node in self.cluster.nodes.values():
            try:
                found |= node.devices.holders()
            except Exception:  # noqa: BLE001 - a kubelet that is gone says nothing
                continue
        return found

    def reclaims(self) -> list[Object]:
        return [
            one for one in self.admin.list("reclaims.slackwater.dev") if one["metadata"]["namespace"] in (SERVING, DATA)
        ]

    def status(self, job: str) -> Object:
        found: Object = self.admin.get("cleaningjobs.slackwater.dev", job, DATA).get("status") or {}
        return found

    def cleaning(self) -> list[str]:
        """Names of the running workers that have made an item durable, as their job's keeper says."""
        addresses = [pod["status"].get("podIP") for pod in self.pods(names.POD_KEEPER) if is_ready(pod)]
        try:
            url = f"http://{addresses[0]}:{names.CONTROL_PORT}/progress"
            told: Object = httpx.get(url, timeout=10, trust_env=False).json()["workers"]
        except (httpx.HTTPError, IndexError):
            return []
        begun = {name for name, worker in told.items() if worker.get("durable_age_s") is not None}
        return sorted(begun & set(self.running(names.POD_CLEANING)))

    def ledger(self, job: str) -> Path:
        """The folder of a job's ledger."""
        return self.folder / f"{job}-ledger"

    def verify(self, job: str) -> Object:
        """`slackwater clean verify` on a job's ledger."""
        command = [sys.executable, "-m", "slackwater_operator", "clean", "verify", str(self.ledger(job)), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report: Object = json.loads(done.stdout)
        return report

    # --- what is made ---------------------------------------------------------------------------

    def add_job(self, workers: int, *, items: str = "many", args: Sequence[str] = (), **spec: Any) -> str:
        """A job with a ledger of its own; its name.   items: `many` or `some` recordings.   args: other ones of its
        workers than the operator's."""
        self._jobs += 1
        name = f"clean-{self._jobs}"
        folder = self.ledger(name)
        folder.mkdir()
        os.chown(folder, USER, USER)
        for body in host_volume(DATA, f"{name}-ledger", folder):
            self.admin.apply(body)
        worker = {
            "name": names.WORKER_CONTAINER,
            "image": WORKER_IMAGE,
            "imagePullPolicy": "Never",
            "resources": {"requests": {"cpu": "50m"}},
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            **({"args": [*args]} if args else {}),
        }
        given = {
            "maxWorkers": workers,
            "ledger": {"claimName": f"{name}-ledger"},
            "input": {"claimName": items},
            "template": {"spec": {"terminationGracePeriodSeconds": 20, "containers": [worker]}},
        }
        self.admin.create(a_job(name, DATA, **given | spec))
        return name

    def add_service(self, replicas: int = 1, **spec: Any) -> None:
        """A service of stand-in engines, whose traffic a test says to the stand-in gateway unless it has its own."""
        engine = {
            "name": names.ENGINE_CONTAINER,
            "image": BUSYBOX_IMAGE,
            "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", ENGINE],
            # A machine that runs all of a site takes seconds to enter a container.
            "startupProbe": {**SAYS_YES, "periodSeconds": 1, "failureThreshold": 100},
            "readinessProbe": {**SAYS_YES, "periodSeconds": 2, "failureThreshold": 10},
        }
        given = {
            "minReplicas": replicas,
            "maxReplicas": replicas,
            "gateway": {"controlURL": self.gateway.real.url},
            "variants": [{"flavor": "h200", "slotsPerReplica": SLOTS}],
            "template": {"spec": {"terminationGracePeriodSeconds": 10, "containers": [engine]}},
        }
        self.admin.create(a_service(namespace=SERVING, **given | spec))

    def want(self, replicas: int) -> None:
        """So much traffic that this many replicas are needed, and no more."""
        change = {"spec": {"maxReplicas": replicas}}
        self.admin.patch("inferencedeployments.slackwater.dev", "tts", change, SERVING)
        self.gateway.say(in_flight=replicas * SLOTS, queued=0, arrivals_total=replicas * SLOTS)

    def clean(self) -> None:
        """Nothing of a test is left; returns when every pod is gone."""
        self.gateway.say(in_flight=0, queued=0)
        for plural, namespace in (
            ("inferencedeployments.slackwater.dev", SERVING),
            ("cleaningjobs.slackwater.dev", DATA),
            ("reclaims.slackwater.dev", SERVING),
            ("reclaims.slackwater.dev", DATA),
        ):
            self.admin.delete_all(plural, namespace)
        for namespace in (SERVING, DATA):
            self.admin.delete_all("deployments.apps", namespace)
            self.admin.delete_all("pods", namespace)
        wait_until(lambda: not any(self.admin.list("pods", namespace) for namespace in (SERVING, DATA)), PATIENCE_S)


def is_ready(pod: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


@contextmanager
def site(programs: Programs, images: Images) -> Iterator[Site]:
    """Three nodes with everything installed and nothing running."""
    with ExitStack() as stack:
        # Not pytest's own folder: pods of this machine's nodes mount what is in it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="site-", dir="/var/tmp")))
        folder.chmod(0o755)
        runs = cache_folder(os.environ) / "controlplane/runs"
        cluster = stack.enter_context(NodeCluster(programs, runs, NODES))
        cluster.load(*(images.ours(name).archive for name in ("operator", "worker")))
        gateway = Gateway()
        stack.callback(gateway.close)
        found = Site(cluster, gateway, folder)
        install(found)
        record(folder)
        for name in ("many", "some"):
            for body in host_volume(DATA, name, folder / name):
                cluster.admin.apply(body)
        cluster.admin.apply(a_flavor(nodeSelector={PRODUCT: "NVIDIA-H200"}))
        cluster.admin.apply(a_pool(lending={"lendAfter": "1s"}))
        yield found


def install(on: Site) -> None:
    """As manifests/README.md says; then the operator's own pods make room for the one beside the cluster."""
    on.kubectl("apply", "--server-side", "-k", str(OVERLAY.parents[1] / "crd"))
    on.admin.wait_established(*(kind.crd for kind in names.KINDS))
    on.kubectl("apply", "--server-side", "-k", str(OVERLAY))
    on.kubectl("scale", "deployment", names.SERVICE_ACCOUNT, "-n", names.OPERATOR_NAMESPACE, "--replicas=0")
    for namespace in (SERVING, DATA):
        on.admin.wait_for("serviceaccounts", "default", namespace=namespace)


def record(folder: Path) -> None:
    """Recordings of noise, each another: equal content would be one item."""
    noise = np.random.default_rng(5).normal(0, 2000, RATE * ITEM_S)
    for name, count in (("many", MANY), ("some", SOME)):
        (folder / name).mkdir()
        for number in range(count):
            with wave.open(str(folder / name / f"{number}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes(np.roll(noise, 997 * number).astype("<i2").tobytes())
