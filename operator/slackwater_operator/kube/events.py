"""Events (events.k8s.io/v1), for people who look with `kubectl describe`.

Owns their deduplication: the same words about the same object are one Event with a count.  Nothing waits for
an Event and nothing fails with it: `emit` returns at once, what cannot be written is dropped and counted.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import KUBE_ERRORS, AlreadyExists, KubeTemporary, NotFound
from slackwater_operator.kube.types import EVENTS, Object, micro_stamp, name_of, namespace_of, uid_of

logger = logging.getLogger(__name__)

MANAGER = "slackwater/events"
_SERIES_S = 360.0  # the same words after this long a silence are a new Event, as in Kubernetes' own recorder
_UPDATE_S = 10.0  # the count of an Event is written at most this often
_MAX_WAITING = 1000
_MAX_KNOWN = 4096
_MAX_WORDINGS = 10  # different notes for one reason of one object within a series' time; more are only counted
_MAX_NOTE = 1024  # the API's own bound
_TRIES = 3
_FLUSH_S = 2.0  # at the end


@dataclass(slots=True)
class _Series:
    """One Event object and what is not yet written of it."""

    body: Object
    count: int = 1
    written: int = 0  # the count on the server; 0: it is not there yet
    last_s: float = 0.0  # by the wall clock
    seen_s: float = 0.0  # by our clock
    tries: int = 0


_Topic = tuple[str, str, str, str]  # (object, type, reason, action)
_Key = tuple[_Topic, str]  # and the note


class Recorder:
    """Writes Events from a queue.  Run `run()` as a task; `emit` may be called before, and from any thread.

    dropped: how many could not be taken or written.
    """

    def __init__(
        self,
        kube: Kube,
        component: str,
        *,
        instance: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.dropped = 0
        self._kube = kube
        self._component = component
        self._instance = instance or component
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._known: OrderedDict[_Key, _Series] = OrderedDict()
        self._wordings: OrderedDict[_Topic, list[tuple[float, _Key]]] = OrderedDict()
        self._due: dict[_Key, float] = {}  # what has to be written, and when
        self._poked = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def emit(self, obj: Mapping[str, Any], type: str, reason: str, message: str, action: str) -> None:
        """Say something about an object.

        type: Normal or Warning.  reason, action: one word each, from closed sets.  message: for people.
        """
        take = (dict(obj.get("metadata", {})), str(obj.get("apiVersion", "")), str(obj.get("kind", "")))
        if self._loop is not None and threading.get_ident() != self._thread:
            try:
                self._loop.call_soon_threadsafe(self._take, take, type, reason, message, action)
            except RuntimeError:  # the loop has ended
                self.dropped += 1
        else:
            self._take(take, type, reason, message, action)

    async def run(self) -> None:
        """Write what is emitted.  Ends only when it is cancelled, after a last attempt to write what waits."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        try:
            while True:
                await self._write_due(everything=False)
                self._poked.clear()
                next_s = min(self._due.values(), default=None)
                if next_s is None:
                    await self._poked.wait()
                elif next_s > self._clock():
                    await self._pause(next_s - self._clock())
        finally:
            self._loop = None
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._write_due(everything=True)
            except TimeoutError:
                self.dropped += len(self._due)

    def _take(self, about: tuple[Object, str, str], type: str, reason: str, message: str, action: str) -> None:
        metadata, api_version, kind = about
        shell = {"metadata": metadata}
        topic = (uid_of(shell) or f"{kind}/{namespace_of(shell)}/{name_of(shell)}", type, reason, action)
        key = self._key(topic, message[:_MAX_NOTE])
        now_s = self._clock()
        series = self._known.get(key)
        if series is not None and now_s - series.seen_s < _SERIES_S:
            series.count += 1
            series.last_s, series.seen_s = self._wall(), now_s
            self._known.move_to_end(key)
            self._due.setdefault(key, now_s + (_UPDATE_S if series.written > 1 else 0.0))
        elif len(self._due) >= _MAX_WAITING:
            self.dropped += 1
            return
        else:
            regarding = {
                "apiVersion": api_version,
                "kind": kind,
                "namespace": namespace_of(shell),
                "name": name_of(shell),
                "uid": uid_of(shell),
                "resourceVersion": str(metadata.get("resourceVersion", "")),
            }
            self._known[key] = _Series(self._body(regarding, type, reason, key[1], action), 1, 0, self._wall(), now_s)
            self._due[key] = now_s
            while len(self._known) > _MAX_KNOWN:
                old, _ = self._known.popitem(last=False)
                self._due.pop(old, None)
        self._poked.set()

    def _key(self, topic: _Topic, note: str) -> _Key:
        """The key of a note, or that of an earlier note once one topic has had many wordings."""
        now_s = self._clock()
        recent = [(at_s, key) for at_s, key in self._wordings.get(topic, []) if now_s - at_s < _SERIES_S]
        key = (topic, note)
        if key in (known for _, known in recent):
            return key
        if len(recent) >= _MAX_WORDINGS:
            return recent[-1][1]
        self._wordings[topic] = [*recent, (now_s, key)]
        self._wordings.move_to_end(topic)
        while len(self._wordings) > _MAX_KNOWN:
            self._wordings.popitem(last=False)
        return key

    def _body(self, regarding: Mapping[str, str], type: str, reason: str, note: str, action: str) -> Object:
        return {
            "metadata": {
                # Events of cluster-wide objects live in `default`, by custom.
                "namespace": regarding["namespace"] or "default",
                "name": f"{regarding['name'][:230]}.{uuid.uuid4().hex[:16]}",
            },
            "eventTime": micro_stamp(self._wall()),
            "reportingController": self._component,
            "reportingInstance": self._instance[:128],
            "regarding": {key: value for key, value in regarding.items() if value},
            "type": type,
            "reason": reason[:128],
            "action": action[:128] or reason[:128],  # the API wants one
            "note": note,
        }

    async def _write_due(self, everything: bool) -> None:
        now_s = self._clock()
        for key in [key for key, due_s in self._due.items() if everything or due_s <= now_s]:
            due_s = self._due.pop(key, None)
            series = self._known.get(key)
            if due_s is None or series is None or series.written == series.count:
                continue
            try:
                await self._write(series)
            except asyncio.CancelledError:
                self._due[key] = due_s
                raise
            except (*KUBE_ERRORS, PermanentError) as error:
                series.tries += 1
                if isinstance(error, KubeTemporary) and series.tries < _TRIES and not everything:
                    self._due[key] = self._clock() + error.delay_s * 2**series.tries
                else:
                    self.dropped += 1
                    self._known.pop(key, None)
                    logger.debug("event dropped: %s", error)
            except Exception:
                self.dropped += 1
                self._known.pop(key, None)
                logger.exception("event dropped")

    async def _write(self, series: _Series) -> None:
        count = series.count
        repeated = {"count": count, "lastObservedTime": micro_stamp(series.last_s)}
        metadata = series.body["metadata"]
        if series.written:
            try:
                await self._kube.merge(
                    EVENTS, metadata["name"], {"series": repeated}, metadata["namespace"], manager=MANAGER
                )
            except NotFound:
                series.written = 0  # the server forgets Events after an hour
        if not series.written:
            body = {**series.body, "series": repeated} if count > 1 else series.body
            with suppress(AlreadyExists):  # its name is ours alone: a create that was cancelled had got through
                await self._kube.create(EVENTS, body, manager=MANAGER)
        series.written, series.tries = count, 0

    async def _pause(self, seconds: float) -> None:
        """Until then, or until something new is emitted."""
        ways = [asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(self._poked.wait())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
