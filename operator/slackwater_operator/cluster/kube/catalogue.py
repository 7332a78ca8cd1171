"""Our own kinds as values, and the nodes: what people wrote, parsed once a change.

Owns the parsed objects and whether the layout of GPUs has to be made again.  An object that is not valid is passed
over; saying so is the process's part.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from slackwater_operator.cluster.kube.layout import Layout, NodeFacts, lay_out, read_node
from slackwater_operator.cluster.kube.ports import Caches
from slackwater_operator.core import PermanentError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names
from slackwater_operator.resources.base import Resource
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.inference import InferenceDeployment
from slackwater_operator.resources.parse import parse
from slackwater_operator.resources.pool import CapacityPool
from slackwater_operator.resources.reclaim import Reclaim

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Resource)


class Catalogue:
    """Parsed objects by `Resource.key`, kept up to date by the caches.

    uids: Kubernetes' own, of services and jobs.   reclaims: those that were seen or changed since the last
    `take_reclaims`; the others are in `cluster.takes`.   news: called when a spec that plans are made from came,
    changed or went.
    """

    def __init__(self, caches: Caches, news: Callable[[], None] = lambda: None) -> None:
        self._news = news
        self.flavors: dict[str, GPUFlavor] = {}
        self.pools: dict[str, CapacityPool] = {}
        self.services: dict[str, InferenceDeployment] = {}
        self.jobs: dict[str, CleaningJob] = {}
        self.nodes: dict[str, NodeFacts] = {}
        self.uids: set[str] = set()
        self.layout = Layout()
        self._reclaims: dict[str, Reclaim] = {}
        self._is_stale = True  # the layout
        self._ends: list[Callable[[], None]] = []
        self._follow(caches.flavors, GPUFlavor, self.flavors, shapes=True)
        self._follow(caches.pools, CapacityPool, self.pools, shapes=True)
        self._follow(caches.services, InferenceDeployment, self.services, owns=True)
        self._follow(caches.jobs, CleaningJob, self.jobs, owns=True)
        self._follow(caches.reclaims, Reclaim, self._reclaims, plans=False)
        self._listen(caches.nodes, self._hear_node)

    def close(self) -> None:
        """Hear no more: the caches live longer than this."""
        for end in self._ends:
            end()
        self._ends.clear()

    def lay_out(self) -> bool:
        """Make the layout again if anything that it depends on changed; True if so."""
        if not self._is_stale:
            return False
        self._is_stale = False
        pools = sorted(self.pools.values(), key=lambda pool: pool.key)
        self.layout = lay_out(self.nodes.values(), self.flavors, pools)
        return True

    def take_reclaims(self) -> list[Reclaim]:
        """Reclaims that came or changed since the last call."""
        found = list(self._reclaims.values())
        self._reclaims.clear()
        return found

    def resource_of(self, flavor: str) -> str:
        """What a flavor's GPUs are called in a pod."""
        found = self.flavors.get(flavor)
        return found.spec.resource_name if found else names.DEFAULT_GPU_RESOURCE

    def _follow(
        self,
        cache: Cache,
        kind: type[R],
        table: dict[str, R],
        *,
        shapes: bool = False,
        owns: bool = False,
        plans: bool = True,
    ) -> None:
        """shapes: the layout depends on its objects.   owns: pods are theirs.   plans: plans are made from them."""

        def hear(event: str, obj: Object) -> None:
            metadata = obj["metadata"]
            key = "/".join(filter(None, (metadata.get("namespace"), metadata["name"])))
            old = table.get(key)
            if event == "MODIFIED" and old is not None and not _is_news(old, obj):
                return
            table.pop(key, None)
            if event != "DELETED":
                try:
                    table[key] = parse(kind, obj)
                except PermanentError as error:
                    logger.debug("passing over %s", error)
            new = table.get(key)
            if owns and old is not None:
                self.uids.discard(old.metadata.uid)
            if owns and new is not None:
                self.uids.add(new.metadata.uid)
            if shapes and (
                old is None or new is None or old.model_dump(include={"spec"}) != new.model_dump(include={"spec"})
            ):
                self._is_stale = True
            if plans and (old is None or new is None or old.metadata.generation != new.metadata.generation):
                self._news()

        self._listen(cache, hear)

    def _hear_node(self, event: str, obj: Object) -> None:
        facts = read_node(obj)
        if event == "DELETED":
            self._is_stale |= self.nodes.pop(facts.name, None) is not None
        elif self.nodes.get(facts.name) != facts:
            self.nodes[facts.name] = facts
            self._is_stale = True

    def _listen(self, cache: Cache, hear: Callable[[str, Object], None]) -> None:
        for obj in list(cache.values()):
            hear("ADDED", obj)
        self._ends.append(cache.on_change(hear))


def _is_news(old: Resource, obj: Object) -> bool:
    """Whether anything but a status changed that we do not read again: statuses are written each second."""
    return old.metadata.generation != obj["metadata"].get("generation") or "slurm" in (obj.get("status") or {})
