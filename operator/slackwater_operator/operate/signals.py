"""What the gateways of all services say together, and what each of them is told: `Signals` for the cluster.

Owns which gateways there are (as `follow` was told), the sum of several gateways of one service, and samples until they
are taken.  One that does not answer makes its service's samples stop: the policy then holds what there is.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from slackwater_operator.cluster.kube.ports import Replica
from slackwater_operator.core import TrafficSample
from slackwater_operator.operate.gateway import Answer, Gateway
from slackwater_operator.operate.remote import Asker

KEPT_SAMPLES = 10_000  # between two ticks; more can only pile up when no tick comes, and then the newest count


class Gateways:
    """Polls every gateway that it follows.  One event loop; all methods are called on it.

    poke: called when a tick is wanted early, because demand rose.
    """

    def __init__(self, asker: Asker, clock: Callable[[], float], poke: Callable[[], None]) -> None:
        self._asker = asker
        self._clock = clock
        self._poke = poke
        self._gateways: dict[str, dict[str, Gateway]] = {}  # service -> url -> gateway
        self._wanted: Mapping[str, Sequence[tuple[str, bool]]] = {}
        self._replicas: dict[str, tuple[Replica, ...]] = {}
        self._gone_arrivals: dict[str, int] = {}  # of gateways that are gone, so that a total never falls
        self._samples: deque[tuple[str, TrafficSample]] = deque(maxlen=KEPT_SAMPLES)

    async def follow(self, wanted: Mapping[str, Sequence[tuple[str, bool]]]) -> None:
        """The gateways of each service from now on: (url, whether it is required: it does not leave)."""
        if wanted == self._wanted:
            return
        gone = [service for service in self._gateways if service not in wanted]
        # Together: one after another, hundreds of them would outlast a Lease.
        await asyncio.gather(*(self._end(service, [*self._gateways[service]]) for service in gone))
        for service in gone:
            del self._gateways[service]
            self._gone_arrivals.pop(service, None)
            self._replicas.pop(service, None)
        for service, urls in wanted.items():
            present = self._gateways.setdefault(service, {})
            there = dict(urls)
            await self._end(service, [url for url in present if url not in there])
            for url, is_required in there.items():
                if url not in present:
                    present[url] = Gateway(service, url, self._asker, self._clock, self._heard)
                    if service in self._replicas:
                        present[url].tell(self._replicas[service])
                present[url].is_required = is_required
        self._wanted = wanted

    async def close(self) -> None:
        """Stop following."""
        await self.follow({})

    def follows(self, service: str) -> bool:
        """There is a gateway of it."""
        return bool(self._gateways.get(service))

    def ages_s(self) -> dict[str, float | None]:
        """Seconds since the newest good answer of each service's slowest gateway; None = never one."""
        now_s = self._clock()
        ages: dict[str, float | None] = {}
        for service in self._gateways:
            required = self._required(service)
            newest = [gateway.newest.at_s for gateway in required if gateway.newest is not None]
            ages[service] = now_s - min(newest) if newest and len(newest) == len(required) else None
        return ages

    def newest(self, service: str) -> Answer | None:
        """The newest sum of a service's gateways; None = not known."""
        return self._sum(service)

    # --- `Signals` ----------------------------------------------------------------------------------

    def take_samples(self) -> tuple[tuple[str, TrafficSample], ...]:
        """Those since the last call."""
        samples = tuple(self._samples)
        self._samples.clear()
        return samples

    def tell(self, service: str, replicas: Sequence[Replica]) -> None:
        """All replicas of a service that may get requests; sent on a change."""
        self._replicas[service] = tuple(replicas)
        for gateway in self._gateways.get(service, {}).values():
            gateway.tell(replicas)

    def told(self, service: str) -> frozenset[str] | None:
        """The uids that some gateway may still send to; None = not known."""
        confirmed = [gateway.confirmed for gateway in self._gateways.get(service, {}).values()]
        if not confirmed or None in confirmed:
            return None
        return frozenset().union(*(uids for uids in confirmed if uids is not None))

    def in_flight(self, service: str, uid: str) -> int | None:
        """Streams of one replica over all gateways of its service; None = not known."""
        now_s = self._clock()
        total = 0
        gateways = self._gateways.get(service, {})
        for gateway in gateways.values():
            if gateway.newest is not None and gateway.is_fresh(now_s):
                total += gateway.newest.replicas.get(uid, 0)
            elif gateway.is_required:
                return None
        return total if gateways else None

    # --- the sum ------------------------------------------------------------------------------------

    def _required(self, service: str) -> list[Gateway]:
        return [gateway for gateway in self._gateways.get(service, {}).values() if gateway.is_required]

    def _heard(self, gateway: Gateway, answer: Answer, before: Answer | None) -> None:
        total = self._sum(gateway.service)
        if total is None:
            return
        sample = TrafficSample(
            t_s=answer.at_s,
            in_flight=total.in_flight,
            queued=total.queued,
            arrivals_total=total.arrivals_total,
            oldest_queued_s=total.oldest_queued_s,
            first_audio_p95_s=total.first_audio_p95_s,
        )
        self._samples.append((gateway.service, sample))
        if before is None or answer.in_flight + answer.queued > before.in_flight + before.queued:
            self._poke()

    def _sum(self, service: str) -> Answer | None:
        """What all gateways of a service say together; None unless each required one said something lately."""
        now_s = self._clock()
        gateways = [*self._gateways.get(service, {}).values()]
        fresh = [gateway.newest for gateway in gateways if gateway.newest is not None and gateway.is_fresh(now_s)]
        if not fresh or any(gateway.is_required and not gateway.is_fresh(now_s) for gateway in gateways):
            return None
        slow_s = [answer.first_audio_p95_s for answer in fresh if answer.first_audio_p95_s is not None]
        return Answer(
            at_s=max(answer.at_s for answer in fresh),
            in_flight=sum(answer.in_flight for answer in fresh),
            queued=sum(answer.queued for answer in fresh),
            arrivals_total=sum(gateway.arrivals_total for gateway in gateways) + self._gone_arrivals.get(service, 0),
            oldest_queued_s=max(answer.oldest_queued_s for answer in fresh),
            first_audio_p95_s=max(slow_s, default=None),
            replicas={},
            backlogs=sum(answer.backlogs for answer in fresh),
            boot="",
        )

    async def _end(self, service: str, urls: Iterable[str]) -> None:
        for url in urls:
            gateway = self._gateways[service].pop(url)
            self._gone_arrivals[service] = self._gone_arrivals.get(service, 0) + gateway.arrivals_total
            await gateway.close()
