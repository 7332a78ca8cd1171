"""Writes statuses: only a change, each object at most once a second, and what always changes much more seldom.

Owns the comparison with what the API server has, and the pace.  Server-side apply to `/status`, one field manager.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import NotFound
from slackwater_operator.kube.types import Key, Object, key_of
from slackwater_operator.operate.statuses.conditions import Emit
from slackwater_operator.resources.names import API_VERSION, MANAGER_STATUS

logger = logging.getLogger(__name__)

PACE_S = 1.0
SLOW_S = 15.0  # counters grow all the time; nobody reads them more often
SLOW_RATE = 5.0  # objects a second that are written for them alone: with very many of them SLOW_S grows
AT_ONCE = 100  # writes of one flush; what is left over is wanted again a second later
ABREAST = 8

Where = tuple[str, Key]
Event = tuple[Object, str, str, str, str]  # what `Emit` is called with


@dataclass(slots=True)
class _Written:
    at_s: float
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class _Due:
    cache: Cache
    obj: Object
    status: Object
    events: tuple[Event, ...]
    is_slow: bool  # only what always changes has changed


class StatusWriter:
    """Collects what each object's status should be, and writes it with `flush`.

    emit: says the Events that go with a change, once it is written.
    """

    def __init__(self, kube: Kube, clock: Callable[[], float], emit: Emit) -> None:
        self._kube = kube
        self._clock = clock
        self._emit = emit
        self._written: dict[Where, _Written] = {}
        self._due: list[_Due] = []

    def want(
        self,
        cache: Cache,
        obj: Object,
        status: Object,
        slow: Collection[str] = (),
        events: Iterable[Event] = (),
    ) -> None:
        """This is the status of a cached object.  slow: its fields that alone are no reason to write at once."""
        live = obj.get("status") or {}
        where = (cache.resource.plural, key_of(obj))
        slow_s = max(SLOW_S, len(self._written) / SLOW_RATE)
        since_s = self._clock() - self._written[where].at_s if where in self._written else slow_s
        is_slow = _same(live, status, slow)
        if since_s < (slow_s if is_slow else PACE_S) or (is_slow and _same(live, status, ())):
            return
        self._due.append(_Due(cache, obj, status, tuple(events), is_slow))

    async def flush(self) -> None:
        """Write what is due, at most `AT_ONCE`; raises nothing."""
        due, self._due = sorted(self._due, key=lambda one: one.is_slow), []
        room = asyncio.Semaphore(ABREAST)
        await asyncio.gather(*(self._write(room, one) for one in due[:AT_ONCE]))

    def forget(self, caches: Collection[Cache]) -> None:
        """Drop the memory of objects that are gone."""
        known = {cache.resource.plural: cache for cache in caches}
        gone = [where for where in self._written if where[0] in known and where[1] not in known[where[0]]]
        for where in gone:
            del self._written[where]

    async def _write(self, room: asyncio.Semaphore, due: _Due) -> None:
        cache, status = due.cache, due.status
        where = (cache.resource.plural, key_of(due.obj))
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
        for event in due.events:
            self._emit(*event)


def _same(live: Object, wanted: Object, slow: Collection[str]) -> bool:
    """Whether what is wanted is there already; fields of another writer do not count."""
    return all(name in slow or _equal(live.get(name), value) for name, value in wanted.items())


def _equal(live: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(live, dict):
        return all(_equal(live.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list) and isinstance(live, list):
        return len(live) == len(wanted) and all(map(_equal, live, wanted))
    return bool(live == wanted)
