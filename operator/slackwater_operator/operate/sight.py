"""One look at a cluster from outside, for the command line: the same caches and the same snapshot as the leader's.

Owns how a person's command learns what the leader knows by its own polls: through the API server's proxy, as far as
that person may use it.  Writes nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from slackwater_operator.cluster.kube.cluster import KubeCluster
from slackwater_operator.cluster.kube.ports import JobProgress, Replica, Revision, WorkerProgress
from slackwater_operator.core import PermanentError, Snapshot, TemporaryError, TrafficSample
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.types import SERVICES
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.gateway import Answer, read_answer
from slackwater_operator.operate.lead import FleetLoop
from slackwater_operator.operate.progress import read_progress
from slackwater_operator.operate.remote import BadAnswer
from slackwater_operator.operate.services import limits, service_spec
from slackwater_operator.operate.watches import Watches
from slackwater_operator.resources.names import CONTROL_PORT

SYNC_S = 30.0
PROXY_S = 3.0
ABREAST = 16


@dataclass(slots=True)
class Heard:
    """What gateways and keepers said at one moment, to a cluster that acts on nothing.

    It is `Signals`, `Progress` and `Revisions` in one.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    jobs: dict[str, JobProgress] = field(default_factory=dict)
    workers: dict[str, dict[str, WorkerProgress]] = field(default_factory=dict)

    def take_samples(self) -> tuple[tuple[str, TrafficSample], ...]:
        """One of each service that answered."""
        return tuple(
            (service, TrafficSample(one.at_s, one.in_flight, one.queued, one.arrivals_total))
            for service, one in self.answers.items()
        )

    def tell(self, service: str, replicas: Sequence[Replica]) -> None:
        """Nobody is told anything."""

    def told(self, service: str) -> frozenset[str] | None:  # noqa: ARG002 - the protocol's
        """Not known."""
        return None

    def in_flight(self, service: str, uid: str) -> int | None:
        """Streams of one replica."""
        answer = self.answers.get(service)
        return answer.replicas.get(uid, 0) if answer else None

    def job(self, uid: str) -> JobProgress | None:
        """How far a job is."""
        return self.jobs.get(uid)

    def worker(self, uid: str, name: str) -> WorkerProgress | None:
        """A worker of it."""
        return self.workers.get(uid, {}).get(name)

    async def verify(self, uid: str, receipt: Mapping[str, Any]) -> bool | None:  # noqa: ARG002 - the protocol's
        """Nothing is verified."""
        return None

    def serving(self, service: str) -> Revision | None:  # noqa: ARG002 - the protocol's
        """Nothing is started."""
        return None


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen."""

    kube: Kube
    watches: Watches
    catalog: Catalog
    cluster: KubeCluster
    snapshot: Snapshot


@asynccontextmanager
async def sight(connection: Connection, *, ask: bool = False) -> AsyncIterator[Sight]:
    """Look once.  ask: gateways and keepers too.

    Raises PermanentError when the API server refuses it, TemporaryError when it does not answer.
    """
    async with Kube(connection, "slackwater/cli") as kube:
        watches = Watches(kube)
        wanted = (watches.pods, watches.nodes, *watches.ours)
        # The caches try again for ever; a person wants to hear at once what is not allowed, or not there.
        await asyncio.gather(*(kube.list(cache.resource, limit=1, fields="metadata.name=none") for cache in wanted))
        running = asyncio.ensure_future(watches.run(wanted))
        try:
            async with asyncio.timeout(SYNC_S):
                await watches.synced(wanted)
        except TimeoutError:
            raise TemporaryError(f"{connection.server} did not answer within {SYNC_S:g} s") from None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        catalog = Catalog.of(watches)
        catalog.look()
        heard = await _ask(kube, catalog) if ask else Heard()
        cluster = KubeCluster(kube, watches.caches(), heard, heard, heard)
        loop = FleetLoop(cluster, (), limits(catalog.pools.valid.values()))
        loop.serve([service_spec(service, catalog.pools.valid) for service in catalog.services.valid.values()])
        yield Sight(kube, watches, catalog, cluster, loop.look(time.monotonic()))


async def _ask(kube: Kube, catalog: Catalog) -> Heard:
    """Gateways and keepers that the operator runs, through the API server."""
    heard = Heard()
    room = asyncio.Semaphore(ABREAST)

    async def gateway(namespace: str, name: str) -> None:
        async with room:
            body = await _proxied(kube, namespace, f"{name}-gateway-control", "signals")
        if body is not None:
            with contextlib.suppress(BadAnswer):
                heard.answers[f"{namespace}/{name}"] = read_answer(body, time.monotonic())

    async def keeper(namespace: str, name: str) -> None:
        async with room:
            body = await _proxied(kube, namespace, f"{name}-keeper", "progress")
        if body is not None:
            with contextlib.suppress(BadAnswer):
                uid = f"{namespace}/{name}"
                heard.jobs[uid], heard.workers[uid] = read_progress(body, time.monotonic())

    await asyncio.gather(
        *(gateway(*key) for key, one in catalog.services.valid.items() if one.spec.gateway.control_url is None),
        *(keeper(*key) for key, one in catalog.jobs.valid.items() if one.spec.ledger and one.spec.keeper.url is None),
    )
    return heard


async def _proxied(kube: Kube, namespace: str, service: str, path: str) -> bytes | None:
    """One GET at a service of the cluster; None when it, or the person's right to do so, is not there."""
    try:
        async with asyncio.timeout(PROXY_S):
            return await kube.raw("GET", f"{SERVICES.path(namespace, f'{service}:{CONTROL_PORT}', 'proxy')}/{path}")
    except (PermanentError, TemporaryError, TimeoutError):
        return None
