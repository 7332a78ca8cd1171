"""Why a job or a service does not do what was asked of it: conditions and Events, against a pretended API server."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from slackwater_operator.core import Action, Phase, Reason, Verb
from slackwater_operator.kube.types import EVENTS, NODES, PODS, Object, stamp
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.children import Images
from slackwater_operator.operate.decisions import tell
from slackwater_operator.operate.endpoints import Endpoints
from slackwater_operator.operate.lead import Leader, Means
from slackwater_operator.operate.metrics import Metrics
from slackwater_operator.operate.settings import Settings
from slackwater_operator.operate.statuses.obstacles import Obstacles
from slackwater_operator.operate.watches import Watches, resource_of
from slackwater_operator.resources import names
from slackwater_operator.testing import cases
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

RESOURCES = {kind.kind: resource_of(kind) for kind in names.KINDS}
ALONE: dict[str, Any] = {"ledger": None, "checkpoint": {"verify": "None"}}  # a job without a keeper
SOON = {"lending": {"lendAfter": "1s"}}
NO_LEND = {"inference": {"reservedGPUs": 8}}


async def until(what: Callable[[], object], timeout_s: float = 8.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.01)


@dataclass
class Rig:
    """A leader over a pretended cluster of one node with 4 GPUs.   events: (name, reason, message)."""

    fake: FakeKube
    watches: Watches
    events: list[tuple[str, str, str]]
    ahead_s: float = 0.0  # of the machine's clock

    def wall(self) -> float:
        return time.time() + self.ahead_s

    def condition(self, obj: Object, type_: str) -> tuple[str, str, str]:
        """(status, reason, message); three times "" before it was written."""
        metadata = obj["metadata"]
        there = self.fake.get(RESOURCES[obj["kind"]], metadata["name"], metadata.get("namespace")) or {}
        for one in (there.get("status") or {}).get("conditions") or ():
            if one["type"] == type_:
                return one["status"], one["reason"], one["message"]
        return "", "", ""

    async def reads(self, obj: Object, type_: str, reason: str, *words: str) -> tuple[str, str, str]:
        """Wait until a condition has a reason, and all of these words."""
        try:
            await until(lambda: self._is(obj, type_, reason, words))
        except TimeoutError:
            raise AssertionError(f"{type_} is {self.condition(obj, type_)}, wanted {reason} with {words}") from None
        return self.condition(obj, type_)

    def _is(self, obj: Object, type_: str, reason: str, words: tuple[str, ...]) -> bool:
        _, now, message = self.condition(obj, type_)
        return now == reason and all(word in message for word in words)

    def pods(self, kind: str) -> list[Object]:
        return [pod for pod in self.fake.objects(PODS) if pod["metadata"]["labels"][names.LABEL_KIND] == kind]

    async def a_pod(self, kind: str) -> tuple[str, str]:
        """(namespace, name) of the first of a kind, once it is there."""
        await until(lambda: self.pods(kind))
        metadata = self.pods(kind)[0]["metadata"]
        return metadata["namespace"], metadata["name"]

    def waits(self, pod: tuple[str, str], reason: str, message: str = "") -> None:
        """The kubelet says why the pod's container does not run."""
        state = {"waiting": {"reason": reason, "message": message}}
        containers = self.fake.get(PODS, pod[1], pod[0])["spec"]["containers"]  # type: ignore[index]
        found = [{"name": one["name"], "state": state} for one in containers]
        self.fake.update(PODS, pod[1], {"status": {"phase": "Pending", "containerStatuses": found}}, pod[0])

    def unscheduled(self, kind: str, owner: str, message: str, revision: str = "") -> None:
        """A pod of a Deployment or Job of ours that the scheduler finds no node for."""
        labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_KIND: kind, names.LABEL_OWNER: owner}
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        metadata = {"name": f"{owner}-{kind}-x", "namespace": "default", "labels": labels}
        metadata |= {"annotations": {names.ANNOTATION_REVISION: revision}} if revision else {}
        spec = {"containers": [{"name": kind}]}
        self.fake.put(
            PODS, {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", "conditions": [condition]}}
        )


@asynccontextmanager
async def leading(*objects: Object, nodes: int = 1) -> AsyncIterator[Rig]:
    async with FakeKube() as fake, fake.kube() as kube:
        for obj in (a_flavor(), *objects):
            obj["metadata"]["generation"] = 1
            fake.put(RESOURCES[obj["kind"]], obj)
        for index in range(nodes):
            fake.add_node(f"n-{index}", 4, {"nvidia.com/gpu.product": "h200"})
        watches = Watches(kube)
        running = asyncio.create_task(watches.run())
        await watches.synced()
        events: list[tuple[str, str, str]] = []

        def emit(obj: Object, type_: str, reason: str, message: str, action: str) -> None:
            events.append((obj["metadata"]["name"], reason, message))

        settings = Settings(identity="me", tick_s=0.2, look_s=0.1)
        rig = Rig(fake, watches, events)
        endpoints, catalog = Endpoints(watches.pods), Catalog.of(watches)
        means = Means(kube, watches, catalog, endpoints, settings, Metrics(), emit, wall=rig.wall)
        leader = asyncio.create_task(Leader(means, Images(), asyncio.Event()).run())
        try:
            yield rig
        finally:
            leader.cancel()
            running.cancel()
            await asyncio.gather(leader, running, return_exceptions=True)


# --- what a preemption leaves to a person -----------------------------------------------------------


async def test_a_job_on_hold_waits_for_a_person_and_has_neither_failed_nor_ended() -> None:
    job = a_job(**ALONE, maxWorkers=4, restartPolicy="Hold")
    async with leading(a_pool(**SOON), job) as rig:
        await until(lambda: len(rig.pods(names.POD_CLEANING)) == 4)
        for pod in rig.pods(names.POD_CLEANING):
            rig.fake.run_pod("default", pod["metadata"]["name"])
        await rig.reads(job, "Progressing", "WorkersRunning")

        rig.fake.update(NODES, "n-0", {"spec": {"unschedulable": True}})  # its workers are told to go
        await until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in rig.pods(names.POD_CLEANING)))
        for pod in rig.pods(names.POD_CLEANING)[:1]:
            rig.fake.finish_pod("default", pod["metadata"]["name"], 75)

        status, _, message = await rig.reads(job, "Progressing", "Held", "set suspend")
        assert status == "False"
        assert rig.condition(job, "Failed") == ("False", "Held", message)
        assert not [event for event in rig.events if event[1] == "BadConfiguration"]


