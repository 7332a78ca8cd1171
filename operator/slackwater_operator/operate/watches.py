"""The copies of the cluster that the process keeps: our kinds, pods, nodes, and what the operator runs beside them.

Owns which collections are watched and what is kept of their objects; both replicas keep them, so that a new leader
begins at once.  Says which watch has died.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from slackwater_operator.cluster.kube.keep import KEEP_NODE, KEEP_POD
from slackwater_operator.cluster.kube.ports import Caches
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.trim import Keep, lean
from slackwater_operator.kube.types import NODES, PODS, Resource, custom
from slackwater_operator.operate.children import KINDS, SELECTOR
from slackwater_operator.resources import names


def resource_of(kind: names.KindNames) -> Resource:
    """Where the API server keeps one of our kinds."""
    return custom(kind.plural, kind.kind, kind.namespaced)


class Watches:
    """All caches of the process.  `run` ends only when it is cancelled."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        def cache(resource: Resource, keep: Keep = lean, labels: str = "") -> Cache:
            return Cache(kube, resource, labels=labels, keep=keep, clock=clock)

        self._clock = clock
        self.pods = cache(PODS, KEEP_POD)
        self.nodes = cache(NODES, KEEP_NODE)
        self.flavors = cache(resource_of(names.GPU_FLAVOR))
        self.pools = cache(resource_of(names.CAPACITY_POOL))
        self.services = cache(resource_of(names.INFERENCE_DEPLOYMENT))
        self.jobs = cache(resource_of(names.CLEANING_JOB))
        self.reclaims = cache(resource_of(names.RECLAIM))
        self.children: Mapping[str, Cache] = {resource.plural: cache(resource, labels=SELECTOR) for resource in KINDS}

    @property
    def ours(self) -> tuple[Cache, ...]:
        """Those of our own kinds."""
        return (self.flavors, self.pools, self.services, self.jobs, self.reclaims)

    @property
    def all(self) -> tuple[Cache, ...]:
        """Every one."""
        return (self.pods, self.nodes, *self.ours, *self.children.values())

    def caches(self) -> Caches:
        """What the cluster of the policy gets."""
        return Caches(self.pods, self.nodes, self.flavors, self.pools, self.services, self.jobs, self.reclaims)

    async def run(self, only: Sequence[Cache] | None = None) -> None:
        """Keep them fresh.  only: these; all of them, if left out."""
        async with asyncio.TaskGroup() as group:
            for cache in self.all if only is None else only:
                group.create_task(cache.run(), name=f"watch {cache.resource.plural}")

    async def synced(self, only: Sequence[Cache] | None = None) -> None:
        """Each of them was listed once."""
        for cache in self.all if only is None else only:
            await cache.synced.wait()

    def stalled_s(self) -> dict[str, float]:
        """Seconds since each watch said anything, by plural."""
        now_s = self._clock()
        return {_title(cache): cache.stalled_s(now_s) for cache in self.all}

    def dead(self, after_s: float) -> str:
        """Which watches have said nothing for longer than that, in words; "" = none."""
        silent = {name: for_s for name, for_s in self.stalled_s().items() if for_s > after_s}
        return ", ".join(f"no event or bookmark of {name} for {for_s:.0f} s" for name, for_s in sorted(silent.items()))


def _title(cache: Cache) -> str:
    return cache.resource.plural
