"""Writes statuses: only a change, each object at most once a second, and what always changes much more seldom.

Owns the comparison with what the API server has, and the pace.  Server-side apply to `/status`, one field manager.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import NotFound
from slackwater_operator.kube.types import Key, Object, key_of
from slackwater_operator.resources.names import API_VERSION, MANAGER_STATUS

logger = logging.getLogger(__name__)

PACE_S = 1.0
SLOW_S = 15.0  # counters grow all the time; nobody reads them more often
ABREAST = 16

Where = tuple[str, Key]


@dataclass(slots=True)
class _Written:
    at_s: float
    trouble: str = ""


class StatusWriter:
    """Collects what each object's status should be, and writes it with `flush`."""

    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock
        self._written: dict[Where, _Written] = {}
        self._due: list[tuple[Cache, Object, Object]] = []

    def want(self, cache: Cache, obj: Object, status: Object, slow: Collection[str] = ()) -> None:
        """This is the status of a cached object.  slow: its fields that alone are no reason to write at once."""
        live = obj.get("status") or {}
        where = (cache.resource.plural, key_of(obj))
        since_s = self._clock() - self._written[where].at_s if where in self._written else SLOW_S
        if _same(live, status, slow):
            if since_s < SLOW_S or _same(live, status, ()):
                return
        elif since_s < PACE_S:
            return
        self._due.append((cache, obj, status))

    async def flush(self) -> None:
        """Write what is due; raises nothing."""
        due, self._due = self._due, []
        room = asyncio.Semaphore(ABREAST)
        await asyncio.gather(*(self._write(room, cache, obj, status) for cache, obj, status in due))

    def forget(self, caches: Collection[Cache]) -> None:
        """Drop the memory of objects that are gone."""
        known = {cache.resource.plural: cache for cache in caches}
        gone = [where for where in self._written if where[0] in known and where[1] not in known[where[0]]]
        for where in gone:
            del self._written[where]

    async def _write(self, room: asyncio.Semaphore, cache: Cache, obj: Object, status: Object) -> None:
        where = (cache.resource.plural, key_of(obj))
        namespace, name = where[1]
        metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
        body = {"apiVersion": API_VERSION, "kind": cache.resource.kind, "metadata": metadata, "status": status}
        before = self._written.get(where)
        async with room:
            self._written[where] = _Written(self._clock())
            try:
                answer = await self._kube.apply(cache.resource, body, manager=MANAGER_STATUS, subresource="status")
            except NotFound:
                return  # it is gone, and the cache will hear of it
            except (TemporaryError, PermanentError) as error:
                self._written[where].trouble = str(error)
                if before is None or before.trouble != str(error):
                    logger.warning("status not written: %s", error)
                return
        cache.remember(answer)


def _same(live: Object, wanted: Object, slow: Collection[str]) -> bool:
    """Whether what is wanted is there already; fields of another writer do not count."""
    return all(name in slow or _equal(live.get(name), value) for name, value in wanted.items())


def _equal(live: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(live, dict):
        return all(_equal(live.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list) and isinstance(live, list):
        return len(live) == len(wanted) and all(map(_equal, live, wanted))
    return bool(live == wanted)
