"""`KubeCluster` on a real API server with a real scheduler; kwok's nodes and pods.

What the pretended server cannot show: that the scheduler keeps a freed GPU for the replica that was nominated for it,
that our objects are taken by the server as they are, and what a burst costs.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slackwater_controlplane import stages
from slackwater_controlplane.client import Admin, Object
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.kwok import Kwok
from slackwater_operator.core import Action, Kind, Limits, Phase, Reason, TrafficSample, Verb
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.types import PODS
from slackwater_operator.loop import Loop, ServiceSpec, VariantSpec
from slackwater_operator.resources import Reclaim, names, parse
from slackwater_operator.testing import resources
from slackwater_operator.testing.kube_operator import Crash, Part
from slackwater_operator.traffic import Window

pytestmark = pytest.mark.controlplane

ROOT = Path(__file__).parents[2]
PRODUCT = "NVIDIA-H200"
RECEIPT = json.dumps({"path": "/ledger/part/h0/1", "size_bytes": 9, "sha256": "ab" * 32, "unit": "u", "items": 7})
WITHIN_S = 30.0
SLOTS = 64


class Field(Part):
    """A namespace of a real cluster, with a pool of its own nodes."""

    def __init__(self, plane: ControlPlane, kwok: Kwok, namespace: str) -> None:
        super().__init__(time.monotonic, time.time)
        self.plane, self.kwok, self.namespace = plane, kwok, namespace
        self.admin: Admin = plane.admin
        self.variant = names.variant_uid(namespace, "tts", namespace, "h200")
        self.job = names.object_uid(namespace, "clean")

    def connection(self) -> Connection:
        return Connection.from_kubeconfig(self.plane.kubeconfig())

    def set_up(self, nodes: int, gpus: int, *, worker: dict[str, str] | None = None, **job: Any) -> list[str]:
        """Pool, flavor, service, job and nodes; returns the nodes.   worker: annotations of each worker's pod."""
        zone = {"zone": self.namespace}
        self.admin.apply(resources.a_flavor("h200", nodeSelector={"nvidia.com/gpu.product": PRODUCT}))
        self.admin.apply(resources.a_pool(self.namespace, nodeSelector=zone, lending={"lendAfter": "0s"}))
        service = {"pools": [self.namespace], "minReplicas": 0, "maxReplicas": 9999}
        self.admin.apply(resources.a_service("tts", self.namespace, **service))
        container = {"name": names.WORKER_CONTAINER, "image": "worker:1"}
        template = {
            "metadata": {"annotations": worker or {stages.MESSAGE: RECEIPT, stages.FLUSH_S: "0.3"}},
            "spec": {"containers": [container]},
        }
        given = {"pools": [self.namespace], "maxWorkers": 9999, "template": template} | job
        self.admin.apply(resources.a_job("clean", self.namespace, **given))
        return self.kwok.add_nodes(nodes, prefix=self.namespace, gpus=gpus, labels=zone)

    def pods(self, kind: str) -> list[Object]:
        labels = f"{names.LABEL_KIND}={kind}"
        return self.admin.list("pods", self.namespace, labels=labels)

    async def fill(self, count: int) -> list[str]:
        """Start workers; returns their uids when all are seen to run."""
        self.cluster.observe(time.monotonic())
        action = Action(Verb.START, self.job, count, Reason.IDLE)
        assert await self.cluster.apply([action], time.monotonic()) == ()
        await self.until(lambda: self.count(Kind.CLEANING, Phase.RUNNING) == count)
        return sorted(w.uid for w in self.cluster.observe(time.monotonic()).workloads)

    async def evict(self, uids: list[str], reason: Reason = Reason.TRAFFIC) -> tuple[Any, ...]:
        now_s = time.monotonic()
        self.cluster.observe(now_s)
        return await self.cluster.apply([Action(Verb.EVICT, uid, 1, reason, self.variant) for uid in uids], now_s)

    async def start(self, count: int) -> None:
        """START replicas."""
        self.cluster.observe(time.monotonic())
        action = Action(Verb.START, self.variant, count, Reason.TRAFFIC)
        assert await self.cluster.apply([action], time.monotonic()) == ()

    def rival(self, name: str = "train") -> None:
        """Somebody's pod that waits for a GPU of our nodes; it does not preempt, so it only waits."""
        self.admin.apply(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": "patient-training"},
                "value": names.PRIORITY_TRAINING.value,
                "preemptionPolicy": "Never",
            }
        )
        container = {
            "name": "main",
            "image": "train:1",
            "resources": {"limits": {names.DEFAULT_GPU_RESOURCE: "1"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        spec = {
            "priorityClassName": "patient-training",
            "nodeSelector": {"zone": self.namespace},
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        }
        metadata = {"name": name, "namespace": self.namespace}
        self.admin.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def count(self, kind: Kind, phase: Phase) -> int:
        seen = self.cluster.observe(time.monotonic())
        return sum(w.kind is kind and w.phase is phase for w in seen.workloads)

    async def until(self, holds: Callable[[], object], within_s: float = WITHIN_S) -> float:
        """Tend until it holds; returns the seconds that it took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < within_s, (
                f"not within {within_s} s: {self.admin.list('pods', self.namespace)[:3]}"
            )
            await self.cluster.tend(time.monotonic())
            await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    def over_allocated(self) -> list[str]:
        """Nodes of ours that hold more pods than GPUs."""
        held: dict[str, list[str]] = {}
        for pod in self.admin.list("pods", self.namespace):
            if pod["spec"].get("nodeName") and pod["status"]["phase"] not in ("Succeeded", "Failed"):
                held.setdefault(pod["spec"]["nodeName"], []).append(pod["metadata"]["name"])  # each wants one GPU
        return [
            f"{node['metadata']['name']}: {held[node['metadata']['name']]}"
            for node in self.admin.list("nodes")
            if len(held.get(node["metadata"]["name"], ()))
            > int(node["status"]["allocatable"].get(names.DEFAULT_GPU_RESOURCE, 0))
        ]

    def reclaims(self) -> list[Reclaim]:
        return [parse(Reclaim, one) for one in self.admin.list("reclaims.slackwater.dev", self.namespace)]


@pytest.fixture(scope="module")
def kinds(control_plane: ControlPlane) -> ControlPlane:
    """The shared control plane with our kinds and priorities."""
    admin = control_plane.admin
    admin.apply_file(*(ROOT / "manifests/crd" / f"{kind.plural}.yaml" for kind in names.KINDS))
    admin.wait_established(*(kind.crd for kind in names.KINDS))
    for priority in names.PRIORITIES:
        admin.apply(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": priority.name},
                "value": priority.value,
                "preemptionPolicy": "PreemptLowerPriority" if priority.preempts else "Never",
            }
        )
    return control_plane


@pytest.fixture
def place(kinds: ControlPlane, namespace: str) -> Iterator[str]:
    """A namespace whose pool goes with it."""
    kinds.admin.patch(
        "namespaces", namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    yield namespace
    kinds.admin.delete("capacitypools.slackwater.dev", namespace)


@asynccontextmanager
async def field(
    plane: ControlPlane, kwok: Kwok, namespace: str, nodes: int, gpus: int, **rest: Any
) -> AsyncIterator[Field]:
    made = Field(plane, kwok, namespace)
    made.set_up(nodes, gpus, **rest)
    await made.begin()
    try:
        yield made
    finally:
        await made.end()


@pytest.mark.parametrize("count", [1, 8])
async def test_takes_back_exactly_as_many_gpus_as_replicas_then_serve_on(
    kinds: ControlPlane, kwok: Kwok, place: str, count: int
) -> None:
    async with field(kinds, kwok, place, nodes=2, gpus=8) as it:
        workers = await it.fill(16)
        it.forget_writes()

        refusals = await it.evict(workers[:count])
        await it.until(lambda: it.count(Kind.CLEANING, Phase.LEAVING) == 0)
        await it.start(count)
        await it.until(lambda: it.count(Kind.INFERENCE, Phase.RUNNING) == count)
        await it.until(lambda: [one.status.phase for one in it.reclaims()] == ["Serving"])

        [reclaim] = it.reclaims()
        assert refusals == ()
        assert len(it.pods(names.POD_CLEANING)) == 16 - count
        assert len(it.pods(names.POD_INFERENCE)) == count
        assert {(one.outcome, one.verified) for one in reclaim.status.victims} == {("Checkpointed", True)}
        assert it.over_allocated() == []
        assert len(it.writes) <= 2 * count + 4  # the record's, one or two of them in between when it lasts


async def test_a_pending_pod_of_lower_priority_does_not_get_the_gpu_that_was_freed_for_a_replica(
    kinds: ControlPlane, kwok: Kwok, place: str
) -> None:
    async with field(kinds, kwok, place, nodes=1, gpus=4, worker={stages.MESSAGE: RECEIPT}) as it:
        workers = await it.fill(4)
        it.rival()
        await it.until(lambda: it.caches.pods.get(place, "train") is not None)

        for worker in workers[:3]:
            # Long enough for the scheduler to try the rival again at once, before a replica that it has just refused.
            await asyncio.sleep(1.5)
            await it.evict([worker])
            await it.until(lambda: it.count(Kind.CLEANING, Phase.LEAVING) == 0)
            await asyncio.sleep(0.5)  # as long as a tick, in which the scheduler may do what it likes
        await it.until(lambda: it.count(Kind.INFERENCE, Phase.RUNNING) == 3)

        assert "nodeName" not in kinds.admin.get("pods", "train", place)["spec"]
        assert it.over_allocated() == []


async def test_a_hanging_victim_is_followed_by_another_and_no_gpu_goes_to_two(
    kinds: ControlPlane, kwok: Kwok, place: str
) -> None:
    async with field(kinds, kwok, place, nodes=1, gpus=2) as it:
        pool = resources.a_pool(
            place,
            nodeSelector={"zone": place},
            lending={"lendAfter": "0s"},
            reclaim={"deadline": "2s", "retargetAfter": "1s"},
        )
        kinds.admin.apply(pool)
        workers = await it.fill(2)
        it.rival()
        await it.until(lambda: it.caches.pods.get(place, "train") is not None)
        name = workers[0].split("/")[1]
        kinds.admin.patch("pods", name, {"metadata": {"labels": {stages.STUCK: "true"}}}, place)
        await it.evict(workers[:1])
        await it.until(lambda: not it.pods(names.POD_INFERENCE))

        await it.evict(workers[1:], Reason.RETARGET)
        await it.until(lambda: it.count(Kind.INFERENCE, Phase.RUNNING) == 1)
        await it.until(lambda: any(reason == "ReclaimDeadlineExceeded" for _, reason in it.events))
        kinds.admin.delete("pods", name, place, grace_s=0)
        await it.until(lambda: kinds.admin.get("pods", "train", place)["spec"].get("nodeName"))

        assert len(it.pods(names.POD_INFERENCE)) == 1
        assert it.over_allocated() == []


async def test_work_on_a_node_that_is_gone_starts_elsewhere(kinds: ControlPlane, kwok: Kwok, place: str) -> None:
    async with field(kinds, kwok, place, nodes=2, gpus=1) as it:
        workers = await it.fill(2)
        node = it.admin.get("pods", workers[0].split("/")[1], place)["spec"]["nodeName"]
        kinds.admin.delete("nodes", node)

        await it.until(lambda: workers[0] not in {w.uid for w in it.cluster.observe(time.monotonic()).workloads})

        assert [one["metadata"]["name"] for one in it.pods(names.POD_CLEANING)] == [workers[1].split("/")[1]]


@pytest.mark.parametrize(
    ("rival", "when", "number"),
    [
        *((False, when, number) for when in ("before", "after") for number in range(6)),
        *((True, "before", number) for number in range(12)),
    ],
)
async def test_killed_at_any_write_the_next_operator_ends_where_an_undisturbed_one_does(
    kinds: ControlPlane, kwok: Kwok, place: str, rival: bool, when: str, number: int
) -> None:
    need = 2
    async with field(kinds, kwok, place, nodes=2, gpus=2) as it:
        await it.fill(4)
        if rival:
            it.rival()
            await it.until(lambda: it.caches.pods.get(place, "train") is not None)
        it.forget_writes()
        setattr(it, f"crash_{when}", number)
        spec = ServiceSpec(f"{place}/tts", 0, 4, (VariantSpec(it.variant, f"{place}/h200", SLOTS),), 0, 1, Window())
        loop = Loop(it.cluster, [spec], Limits())
        asked: set[str] = set()
        ends_s = time.monotonic() + WITHIN_S
        while it.count(Kind.INFERENCE, Phase.RUNNING) < need or not all(
            one.status.phase == "Serving" for one in it.reclaims()
        ):
            assert time.monotonic() < ends_s
            now_s = time.monotonic()
            it.signals.samples.append((f"{place}/tts", TrafficSample(now_s, SLOTS * need - 8, 0, 10)))
            try:
                await loop.tick(now_s)
                await it.cluster.tend(now_s)
            except Crash:
                await it.restart()
                loop = Loop(it.cluster, [spec], Limits())
            asked |= {w.uid for w in it.cluster.observe(now_s).workloads if w.phase is Phase.LEAVING}
            assert it.over_allocated() == []
            await asyncio.sleep(0.05)

        assert it.crashed
        assert len(it.pods(names.POD_INFERENCE)) == need
        assert len(it.pods(names.POD_CLEANING)) == 4 - need
        assert sum(len(one.spec.victims or ()) for one in it.reclaims()) == need


async def test_no_list_is_made_once_the_caches_are_filled(kinds: ControlPlane, kwok: Kwok, place: str) -> None:
    async with field(kinds, kwok, place, nodes=1, gpus=4) as it:
        workers = await it.fill(4)

        await it.evict(workers[:2])
        await it.until(lambda: it.count(Kind.CLEANING, Phase.LEAVING) == 0)
        await it.start(2)
        await it.until(lambda: it.count(Kind.INFERENCE, Phase.RUNNING) == 2)

        assert it.kube.counts["list", PODS.plural] == 1
        assert sum(count for (verb, _), count in it.kube.counts.items() if verb == "list") == 7
