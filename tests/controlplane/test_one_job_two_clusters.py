"""One CleaningJob with workers on a real Kubernetes and a real Slurm at the same time, over one ledger."""

import json
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from slackwater_controlplane.client import Object
from slackwater_controlplane.fixtures_gateway import container_images  # noqa: F401 - a fixture
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import PRODUCT, NodeCluster
from slackwater_operator.demo.plan import free_port
from slackwater_operator.resources import names
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool
from slackwater_slurm.lab import Lab, why_not
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify

pytestmark = [pytest.mark.controlplane, pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ITEMS, ITEM_S, RATE = 160, 20, 16_000
PATIENCE_S = 240.0
JOB, NAMESPACE = "shared", "both"


@pytest.fixture
def lab() -> Iterator[Lab]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    # Not pytest's own folder: its path can be too long for munge's socket.
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as folder, Lab(Path(folder)) as lab:
        yield lab


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that pods of this machine's nodes may mount."""
    with tempfile.TemporaryDirectory(prefix="both-", dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "ledger").mkdir()
        (folder / "in").mkdir()
        noise = np.random.default_rng(6).normal(0, 2000, RATE * ITEM_S)
        for number in range(ITEMS):
            with wave.open(str(folder / "in" / f"{number}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes(np.roll(noise, 997 * number).astype("<i2").tobytes())
        yield folder


@contextmanager
def running(log: Path, *words: str, env: dict[str, str] | None = None) -> Iterator[None]:
    """One of our commands, for as long as the block lasts."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "slackwater_operator", *words], stdout=out, stderr=out, env=env
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def volume(name: str, path: Path) -> list[Object]:
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    given = {"capacity": size, "hostPath": {"path": str(path), "type": "Directory"}}
    claimed = {"volumeName": f"{NAMESPACE}-{name}", "resources": {"requests": size}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{NAMESPACE}-{name}"},
            "spec": common | given,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": common | claimed,
        },
    ]


def shared_job(folder: Path) -> Object:
    """Of both placements.  As root, as Slurm's workers of this lab are: a ledger's folders belong to who made them."""
    worker = {"name": names.WORKER_CONTAINER, "image": "slackwater/worker:0.1.0", "imagePullPolicy": "Never"}
    root = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0, "fsGroup": 0}
    pod = {"terminationGracePeriodSeconds": 20, "securityContext": root, "containers": [worker]}
    return a_job(
        JOB,
        NAMESPACE,
        flavors=["h200", "rtx5090"],
        maxWorkers=6,
        placement=["Kubernetes", "Slurm"],
        ledger={"claimName": "ledger"},
        input={"claimName": "in"},
        slurm={"inputPath": str(folder / "in"), "ledgerPath": str(folder / "ledger")},
        template={"spec": pod},
    )


def until(is_so: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.2)


def test_workers_of_both_clusters_share_one_ledger_and_each_item_is_there_once(
    node_cluster: NodeCluster,
    container_images: Images,  # noqa: F811 - a fixture
    lab: Lab,
    folder: Path,
) -> None:
    admin, kubeconfig = node_cluster.admin, node_cluster.plane.kubeconfig()
    node_cluster.load(container_images.ours("worker").archive)
    node_cluster.kubectl("apply", "--server-side", "-k", str(ROOT / "manifests/crd"))
    admin.wait_established(*(kind.crd for kind in names.KINDS))
    for one in names.PRIORITIES:
        admin.apply(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": one.name},
                "value": one.value,
            }
        )
    for name in (names.OPERATOR_NAMESPACE, NAMESPACE):
        admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    products = {"h200": "NVIDIA-H200", "rtx5090": "NVIDIA-GeForce-RTX-5090"}
    for flavor, product in products.items():
        admin.apply(a_flavor(flavor, nodeSelector={PRODUCT: product}, slurmGres=f"gpu:{flavor}"))
    admin.apply(a_pool(flavors=[{"name": name} for name in products], lending={"lendAfter": "0s"}))
    for body in (*volume("ledger", folder / "ledger"), *volume("in", folder / "in")):
        admin.apply(body)
    settings = {
        "state_dir": str(folder / "state"),
        "tick_s": 0.5,
        "progress_s": 1,
        "slurm_conf": str(lab.conf),
        "kubernetes": {
            "kubeconfig": str(kubeconfig),
            "pools": ["east"],
            "workers": {"memory_mb_per_worker": 100, "program": str(ROOT / ".venv/bin/slackwater")},
        },
    }
    (folder / "slurm.yaml").write_text(json.dumps(settings))
    ports = ("--host", "127.0.0.1", "--metrics-port", "0", "--probes-port", str(free_port()))

    def status() -> Object:
        found: Object = admin.get("cleaningjobs.slackwater.dev", JOB, NAMESPACE).get("status") or {}
        return found

    def sides() -> tuple[int, int]:
        """Workers that run on Kubernetes and on Slurm, as the job's status says."""
        now = status()
        return now.get("workers", {}).get("running", 0), (now.get("slurm") or {}).get("running", 0)

    with ExitStack() as stack:
        operator = ("operator", "run", "--kubeconfig", str(kubeconfig), *ports)
        stack.enter_context(running(folder / "operator.log", *operator))
        controller = ("slurm", "run", "--config", str(folder / "slurm.yaml"))
        stack.enter_context(running(folder / "slurm.log", *controller, env=lab.environment()))
        stack.callback(lambda: sys.stderr.write((folder / "operator.log").read_text()[-3000:]))
        stack.callback(lambda: sys.stderr.write((folder / "slurm.log").read_text()[-3000:]))
        admin.apply(shared_job(folder))

        until(lambda: min(sides()) > 0, "workers on both sides at the same time")
        both = sides()
        until(lambda: status().get("items", {}).get("done") == ITEMS, "every item is done")

    report = verify(PosixStore(folder / "ledger"))
    workers = {json.loads(path.read_text())["worker"] for path in (folder / "ledger/done").iterdir()}
    assert sum(both) <= 6
    assert (report.items_done, report.items_lost, report.items_doubled) == (ITEMS, 0, 0)
    assert any(JOB in worker for worker in workers), "a pod finished a shard"
    assert any(JOB not in worker for worker in workers), "a Slurm task finished a shard"
