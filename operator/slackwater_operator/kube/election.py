"""One leader among several processes, by a Lease.

Owns the promise that two never lead at once: a leader stops `renew_s` after it last *asked* for a renewal that
succeeded, and another one starts only after it has itself watched the Lease stand still for `lease_s`, which
is longer.  Each process measures with its own clock; times that others have written are never compared with it.
Failing over takes `lease_s` and at most one more look; a leader that ends in good order hands over at once.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import KUBE_ERRORS, AlreadyExists, Conflict, KubeTemporary, NotFound
from slackwater_operator.kube.types import EVENTS, LEASES, Object, Resource, micro_stamp

logger = logging.getLogger(__name__)

MANAGER = "slackwater/lease"
_RELEASE_S = 2.0  # a release that takes longer is not worth the wait: the Lease runs out by itself


def _uptime() -> float:
    """A clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Elector:
    """Runs something while, and only while, this process leads.

    identity: unlike any other process's, also an earlier one's of the same pod.
    wall: only for the times written into the Lease, which people read.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        *,
        lease_s: float = 7.0,
        renew_s: float = 4.0,
        retry_s: float = 1.0,
        clock: Callable[[], float] = _uptime,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not 0 < retry_s < renew_s < lease_s:
            raise ValueError(f"wanted retry < renew < lease, got {retry_s} s, {renew_s} s, {lease_s} s")
        self.identity = identity
        self.leader = ""  # who led at the last look
        self.terms = 0  # how often this process began to lead
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._retry_s = retry_s
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._leading = False
        self._renewed_s = float("-inf")  # when the last renewal that succeeded was asked for
        self._lease: Object | None = None  # as the server last showed it
        self._seen: tuple[Any, ...] = ()  # what others wrote, and
        self._seen_s = float("-inf")  # since when it has stood still
        self._promised_s = lease_s  # how long its holder may be silent, by its own word
        self._holding = False  # the Lease was ours at the last look
        self._lost = False  # and is another's by now

    @property
    def is_leader(self) -> bool:
        """True only while no other can lead.  Judged by the clock at each call, so a process that was frozen
        knows at once on waking."""
        return self._leading and self._clock() - self._renewed_s < self._renew_s

    async def fence(self, verb: str, resource: Resource, name: str) -> None:
        """For `Kube.before_write`: refuses the writes of a process that does not lead, but for Leases and Events."""
        if resource not in (LEASES, EVENTS) and not self.is_leader:
            raise KubeTemporary(f"{verb} {resource.title(name)}: {self.identity} does not lead", reason="NotLeading")

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait to lead, run `lead()`, cancel it if leading is lost, and wait again.

        Ends when lead() ends or raises, having handed over.  On cancellation lead() is ended first, then the Lease
        is released.
        """
        while True:
            await self._acquire()
            self.terms += 1
            logger.info("leading identity=%s lease=%s/%s", self.identity, self._namespace, self._name)
            task = asyncio.ensure_future(lead())
            try:
                await self._hold(task)
            finally:
                ended = task.done()
                await self._end(task)
            if ended:
                task.result()
                return

    async def _acquire(self) -> None:
        """Return when this process leads."""
        self._leading = self._holding = self._lost = False
        while True:
            await _first(self._look(), self._sleep(self._renew_s))
            if self._holding and self._clock() - self._renewed_s < self._renew_s:
                self._leading = True
                return
            expires_s = self._seen_s + self._promised_s - self._clock()
            await self._sleep(min(self._retry_s, expires_s) if expires_s > 0 else self._retry_s)

    async def _hold(self, task: "asyncio.Future[None]") -> None:
        """Renew until lead() has ended or the Lease is lost."""
        while True:
            await _first(self._sleep(self._retry_s), beside=task)
            if task.done():
                return
            left_s = self._renewed_s + self._renew_s - self._clock()
            if left_s > 0:
                await _first(self._look(), self._sleep(left_s), beside=task)
            if self._lost or self._clock() - self._renewed_s >= self._renew_s:
                self._leading = False
                logger.warning("no longer leading identity=%s leader=%s", self.identity, self.leader or "unknown")
                return

    async def _end(self, task: "asyncio.Future[None]") -> None:
        """End lead(), and hand over if the Lease is still ours.  It is kept for as long as lead() takes to end."""
        self._leading = False
        task.cancel()
        while not task.done():
            await _first(self._sleep(self._retry_s), beside=task)
            if task.done():
                break
            if not self._lost:
                await _first(self._look(), self._sleep(self._retry_s), beside=task)
            if self._clock() - self._renewed_s >= self._lease_s:
                logger.error("lead() goes on though another may lead by now identity=%s", self.identity)
        if self._holding and not self._lost:
            await self._release()
        self._holding = False

    async def _look(self) -> None:
        """One try to acquire or to renew: `_holding` and `_lost` say what came of it."""
        with suppress(Conflict, AlreadyExists):
            await self._try_quietly()
            return
        # Somebody wrote in between: see who, at once.
        with suppress(Conflict, AlreadyExists):
            await self._try_quietly()

    async def _try_quietly(self) -> None:
        """`_try`, of whose errors only those are raised that say that another one writes."""
        try:
            await self._try()
        except (*KUBE_ERRORS, PermanentError) as error:
            self._lease = None
            level = logging.WARNING if self._holding else logging.DEBUG
            logger.log(level, "lease %s/%s: %s", self._namespace, self._name, error)
            if isinstance(error, (Conflict, AlreadyExists)):
                raise

    async def _try(self) -> None:
        asked_s = self._clock()
        lease = self._lease if self._holding else None
        if lease is None:
            try:
                lease = await self._kube.get(LEASES, self._name, self._namespace)
            except NotFound:
                lease = None
            asked_s = self._clock()
        spec = dict(lease.get("spec") or {}) if lease is not None else {}
        holder = str(spec.get("holderIdentity") or "")
        self._observe(spec)
        if holder not in ("", self.identity):
            if self._holding:
                self._lost = True
                return
            if self._clock() < self._seen_s + self._promised_s:
                return
        now = micro_stamp(self._wall())
        mine = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, math.ceil(self._lease_s)),
            "acquireTime": spec.get("acquireTime", now) if holder == self.identity else now,
            "renewTime": now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0)
            + (holder != self.identity and lease is not None),
        }
        if lease is None:
            body: Object = {"metadata": {"namespace": self._namespace, "name": self._name}, "spec": mine}
            self._lease = await self._kube.create(LEASES, body, manager=MANAGER)
        else:
            self._lease = await self._kube.replace(LEASES, {**lease, "spec": {**spec, **mine}}, manager=MANAGER)
        self._renewed_s = asked_s
        self.leader = self.identity
        self._holding = True

    def _observe(self, spec: dict[str, Any]) -> None:
        """Note when the Lease last changed, by our clock."""
        self.leader = str(spec.get("holderIdentity") or "")
        seen = (self.leader, spec.get("renewTime"), spec.get("acquireTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_s = seen, self._clock()
        self._promised_s = float(spec.get("leaseDurationSeconds") or self._lease_s)

    async def _release(self) -> None:
        """Let another lead at once.  If that fails, the Lease runs out by itself."""
        with suppress(TimeoutError, PermanentError, *KUBE_ERRORS):
            async with asyncio.timeout(_RELEASE_S):
                try:
                    await self._give_away(self._lease)
                except Conflict:  # a renewal whose answer was not awaited any more has been carried out
                    await self._give_away(None)
        self._lease = None

    async def _give_away(self, lease: Object | None) -> None:
        """Write nobody into the Lease, if it is ours; lease: as last seen, None to look first."""
        if lease is None:
            lease = await self._kube.get(LEASES, self._name, self._namespace)
        if lease["spec"].get("holderIdentity") != self.identity:
            return
        now = micro_stamp(self._wall())
        spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": now}
        await self._kube.replace(LEASES, {**lease, "spec": spec}, manager=MANAGER)
        logger.info("handed over identity=%s", self.identity)


async def _first(*ways: Awaitable[None], beside: "asyncio.Future[None] | None" = None) -> None:
    """Wait until one of them, or the task beside them, has ended.  The others are cancelled, the task is not."""
    futures = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait([*futures, *([beside] if beside else [])], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
