"""A pretended cluster with pools, nodes, services and jobs, and a `KubeCluster` on it, in a few lines.

`async with World() as world:` has a FakeKube, a client, the caches and a moved clock; `restart` throws the operator's
part away and makes a new one, as after a crash.  What gateways, keepers and gates would say is set on `signals`,
`progress` and `revisions`.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from slackwater_operator.cluster.base import Observation, Refusal
from slackwater_operator.core import Action, Kind, Phase, Reason, Verb, Workload
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.types import NODES, PODS, Object
from slackwater_operator.resources import names
from slackwater_operator.testing import resources
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.kube_clock import MovedClock
from slackwater_operator.testing.kube_operator import FLAVORS, JOBS, POOLS, RECLAIMS, SERVICES, Part

SETTLE_FOR_S = 10.0


class World(Part):
    """See the module."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        super().__init__(self.clock, self.clock.wall)
        self.fake = FakeKube(wall=self.clock.wall)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "World":
        await self._stack.enter_async_context(self.fake)
        self.fake.put(FLAVORS, resources.a_flavor("h200"))
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()
        await self._stack.aclose()

    def connection(self) -> Connection:
        return self.fake.connection()

    # --- what there is ------------------------------------------------------------------------------

    def pool(self, name: str = "east", **spec: Any) -> None:
        """A CapacityPool of all nodes with label zone=NAME."""
        given = {"nodeSelector": {"zone": name}, "lending": {"lendAfter": "0s"}} | spec
        self.fake.put(POOLS, resources.a_pool(name, **given))

    def nodes(self, count: int = 1, gpus: int = 8, *, zone: str = "east", first: int = 1) -> list[str]:
        """Nodes n1, n2 … of flavor h200 in a pool's zone."""
        made = [f"n{number}" for number in range(first, first + count)]
        for name in made:
            self.fake.add_node(name, gpus, {"zone": zone, "nvidia.com/gpu.product": "h200"})
        return made

    def service(self, name: str = "tts", **spec: Any) -> str:
        """An InferenceDeployment; returns the variant's uid in pool east."""
        given = {"maxReplicas": 9999, "minReplicas": 0} | spec
        self.fake.put(SERVICES, resources.a_service(name, **given))
        return names.variant_uid("default", name, "east", "h200")

    def job(self, name: str = "clean", **spec: Any) -> str:
        """A CleaningJob; returns its uid."""
        given = {"maxWorkers": 9999} | spec
        self.fake.put(JOBS, resources.a_job(name, **given))
        return names.object_uid("default", name)

    def training_pod(self, name: str = "train", gpus: int = 1, node: str = "", **spec: Any) -> None:
        """Somebody's training pod; unless `spec` says otherwise it does not preempt."""
        wanted = {"limits": {names.DEFAULT_GPU_RESOURCE: str(gpus)}}
        body = {
            "metadata": {"namespace": "default", "name": name},
            "spec": {
                "priorityClassName": names.PRIORITY_TRAINING.name,
                "preemptionPolicy": "Never",
                "containers": [{"name": "main", "image": "train:1", "resources": wanted}],
                **({"nodeName": node} if node else {}),
                **spec,
            },
            "status": {"phase": "Pending"},
        }
        self.fake.put(PODS, body)

    def rival(self) -> None:
        """A pod of somebody else that waits for a GPU of the same nodes, with nothing that we could do for it."""
        self.training_pod("rival", priorityClassName="")

    async def full_node(self, gpus: int = 8, *, rival: bool = False, **service: Any) -> tuple[str, list[str]]:
        """A node on which cleaning holds every GPU; returns the variant that may want them, and the workers.

        rival: somebody else's pod waits for a GPU of the node too.
        """
        self.pool()
        self.nodes(1, gpus=gpus)
        variant = self.service(**service)
        workers = await self.fill(self.job(), gpus)
        if rival:
            self.rival()
        return variant, workers

    # --- what happens -------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until the caches have all that the server has."""
        async with asyncio.timeout(SETTLE_FOR_S):
            while not all(self._is_level(cache) for cache in self.all_caches()):
                await asyncio.sleep(0.001)

    def _is_level(self, cache: Cache) -> bool:
        def versions(objects: Sequence[Object]) -> dict[tuple[str, str], str]:
            return {
                (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]): obj["metadata"]["resourceVersion"]
                for obj in objects
            }

        there = self.fake.store.all((cache.resource.group, cache.resource.plural))
        return versions(there) == versions(list(cache.values()))

    async def observe(self) -> Observation:
        """What the cluster shows once the caches are level."""
        await self.settle()
        return self.cluster.observe(self.clock())

    async def apply(self, *actions: Action) -> tuple[Refusal, ...]:
        """One plan's actions, on fresh caches."""
        await self.observe()
        return await self.cluster.apply(actions, self.clock())

    async def tend(self, pass_s: float = 0.0) -> None:
        """Let time pass, then tend twice: the second time with what the first one's writes changed."""
        self.clock.now_s += pass_s
        for _ in range(2):
            await self.settle()
            await self.cluster.tend(self.clock())
            await asyncio.sleep(0)

    async def start(self, uid: str, count: int = 1, reason: Reason = Reason.IDLE) -> tuple[Refusal, ...]:
        """START."""
        return await self.apply(Action(Verb.START, uid, count, reason))

    async def fill(self, job: str, count: int) -> list[str]:
        """Start workers and let them run; returns their uids."""
        before = set(self.pods(names.POD_CLEANING))
        assert await self.start(job, count) == ()
        self.run_all()
        await self.settle()
        return sorted(set(self.pods(names.POD_CLEANING)) - before)

    async def evict(
        self, uids: Sequence[str], beneficiary: str = "", reason: Reason = Reason.TRAFFIC
    ) -> tuple[Refusal, ...]:
        """EVICT."""
        return await self.apply(*(Action(Verb.EVICT, uid, 1, reason, beneficiary) for uid in uids))

    def run_all(self) -> None:
        """Every bound pod of ours runs."""
        for pod in self.fake.objects(PODS):
            metadata, status = pod["metadata"], pod.get("status", {})
            if pod["spec"].get("nodeName") and status.get("phase") == "Pending" and "deletionTimestamp" not in metadata:
                self.fake.run_pod(metadata["namespace"], metadata["name"])

    def bind_waiting(self) -> None:
        """The scheduler: nominated pods go to their nodes where GPUs are free."""
        for pod in self.fake.objects(PODS):
            node = pod.get("status", {}).get("nominatedNodeName")
            if node and not pod["spec"].get("nodeName") and self.free_gpus(node) >= _gpus(pod):
                self.fake.bind_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], node)

    def finish(self, uid: str, code: int = 75, message: str = "") -> None:
        """A worker's or a replica's container ends."""
        namespace, _, name = uid.partition("/")
        self.fake.finish_pod(namespace, name, code, message)

    # --- what is seen -------------------------------------------------------------------------------

    def pods(self, kind: str | None = None) -> list[str]:
        """Uids of our pods at the server."""
        return [
            names.object_uid(pod["metadata"]["namespace"], pod["metadata"]["name"])
            for pod in self.fake.objects(PODS)
            if kind in (None, pod["metadata"].get("labels", {}).get(names.LABEL_KIND))
        ]

    def pod(self, uid: str) -> Object:
        """A pod as the server has it."""
        namespace, _, name = uid.partition("/")
        found = self.fake.get(PODS, name, namespace)
        assert found is not None, f"no pod {uid}"
        return found

    def leaving(self) -> list[str]:
        """Uids of pods that were deleted and are there still."""
        return [uid for uid in self.pods() if "deletionTimestamp" in self.pod(uid)["metadata"]]

    def reclaims(self) -> list[Object]:
        """The Reclaims at the server."""
        return self.fake.objects(RECLAIMS)

    def free_gpus(self, node: str) -> int:
        """A node's GPUs that no bound pod holds."""
        found = self.fake.get(NODES, node)
        assert found is not None, f"no node {node}"
        held = sum(
            _gpus(pod)
            for pod in self.fake.objects(PODS)
            if pod["spec"].get("nodeName") == node and pod["status"]["phase"] not in ("Succeeded", "Failed")
        )
        return int(found["status"]["allocatable"][names.DEFAULT_GPU_RESOURCE]) - held

    def over_allocated(self) -> list[str]:
        """Nodes that hold more pods than they have GPUs."""
        return [
            node["metadata"]["name"]
            for node in self.fake.objects(NODES)
            if self.free_gpus(node["metadata"]["name"]) < 0
        ]


def by_uid(seen: Observation) -> dict[str, Workload]:
    """The workloads of an observation."""
    return {workload.uid: workload for workload in seen.workloads}


def phases(seen: Observation, kind: Kind) -> list[Phase]:
    """The phases of all workloads of a kind, in the order of their uids."""
    return [workload.phase for workload in seen.workloads if workload.kind is kind]


def _gpus(pod: Object) -> int:
    return sum(
        int(one.get("resources", {}).get("limits", {}).get(names.DEFAULT_GPU_RESOURCE, 0))
        for one in pod["spec"]["containers"]
    )
