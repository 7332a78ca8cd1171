"""One CleaningJob with workers on a real Kubernetes and a real Slurm at the same time, over one ledger.

Once with the Slurm controller as a process beside the operator, and once inside it, with a failover of both sides.
"""

import json
import subprocess
import sys
import tempfile
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from slackwater_controlplane.client import Object
from slackwater_controlplane.fixtures_gateway import container_images  # noqa: F401 - a fixture
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import PRODUCT, NodeCluster
from slackwater_controlplane.node.pods import host_volume
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import OperatorProcess, wait_until
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool
from slackwater_slurm.lab import Lab, why_not
from slackwater_slurm.lab_config import CLUSTER
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify

pytestmark = [pytest.mark.controlplane, pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ITEMS, ITEM_S, RATE = 240, 20, 16_000
SHARD_ITEMS = 6  # so small that a worker that comes late still finds some
PATIENCE_S = 120.0
JOB, MAX_WORKERS = "shared", 6
PRODUCTS = {"h200": "NVIDIA-H200", "rtx5090": "NVIDIA-GeForce-RTX-5090"}


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


@dataclass(frozen=True, slots=True)
class Stage:
    """A cluster that is ready for the shared job, and a Slurm beside it.   name: of the namespace."""

    cluster: NodeCluster
    lab: Lab
    folder: Path
    name: str

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.plane.kubeconfig()

    def configuration(self, name: str, **kubernetes: str) -> Path:
        """A Slurm controller's file, with a state folder of its own."""
        workers = {"memory_mb_per_worker": 100, "program": str(ROOT / ".venv/bin/slackwater")}
        settings = {
            "state_dir": str(self.folder / f"state-{name}"),
            "tick_s": 0.5,
            "progress_s": 1,
            "slurm_conf": str(self.lab.conf),
            "kubernetes": {"pools": ["east"], "workers": workers, **kubernetes},
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(settings))
        return file

    def operator(self, name: str, *more: str) -> OperatorProcess:
        return OperatorProcess(name, self.kubeconfig, self.folder, self.lab.environment(), *more)

    def begin(self) -> None:
        self.cluster.admin.apply(shared_job(self.folder, self.name))

    def status(self) -> Object:
        job = self.cluster.admin.get("cleaningjobs.slackwater.dev", JOB, self.name)
        found: Object = job.get("status") or {}
        return found

    def sides(self) -> tuple[int, int]:
        """Workers that run on Kubernetes and on Slurm, as the job's status says."""
        now = self.status()
        return now.get("workers", {}).get("running", 0), (now.get("slurm") or {}).get("running", 0)

    def is_shared(self) -> bool:
        """Both have workers, and no more of them together than the job may have."""
        sides = self.sides()
        return min(sides) > 0 and sum(sides) <= MAX_WORKERS

    def done(self) -> int:
        return int((self.status().get("items") or {}).get("done") or 0)

    def arrays(self) -> set[str]:
        """Those that Slurm has of ours."""
        return set(self.lab.run("squeue", "-h", "-r", "-p", "cleaning", "-o", "%F").split())

    def check_ledger(self) -> None:
        """Each item is there once, and workers of both sides finished shards; a pod's name begins with the job's."""
        report = verify(PosixStore(self.folder / "ledger"))
        assert (report.items_done, report.items_lost, report.items_doubled) == (ITEMS, 0, 0)
        workers = {json.loads(path.read_text())["worker"] for path in (self.folder / "ledger/done").iterdir()}
        assert len({worker.startswith(JOB) for worker in workers}) == 2, workers


@pytest.fixture
def stage(
    node_cluster: NodeCluster,
    container_images: Images,  # noqa: F811 - a fixture
    folder: Path,
    lab: Lab,  # after the folder, so that its workers are gone before that is
) -> Iterator[Stage]:
    admin = node_cluster.admin
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
                "preemptionPolicy": "PreemptLowerPriority" if one.preempts else "Never",
            }
        )
    stage = Stage(node_cluster, lab, folder, folder.name.replace("_", "x"))
    for name in (names.OPERATOR_NAMESPACE, stage.name):
        admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    for flavor, product in PRODUCTS.items():
        admin.apply(a_flavor(flavor, nodeSelector={PRODUCT: product}, slurmGres=f"gpu:{flavor}"))
    flavors = [{"name": name} for name in PRODUCTS]
    admin.apply(a_pool(flavors=flavors, lending={"lendAfter": "0s"}, slurm={"cluster": CLUSTER}))
    for name in ("ledger", "in"):
        for body in host_volume(stage.name, name, folder / name):
            admin.apply(body)
    yield stage
    for log in sorted(folder.glob("*.log")):
        sys.stderr.write(f"--- {log.name}\n{log.read_text()[-3000:]}")
    pods = ("-n", stage.name, "-l", f"{names.LABEL_KIND}={names.POD_CLEANING}")
    for words in (("get", "pods", "-o", "wide", *pods), ("logs", "--prefix", "--tail", "20", *pods)):
        sys.stderr.write(f"--- kubectl {words[0]}\n{node_cluster.kubectl(*words).stdout[-3000:]}")
    if admin.find("cleaningjobs.slackwater.dev", JOB, stage.name) is not None:
        admin.delete("cleaningjobs.slackwater.dev", JOB, stage.name)
    admin.delete_all("pods", stage.name, grace_s=10)  # gone from the API only when their containers are
    for left in admin.list("pods", stage.name):
        admin.wait_gone("pods", left["metadata"]["name"], stage.name)
    admin.delete("namespaces", stage.name)


