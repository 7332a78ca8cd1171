"""Our resources as values: each is read once for each of its generations, and one that is wrong stops no other.

Owns the memory of what was read, and which objects are refused and why.  Level-based: it is asked with what the caches
hold now.  Called by everything that decides from a spec.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.types import Key, Object, key_of
from slackwater_operator.operate.watches import Watches
from slackwater_operator.resources.base import Resource
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.inference import InferenceDeployment
from slackwater_operator.resources.parse import parse
from slackwater_operator.resources.pool import CapacityPool
from slackwater_operator.resources.reclaim import Reclaim

K = TypeVar("K", bound=Resource)


class Shelf(Generic[K]):
    """The objects of one kind.

    valid: by (namespace, name).   refused: why an object is not, in one line; it is treated as if it were not there.
    """

    def __init__(self, kind: type[K], cache: Cache) -> None:
        self._kind = kind
        self._cache = cache
        self._changed = {key_of(obj) for obj in cache.values()}
        self._read: dict[Key, tuple[tuple[Any, ...], K | None, str]] = {}
        self.valid: dict[Key, K] = {}
        self.refused: dict[Key, str] = {}
        cache.on_change(self._hear)

    def look(self) -> None:
        """Take in what the cache holds now."""
        changed, self._changed, is_news = self._changed, set(), False
        for key in changed:
            obj, known = self._cache.get(*key), self._read.get(key)
            if obj is None:
                is_news |= self._read.pop(key, None) is not None
            elif known is None or known[0] != _version(obj):
                self._read[key] = (_version(obj), *self._parse(obj))
                is_news = True
        if is_news:
            self.valid = {key: value for key, (_, value, _) in self._read.items() if value is not None}
            self.refused = {key: why for key, (_, value, why) in self._read.items() if value is None}

    def _hear(self, _change: str, obj: Object) -> None:
        self._changed.add(key_of(obj))

    def _parse(self, obj: Object) -> tuple[K | None, str]:
        try:
            # The status is ours to write, and one of another version must not make a good spec unreadable.
            return parse(self._kind, {**obj, "status": {}}), ""
        except PermanentError as error:
            return None, str(error)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The shelves of all five kinds."""

    flavors: Shelf[GPUFlavor]
    pools: Shelf[CapacityPool]
    services: Shelf[InferenceDeployment]
    jobs: Shelf[CleaningJob]
    reclaims: Shelf[Reclaim]

    @classmethod
    def of(cls, watches: Watches) -> "Catalog":
        """Of the process's caches."""
        return cls(
            Shelf(GPUFlavor, watches.flavors),
            Shelf(CapacityPool, watches.pools),
            Shelf(InferenceDeployment, watches.services),
            Shelf(CleaningJob, watches.jobs),
            Shelf(Reclaim, watches.reclaims),
        )

    def look(self) -> None:
        """Take in what the caches hold now."""
        for shelf in (self.flavors, self.pools, self.services, self.jobs, self.reclaims):
            shelf.look()


def _version(obj: Object) -> tuple[Any, ...]:
    """Changes when the spec or what of the metadata counts does; a status write is no news."""
    metadata = obj.get("metadata", {})
    return (
        metadata.get("uid"),
        metadata.get("generation", 0),
        metadata.get("deletionTimestamp"),
        tuple(sorted((metadata.get("annotations") or {}).items())),
        tuple(sorted((metadata.get("labels") or {}).items())),
    )