# --- what does not start ----------------------------------------------------------------------------


async def test_workers_whose_image_cannot_be_had_are_named_with_the_kubelets_words() -> None:
    job = a_job(**ALONE, maxWorkers=1)
    async with leading(a_pool(**SOON), job) as rig:
        pod = await rig.a_pod(names.POD_CLEANING)

        rig.waits(pod, "ErrImagePull", "manifest for worker:1 not found")

        words = ("1 worker that holds GPUs cannot start", pod[1], "ErrImagePull: manifest for worker:1 not found")
        status, _, message = await rig.reads(job, "Progressing", "WorkersStuck", *words)
        assert status == "False"
        await until(lambda: ("podcasts", "WorkersStuck", message) in rig.events)


@pytest.mark.parametrize("may_look", [True, False], ids=["its Events are read", "no right to read Events"])
async def test_a_claim_that_is_missing_is_named_from_the_pods_events_or_it_is_said_how_to_look(may_look: bool) -> None:
    job = a_job(**ALONE, maxWorkers=1)
    async with leading(a_pool(**SOON), job) as rig:
        pod = await rig.a_pod(names.POD_CLEANING)
        note = 'persistentvolumeclaim "recordings" not found'
        if not may_look:
            rig.fake.fail("list", "events", code=403, reason="Forbidden", message="no", times=100)
        uid = rig.fake.get(PODS, pod[1], pod[0])["metadata"]["uid"]  # type: ignore[index]
        for index, (reason, said) in enumerate((("Older", "of no use"), ("FailedMount", note))):
            event = {"metadata": {"name": f"{pod[1]}.{index}", "namespace": pod[0]}, "type": "Warning", "note": said}
            event |= {"reason": reason, "regarding": {"uid": uid}, "deprecatedLastTimestamp": stamp(1e9 + index)}
            rig.fake.put(EVENTS, event)

        rig.waits(pod, "ContainerCreating")
        rig.ahead_s = 70.0

        if may_look:
            await rig.reads(job, "Progressing", "WorkersStuck", f"FailedMount: {note}")
        else:
            await rig.reads(job, "Progressing", "WorkersStarting", f"kubectl -n default describe pod {pod[1]}")


