"""A copy of one collection, kept fresh by one list and then by watches.

Owns the order of what is known: a copy never goes back to an older version of an object, whether news
comes by the watch or, sooner, as the answer to an own write (`remember`).  A list is made once, and again
only after the server has forgotten the version to go on from (410); the differences are then told as if a
watch had brought them.  Decides nothing about what it holds.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, ValuesView

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.backoff import Backoff
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import KUBE_ERRORS, Gone, error_code
from slackwater_operator.kube.selectors import matches
from slackwater_operator.kube.trim import Keep, lean
from slackwater_operator.kube.types import Key, Object, Resource, key_of, uid_of, version_of

logger = logging.getLogger(__name__)

OnChange = Callable[[str, Object], None]  # ("ADDED" | "MODIFIED" | "DELETED", object)

_BRIEF_S = 1.0  # a watch that ends sooner, and empty, is a server in trouble: wait before the next one
_GIVE_UP = 5  # refusals of one version in a row
_LONG_S = 10.0  # a watch that breaks after this had been a good one
_REMEMBER_S = 60.0  # an answer that no watch has confirmed by then is not believed any longer


class Cache:
    """The objects of one collection that match the selectors.  Run `run()` as a task; wait for `synced`.

    keep: what is stored of an object.
    lists, watches: how many of each have been begun, for metrics and tests.
    """

    def __init__(
        self,
        kube: Kube,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        keep: Keep = lean,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        self.lists = 0
        self.watches = 0
        self._kube = kube
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._keep = keep
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(first_s=0.2, max_s=10.0, rng=rng or random.Random())
        self._objects: dict[Key, Object] = {}
        self._ahead: dict[Key, float] = {}  # remembered, and not yet seen by the watch: since when
        self._version = ""  # where the next watch goes on; "": list first
        self._at = 0  # all changes up to this version are in
        self._alive_s = clock()
        self._callbacks: list[OnChange] = []

    def get(self, namespace: str | None, name: str) -> Object | None:
        """The object as it is known now.  Not to be changed by the caller."""
        return self._objects.get((namespace or "", name))

    def values(self) -> ValuesView[Object]:
        """All objects; take a copy before awaiting anything."""
        return self._objects.values()

    def __iter__(self) -> Iterator[Object]:
        return iter(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: Key) -> bool:
        return key in self._objects

    def on_change(self, callback: OnChange) -> Callable[[], None]:
        """Call it after each change, in the loop that runs the cache.  It should be quick; what it raises is logged.

        Returns what ends it: a cache outlives those who listen, and would keep all that they hold.
        """
        self._callbacks.append(callback)

        def end() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return end

    def stalled_s(self, now_s: float) -> float:
        """Seconds since the last event, bookmark or good answer: above a minute or two, the copy may be old."""
        return max(0.0, now_s - self._alive_s)

    def remember(self, obj: Object) -> None:
        """Take in the answer to an own write at once, without waiting for the watch to bring it.

        Ignored if it is no news: the watch may have been faster, also with the object's end.
        """
        if self._namespace is not None and key_of(obj)[0] != self._namespace:
            return
        known = self._objects.get(key_of(obj))
        if version_of(obj) <= max(version_of(known) if known else 0, self._at):
            return  # the watch has passed it
        if not matches(obj, self._labels, self._fields):
            return
        self._store(self._keep(obj))
        self._ahead[key_of(obj)] = self._clock()

    async def run(self) -> None:
        """List, watch, and again.  Ends only when it is cancelled."""
        while True:
            began_s = self._clock()
            try:
                if not self._version:
                    await self._list()
                busy = await self._watch()
                if busy or self._clock() - began_s >= _BRIEF_S:
                    self._backoff.reset()
                    continue
                why = "the watch ended at once"
            except Gone as error:
                logger.info("listing again resource=%s: %s", self.resource.plural, error)
                self._version = ""
                why = str(error)
                if not self._backoff.tries:
                    self._backoff.next_s()
                    continue  # the first time at once: nothing is wrong with the server
            except (*KUBE_ERRORS, PermanentError) as error:
                why = str(error)
                if self._clock() - began_s >= _LONG_S:
                    self._backoff.reset()
                if error_code(error) in (400, 500) and self._backoff.tries % _GIVE_UP == _GIVE_UP - 1:
                    self._version = ""  # it answers, and always so: perhaps this version is what it cannot bear
            delay_s = self._backoff.next_s()
            # One line for each trouble, not one for each try.
            level = logging.WARNING if self._backoff.tries == 2 else logging.DEBUG
            logger.log(level, "watching again resource=%s delay_s=%.1f: %s", self.resource.plural, delay_s, why)
            await self._sleep(delay_s)

    async def _list(self) -> None:
        """Fill the copy, and tell what differs from what it held."""
        self.lists += 1
        found: dict[Key, Object] = {}
        version = ""
        pages = self._kube.pages(self.resource, self._namespace, labels=self._labels, fields=self._fields)
        async with contextlib.aclosing(pages):
            async for items, at in pages:
                self._alive_s = self._clock()
                version = at
                for item in items:
                    found[key_of(item)] = self._keep(item)
        now_s = self._clock()
        listed = int(version) if version.isdigit() else 0
        for key, obj in list(self._objects.items()):
            since_s = self._ahead.get(key)
            if since_s is not None and version_of(obj) > listed and now_s - since_s < _REMEMBER_S:
                found.pop(key, None)  # an answer newer than the list: the watch will bring what came of it
            elif key not in found:
                self._drop(key, obj)
        for obj in found.values():
            self._store(obj, listed)
        self._version, self._at = version, listed
        self.synced.set()
        self._settle()

    async def _watch(self) -> bool:
        """Follow one watch to its end.  True if it brought anything."""
        self.watches += 1
        busy = False
        events = self._kube.watch(
            self.resource,
            self._namespace,
            labels=self._labels,
            fields=self._fields,
            resource_version=self._version,
            opened=self._good,
        )
        async with contextlib.aclosing(events):
            async for kind, obj in events:
                if not busy:
                    busy = True
                    self._backoff.reset()
                self._alive_s = self._clock()
                self._version, self._at = obj["metadata"]["resourceVersion"], version_of(obj)
                if kind == "BOOKMARK":
                    self._settle()
                    continue
                key = key_of(obj)
                known = self._objects.get(key)
                if kind == "DELETED":
                    # Another object of that name may be remembered from after this one's end.
                    if known is not None and version_of(known) <= version_of(obj):
                        self._drop(key, self._keep(obj))
                elif known is None or version_of(known) < version_of(obj):
                    self._store(self._keep(obj))
                if key in self._ahead and version_of(self._objects.get(key, obj)) <= self._at:
                    del self._ahead[key]
        return busy

    def _good(self) -> None:
        self._alive_s = self._clock()

    def _settle(self) -> None:
        """Forget what was remembered, as far as the watch has passed it."""
        for key in list(self._ahead):
            known = self._objects.get(key)
            if known is None or version_of(known) <= self._at:
                del self._ahead[key]

    def _store(self, obj: Object, listed: int | None = None) -> None:
        """Take in an object unless it is no news.  listed: it comes from a list of this version, which is right even
        against a newer copy: then the server itself has gone back, to a backup."""
        key = key_of(obj)
        known = self._objects.get(key)
        if known is not None:
            is_newer = version_of(known) < version_of(obj)
            went_back = listed is not None and version_of(known) > listed
            if not is_newer and not went_back:
                return
        if known is not None and uid_of(known) != uid_of(obj):
            self._drop(key, known)
            known = None
        self._objects[key] = obj
        self._tell("ADDED" if known is None else "MODIFIED", obj)

    def _drop(self, key: Key, obj: Object) -> None:
        del self._objects[key]
        self._ahead.pop(key, None)
        self._tell("DELETED", obj)

    def _tell(self, kind: str, obj: Object) -> None:
        for callback in self._callbacks:
            try:
                callback(kind, obj)
            except Exception:
                logger.exception(
                    "a callback failed at %s %s", kind, self.resource.title(key_of(obj)[1], key_of(obj)[0])
                )
