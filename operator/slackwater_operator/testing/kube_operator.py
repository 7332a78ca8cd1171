"""The operator's part of a test on a cluster, pretended or real: client, caches and a `KubeCluster` on them.

Owns its death before or after any write, and stand-ins for what gateways, keepers and gates would say.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from slackwater_operator.cluster.kube.cluster import KubeCluster
from slackwater_operator.cluster.kube.keep import KEEP_NODE, KEEP_POD
from slackwater_operator.cluster.kube.ports import Caches, JobProgress, Replica, Revision, WorkerProgress
from slackwater_operator.core import TrafficSample
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import NODES, PODS, Object, Resource, custom
from slackwater_operator.resources import names

KINDS: dict[str, Resource] = {kind.kind: custom(kind.plural, kind.kind, kind.namespaced) for kind in names.KINDS}
FLAVORS, POOLS = KINDS[names.GPU_FLAVOR.kind], KINDS[names.CAPACITY_POOL.kind]
SERVICES, JOBS = KINDS[names.INFERENCE_DEPLOYMENT.kind], KINDS[names.CLEANING_JOB.kind]
RECLAIMS = KINDS[names.RECLAIM.kind]


class Crash(Exception):
    """The operator dies here."""


class Signals:
    """Gateways that do what they are told at once.   streams: Workload.uid -> how many, for those that are not 0."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, TrafficSample]] = []
        self.tellings: dict[str, tuple[Replica, ...]] = {}
        self.streams: dict[str, int] = {}
        self.is_silent = False

    def take_samples(self) -> tuple[tuple[str, TrafficSample], ...]:
        taken, self.samples = tuple(self.samples), []
        return taken

    def tell(self, service: str, replicas: Sequence[Replica]) -> None:
        self.tellings[service] = tuple(replicas)

    def told(self, service: str) -> frozenset[str] | None:
        if self.is_silent or service not in self.tellings:
            return None
        return frozenset(replica.uid for replica in self.tellings[service])

    def in_flight(self, service: str, uid: str) -> int | None:  # noqa: ARG002 - pods of a test have one service
        return None if self.is_silent else self.streams.get(uid, 0)


class Progress:
    """Keepers.   holds: what each says of any receipt."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobProgress] = {}
        self.workers: dict[str, WorkerProgress] = {}  # by pod name
        self.holds: bool | None = True
        self.receipts: list[Mapping[str, Any]] = []

    def job(self, uid: str) -> JobProgress | None:
        return self.jobs.get(uid)

    def worker(self, uid: str, name: str) -> WorkerProgress | None:  # noqa: ARG002 - pod names are unique
        return self.workers.get(name)

    async def verify(self, uid: str, receipt: Mapping[str, Any]) -> bool | None:  # noqa: ARG002 - one ledger
        self.receipts.append(receipt)
        return self.holds


class Revisions:
    """Each service's own template, unless a test says otherwise.   gated: services that no revision may serve."""

    def __init__(self, part: "Part") -> None:
        self._part = part
        self.gated: set[str] = set()
        self.names: dict[str, str] = {}

    def serving(self, service: str) -> Revision | None:
        namespace, _, name = service.partition("/")
        obj = self._part.caches.services.get(namespace, name)
        if service in self.gated or obj is None:
            return None
        return Revision(self.names.get(service, "r1"), obj["spec"]["template"])


class Mortal(Kube):
    """A client whose process may die when a write has been carried out.   after: called with each write then."""

    after: Callable[[str, str], None] = staticmethod(lambda _plural, _name: None)

    async def create(self, resource: Resource, body: Mapping[str, Any], **rest: Any) -> Object:
        made = await super().create(resource, body, **rest)
        if not rest.get("dry_run"):
            self.after(resource.plural, made["metadata"]["name"])
        return made

    async def merge(self, resource: Resource, name: str, patch: Mapping[str, Any], *args: Any, **rest: Any) -> Object:
        made = await super().merge(resource, name, patch, *args, **rest)
        self.after(resource.plural, name)
        return made

    async def apply(self, resource: Resource, body: Mapping[str, Any], **rest: Any) -> Object:
        made = await super().apply(resource, body, **rest)
        self.after(resource.plural, made["metadata"]["name"])
        return made

    async def delete(self, resource: Resource, name: str, *args: Any, **rest: Any) -> None:
        await super().delete(resource, name, *args, **rest)
        self.after(resource.plural, name)