async def test_a_worker_that_only_takes_its_time_is_no_obstacle() -> None:
    job = a_job(**ALONE, maxWorkers=1)
    async with leading(a_pool(**SOON), job) as rig:
        pod = await rig.a_pod(names.POD_CLEANING)

        rig.waits(pod, "ContainerCreating")

        await asyncio.sleep(0.5)
        assert await rig.reads(job, "Progressing", "WorkersStarting") == ("True", "WorkersStarting", "")


async def test_a_need_is_not_met_by_a_replica_that_cannot_start() -> None:
    service = a_service(minReplicas=1)
    async with leading(a_pool(**SOON), service) as rig:
        pod = await rig.a_pod(names.POD_INFERENCE)

        rig.waits(pod, "ErrImageNeverPull", "image engine:1 is not on the node")

        words = (pod[1], "ErrImageNeverPull: image engine:1 is not on the node")
        await rig.reads(service, "NeedMet", "UnmetNeed", "1 replica is wanted, 1 is there: 1 cannot start", *words)
        await rig.reads(service, "Ready", "ReplicasStuck", *words)


async def test_a_keeper_that_waits_for_its_claim_is_named_with_it() -> None:
    job = a_job(ledger={"claimName": "podcasts-ledger"})
    async with leading(a_pool(**SOON), job) as rig:
        rig.unscheduled(names.POD_KEEPER, "podcasts", "0/1 nodes are available: pod has unbound immediate claims.")

        await rig.reads(job, "LedgerReadable", "KeeperStarting", "claim podcasts-ledger", "unbound immediate claims")


async def test_a_gate_whose_pod_finds_no_node_says_so_for_its_own_revision_only() -> None:
    gate = {"template": {"spec": {"containers": [{"name": "gate", "image": "gate:1"}]}}}
    service = a_service(minReplicas=0, revisionGate=gate)
    async with leading(a_pool(**SOON), service) as rig:
        await rig.reads(service, "RevisionGated", "GateRunning")
        revision = rig.condition(service, "RevisionGated")[2].split()[1]

        rig.unscheduled(names.POD_GATE, "tts", "0/1 nodes are available: 1 Insufficient cpu.", revision)

        await rig.reads(service, "RevisionGated", "GateRunning", "its pod does not start", "1 Insufficient cpu")


# --- what does not get a GPU ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "spec", "nodes", "reason", "words"),
    [
        pytest.param({}, {"maxWorkers": 0}, 1, "NoWorkersWanted", "kubectl -n default scale clj/podcasts", id="none"),
        pytest.param({}, {}, 0, "NoGPUs", "there is no GPU of h200 in east", id="no GPU in the pool"),
        pytest.param(NO_LEND, {}, 1, "GPUsReserved", "reservedGPUs is 8; there are 4 GPUs", id="all reserved"),
        pytest.param({}, {"gpusPerWorker": 8}, 1, "NoRoom", "no node has 8 idle GPUs together", id="too large"),
        pytest.param(
            {"lending": {"lendAfter": "10m"}}, {}, 1, "NoIdleGPUs", "has been idle for 600 s (lendAfter)", id="too soon"
        ),
        pytest.param(
            {"queues": [{"name": "asr", "maxGPUs": 0}]}, {"queue": "asr"}, 1, "QueueFull", "its queue asr", id="queue"
        ),
    ],
)
async def test_a_job_without_workers_says_what_is_in_the_way(
    pool: dict[str, Any], spec: dict[str, Any], nodes: int, reason: str, words: str
) -> None:
    job = a_job(**ALONE, **spec)
    async with leading(a_pool(**SOON | pool), job, nodes=nodes) as rig:
        await rig.reads(job, "Progressing", reason, words)