@contextmanager
def beside(stage: Stage, file: Path) -> Iterator[None]:
    """The Slurm controller as a process of its own, for as long as the block lasts."""
    with (stage.folder / "slurm.log").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "slackwater_operator", "slurm", "run", "--config", str(file)],
            stdout=out,
            stderr=out,
            env=stage.lab.environment(),
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def shared_job(folder: Path, namespace: str) -> Object:
    """Of both placements.  As root, as Slurm's workers of this lab are: a ledger's folders belong to who made them."""
    worker = {
        "name": names.WORKER_CONTAINER,
        "image": "slackwater/worker:0.1.0",
        "imagePullPolicy": "Never",
        "args": [
            *("clean", "run", "/input", "--output", "/ledger", "--job", JOB, "--worker", "$(POD_NAME)"),
            *("--receipt-file", names.RECEIPT_PATH, "--set", f"shard_items={SHARD_ITEMS}"),
        ],
        "resources": {"requests": {"cpu": "250m"}},  # without, Slurm's workers leave pods no time on a busy machine
    }
    root = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0, "fsGroup": 0}
    pod = {"terminationGracePeriodSeconds": 20, "securityContext": root, "containers": [worker]}
    return a_job(
        JOB,
        namespace,
        flavors=[*PRODUCTS],
        maxWorkers=MAX_WORKERS,
        placement=["Kubernetes", "Slurm"],
        ledger={"claimName": "ledger"},
        input={"claimName": "in"},
        slurm={
            "inputPath": str(folder / "in"),
            "ledgerPath": str(folder / "ledger"),
            "settings": {"shard_items": str(SHARD_ITEMS)},
        },
        template={"spec": pod},
    )


def test_workers_of_both_clusters_share_one_ledger_and_each_item_is_there_once(stage: Stage) -> None:
    file = stage.configuration("slurm", kubeconfig=str(stage.kubeconfig))
    with stage.operator("operator"), beside(stage, file):
        stage.begin()

        wait_until(stage.is_shared, PATIENCE_S, lambda: f"workers on both sides at the same time: {stage.sides()}")
        wait_until(lambda: stage.done() == ITEMS, PATIENCE_S, lambda: "every item is done")

    stage.check_ledger()


def test_the_operator_alone_runs_both_sides_and_another_replica_takes_both_over(stage: Stage) -> None:
    one, two = (stage.operator(name, "--side", f"slurm={stage.configuration(name)}") for name in ("one", "two"))
    with one, two:
        wait_until(lambda: one.leads() != two.leads(), PATIENCE_S, lambda: "one of two leads")
        first, second = (one, two) if one.leads() else (two, one)
        stage.begin()
        wait_until(stage.is_shared, PATIENCE_S, lambda: f"workers on both sides at the same time: {stage.sides()}")
        arrays = stage.arrays()
        assert "side slurm begins" not in second.words()

        first.kill()
        wait_until(lambda: any(map(is_of_slurm, second.metrics())), PATIENCE_S, lambda: "the other sees the Slurm too")
        assert stage.done() < ITEMS, "the failover was in the middle of the job"
        assert stage.arrays() == arrays
        wait_until(lambda: stage.done() == ITEMS, PATIENCE_S, lambda: "every item is done")
        wait_until(lambda: not stage.arrays(), PATIENCE_S, lambda: "the arrays of a finished job are gone")
        assert second.stop() == 0

    stage.check_ledger()
    assert "submit job=" in first.words()
    assert "submit job=" not in second.words(), "it adopted the arrays that it found"


def is_of_slurm(metric: str) -> bool:
    return metric.startswith("slurm_bridge_gpus{")