class Part:
    """See the module.

    events: (object's name, reason) that were emitted.   writes: (verb, plural, name) that were begun.
    pokes: how often a plan was wanted early.
    crash_before, crash_after: the number of the write before or after which the operator dies.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.signals = Signals()
        self.progress = Progress()
        self.revisions = Revisions(self)
        self.events: list[tuple[str, str]] = []
        self.writes: list[tuple[str, str, str]] = []
        self.pokes = 0
        self.crash_before: int | None = None
        self.crash_after: int | None = None
        self.crashed = False
        self._clock, self._wall = clock, wall
        self._done = self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.kube: Kube
        self.caches: Caches
        self.cluster: KubeCluster

    def connection(self) -> Connection:
        """Where the API server is."""
        raise NotImplementedError

    async def begin(self) -> None:
        """An operator's process begins: nothing is known but what the server has."""
        self._clients = AsyncExitStack()
        limits = Limits(silence_s=10.0, request_s=10.0, watch_silence_s=75.0, retry_within_s=5.0)
        kube = Mortal(self.connection(), limits=limits)
        kube.before_write, kube.after = self._before_write, self._after_write
        self.kube = await self._clients.enter_async_context(kube)
        self.caches = Caches(
            pods=self._cache(PODS, KEEP_POD),
            nodes=self._cache(NODES, KEEP_NODE),
            flavors=self._cache(FLAVORS),
            pools=self._cache(POOLS),
            services=self._cache(SERVICES),
            jobs=self._cache(JOBS),
            reclaims=self._cache(RECLAIMS),
        )
        for cache in self.all_caches():
            await cache.synced.wait()
        self.cluster = KubeCluster(
            self.kube,
            self.caches,
            self.signals,
            self.progress,
            self.revisions,
            wall=self._wall,
            poke=self._poke,
            emit=lambda obj, _type, reason, _message, _action: self.events.append((obj["metadata"]["name"], reason)),
            suffix=self._suffix,
        )

    async def end(self) -> None:
        """The process is gone."""
        await self.cluster.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._clients.aclose()

    async def restart(self) -> None:
        """The operator is gone, and a new one begins."""
        self.crash_before = self.crash_after = None
        await self.end()
        await self.begin()

    def forget_writes(self) -> None:
        """Count writes from here."""
        self.writes.clear()
        self._done = 0

    def all_caches(self) -> list[Cache]:
        caches = self.caches
        return [
            *(caches.pods, caches.nodes, caches.flavors, caches.pools),
            *(caches.services, caches.jobs, caches.reclaims),
        ]

    def _cache(self, resource: Resource, keep: Any = None) -> Cache:
        cache = Cache(self.kube, resource, clock=self._clock, **({"keep": keep} if keep else {}))
        self._tasks.append(asyncio.get_running_loop().create_task(cache.run()))
        return cache

    def _poke(self) -> None:
        self.pokes += 1

    def _suffix(self) -> str:
        self._numbers += 1
        return f"{self._numbers:04d}"

    async def _before_write(self, verb: str, resource: Resource, name: str) -> None:
        if self.crash_before is not None and len(self.writes) >= self.crash_before:
            self.crashed = True
            raise Crash(f"before write {self.crash_before}: {verb} {resource.plural} {name}")
        self.writes.append((verb, resource.plural, name))

    def _after_write(self, plural: str, name: str) -> None:
        if self.crash_after is not None and self._done >= self.crash_after:
            self.crashed = True
            raise Crash(f"after write {self.crash_after}: {plural} {name}")
        self._done += 1