async def test_a_job_with_some_of_its_workers_says_why_there_are_no_more() -> None:
    job = a_job(**ALONE, maxWorkers=8)
    async with leading(a_pool(**SOON), job) as rig:
        await until(lambda: len(rig.pods(names.POD_CLEANING)) == 4)
        for pod in rig.pods(names.POD_CLEANING):
            rig.fake.run_pod("default", pod["metadata"]["name"])

        await rig.reads(job, "Progressing", "WorkersRunning", "4 of 8 run: no GPU of h200 in east has been idle")


async def test_a_worker_that_no_node_has_the_cpus_for_is_told_on_the_job() -> None:
    job = a_job(**ALONE, maxWorkers=1)
    async with leading(a_pool(**SOON), job) as rig:
        pod = await rig.a_pod(names.POD_CLEANING)

        rig.fake.refuse_pod(*pod, reason="OutOfcpu")

        words = (f"node n-0 did not take {pod[1]}: OutOfcpu", "lower what spec.template requests")
        await rig.reads(job, "Progressing", "NoRoom", *words)


async def test_a_queue_that_no_pool_has_is_a_warning_while_its_workers_run() -> None:
    job = a_job(**ALONE, queue="asr", maxWorkers=1)
    async with leading(a_pool(**SOON), job) as rig:
        pod = await rig.a_pod(names.POD_CLEANING)
        rig.fake.run_pod(*pod)

        status, _, message = await rig.reads(job, "Accepted", "QueueMissing", "a queue asr", "runs with weight 1")
        assert status == "True"
        await until(lambda: ("podcasts", "QueueMissing", message) in rig.events)


async def test_cordoned_gpus_and_a_pool_without_any_are_not_all_usable() -> None:
    full, empty = a_pool(**SOON), a_pool("west", nodeSelector={"topology.kubernetes.io/region": "nowhere"})
    async with leading(full, empty) as rig:
        await rig.reads(full, "CapacityComplete", "AllGPUsUsable")
        await rig.reads(empty, "CapacityComplete", "NoGPUs")

        rig.fake.update(NODES, "n-0", {"spec": {"unschedulable": True}})

        await rig.reads(full, "CapacityComplete", "GPUsCordoned", "4 GPUs", "n-0")


# --- Events -----------------------------------------------------------------------------------------


async def test_a_take_back_is_told_to_the_job_that_gives_its_gpus_up() -> None:
    async with leading(a_pool(**NO_LEND), a_job(**ALONE)) as rig:
        workers = [cases.worker(f"default/w-{index}", owner="default/podcasts") for index in range(3)]
        variant = names.variant_uid("serving", "tts", "east", "h200")
        evicted = [Action(Verb.EVICT, worker.uid, 1, Reason.TRAFFIC, variant) for worker in workers]
        seen = cases.snapshot(nodes=(), workloads=workers)
        said: list[tuple[str, str]] = []

        def emit(obj: Object, type_: str, reason: str, message: str, action: str) -> None:
            said.append((reason, message))

        tell(emit, rig.watches, seen, evicted)

        assert said == [("TakenBack", "3 workers must give GPUs up for serving/tts: traffic needs it")]
        assert {worker.phase for worker in workers} == {Phase.RUNNING}


async def test_a_leader_that_is_gone_hears_no_more_of_pods() -> None:
    async with leading(a_pool(**SOON)) as rig, rig.fake.kube() as kube:
        before = len(rig.watches.pods._callbacks)

        for _ in range(3):
            Obstacles(kube, rig.watches.pods, rig.wall)

        gc.collect()
        assert len(rig.watches.pods._callbacks) == before
