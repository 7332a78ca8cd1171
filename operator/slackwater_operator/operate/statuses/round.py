"""One round over all our objects: gathers what is known of each, and hands its status to the writer.

Owns the gathering; the words are of `services`, `jobs` and `pools`, the writes of `writer`.  Called by `lead`, once a
second; a Reclaim's own status is the cluster's part, but for the answers of dry runs.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Protocol

from slackwater_operator.cluster.kube.ports import JobProgress, JobView, PoolView, ServiceView
from slackwater_operator.core import Kind, Phase, Snapshot
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.types import Key, Object, key_of, parse_stamp
from slackwater_operator.loop import Loop
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.children import Children
from slackwater_operator.operate.revisions import Ledger
from slackwater_operator.operate.services import missing_flavors, missing_pools
from slackwater_operator.operate.statuses import jobs, pools, services
from slackwater_operator.operate.statuses.answers import answer, is_open
from slackwater_operator.operate.statuses.conditions import Emit
from slackwater_operator.operate.statuses.obstacles import Obstacles
from slackwater_operator.operate.statuses.room import room, stocks
from slackwater_operator.operate.statuses.writer import Event, StatusWriter
from slackwater_operator.operate.watches import Watches
from slackwater_operator.resources import names

logger = logging.getLogger(__name__)

LATE_S = 600.0  # a reclaim that missed its deadline is shown for so long


class Views(Protocol):
    """What the cluster shows."""

    def pools(self) -> tuple[PoolView, ...]: ...
    def services(self) -> tuple[ServiceView, ...]: ...
    def jobs(self) -> tuple[JobView, ...]: ...


class Jobs(Protocol):
    """What the keepers say."""

    def job(self, uid: str) -> JobProgress | None: ...


class Known(Protocol):
    """What the leader knows beside the caches."""

    @property
    def loop(self) -> Loop: ...
    @property
    def cluster(self) -> Views: ...
    @property
    def keepers(self) -> Jobs: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def children(self) -> Children: ...
    def has_gateway(self, service: str) -> bool: ...
    def has_keeper(self, job: str) -> bool: ...
    def side_word(self, pool: str) -> str | None: ...


class Said(list[Event]):
    """An `Emit` that keeps what it is told, until the status that it belongs to is written."""

    def __call__(self, obj: Object, type_: str, reason: str, message: str, action: str, /) -> None:
        self.append((obj, type_, reason, message, action))


class Round:
    """Writes the statuses of all our objects."""

    def __init__(
        self,
        kube: Kube,
        watches: Watches,
        catalog: Catalog,
        emit: Emit,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._watches = watches
        self._catalog = catalog
        self._clock = clock
        self._wall = wall
        self._writer = StatusWriter(kube, clock, emit)
        self._obstacles = Obstacles(kube, watches.pods, wall)

    async def write(self, known: Known) -> None:
        """Once over everything."""
        snapshot = known.loop.snapshot
        if snapshot is None:
            return
        now = pools.stamp(datetime.fromtimestamp(self._wall(), UTC))
        await self._obstacles.look()
        self._pools(known, snapshot, now)
        self._services(known, snapshot, now)
        self._jobs(known, snapshot, now)
        self._answers(snapshot, now)
        await self._writer.flush()
        self._writer.forget(self._watches.ours)

    def _pools(self, known: Known, snapshot: Snapshot, now: str) -> None:
        views = {view.name: view for view in known.cluster.pools()}
        shelf = self._catalog.pools
        slurm = {job.status.slurm.cluster for job in self._catalog.jobs.valid.values() if job.status.slurm is not None}
        cordoned: dict[str, dict[str, int]] = {}
        for node in snapshot.nodes:
            if not node.schedulable:
                cordoned.setdefault(names.split_policy_flavor(node.flavor)[0], {})[node.name] = node.gpus
        for obj in [*self._watches.pools.values()]:
            key = key_of(obj)
            refused = shelf.refused.get(key, "")
            said = Said()
            pool, view, side = shelf.valid.get(key), views.get(key[1]), known.side_word(key[1])
            status = pools.pool_status(obj, pool, refused, view, now, said, slurm, side, cordoned.get(key[1]))
            self._writer.want(self._watches.pools, obj, status, (), said)
        nodes = [*self._watches.nodes.values()]
        for obj in [*self._watches.flavors.values()]:
            key = key_of(obj)
            flavor, refused = self._catalog.flavors.valid.get(key), self._catalog.flavors.refused.get(key, "")
            said = Said()
            status = pools.flavor_status(obj, flavor, refused, nodes, now, said)
            self._writer.want(self._watches.flavors, obj, status, (), said)

    def _services(self, known: Known, snapshot: Snapshot, now: str) -> None:
        views = {view.name: view for view in known.cluster.services()}
        loads = {service.name: service.load for service in snapshot.services}
        need = dict(known.loop.plan.need_replicas)
        late = self._late()
        troubles = owners_of(known.children.problems)
        releasing = {workload.flavor for workload in snapshot.workloads if workload.phase is Phase.LEAVING}
        for obj in [*self._watches.services.values()]:
            key = key_of(obj)
            name = "/".join(key)
            service, choice = self._catalog.services.valid.get(key), known.ledger.choices.get(name)
            seen = services.Seen(
                view=views.get(name),
                load=loads.get(name),
                desired=need.get(name, 0),
                choice=choice,
                missing=missing_pools(service, self._catalog.pools.valid) if service else (),
                missing_flavors=missing_flavors(service, self._catalog.pools.valid) if service else (),
                has_gateway=known.has_gateway(name),
                late=late.get(name, ""),
                releasing=bool(releasing) and any(flavor in releasing for flavor in _flavors(snapshot, name)),
                trouble=troubles.get(key, ""),
                stuck=self._obstacles.of(names.POD_INFERENCE, key),
                gateway=self._obstacles.of(names.POD_GATEWAY, key),
                gate=self._obstacles.of(names.POD_GATE, key, choice.current.name) if choice is not None else None,
                refused=self._obstacles.refused(names.POD_INFERENCE, key),
            )
            refused = self._catalog.services.refused.get(key, "")
            said = Said()
            status = services.service_status(obj, service, refused, seen, now, said)
            self._writer.want(self._watches.services, obj, status, services.SLOW, said)

    def _jobs(self, known: Known, snapshot: Snapshot, now: str) -> None:
        views = {view.uid: view for view in known.cluster.jobs()}
        troubles = owners_of(known.children.problems)
        there = self._catalog.pools.valid
        told = {job.uid: job for job in snapshot.jobs}
        stock, silent = stocks(snapshot), unheard(snapshot)
        now_s = self._clock()
        for obj in [*self._watches.jobs.values()]:
            key = key_of(obj)
            uid = "/".join(key)
            job = self._catalog.jobs.valid.get(key)
            mine = [there["", name] for name in job.spec.pools if ("", name) in there] if job else []
            flavors = {flavor.name for pool in mine for flavor in pool.spec.flavors}
            seen = jobs.Seen(
                view=views.get(uid),
                progress=known.keepers.job(uid),
                missing_pools=[name for name in job.spec.pools if ("", name) not in there] if job else (),
                missing_flavors=[name for name in job.spec.flavors if name not in flavors] if job else (),
                queues={queue.name for pool in mine for queue in pool.spec.queues},
                has_keeper=known.has_keeper(uid),
                now_s=now_s,
                room=room(told.get(uid), stock, mine, silent, self._obstacles.refused(names.POD_CLEANING, key)),
                stuck=self._obstacles.of(names.POD_CLEANING, key),
                keeper=self._obstacles.of(names.POD_KEEPER, key),
                trouble=troubles.get(key, ""),
            )
            refused = self._catalog.jobs.refused.get(key, "")
            said = Said()
            status = jobs.job_status(obj, job, refused, seen, now, said)
            self._writer.want(self._watches.jobs, obj, status, jobs.SLOW, said)

    def _answers(self, snapshot: Snapshot, now: str) -> None:
        for key, reclaim in self._catalog.reclaims.valid.items():
            obj = self._watches.reclaims.get(*key)
            if obj is None or not is_open(obj):
                continue
            said = Said()
            self._writer.want(self._watches.reclaims, obj, answer(obj, reclaim, snapshot, now, said), (), said)

    def _late(self) -> dict[str, str]:
        """By service, a Reclaim for it that missed its deadline lately."""
        found = {}
        for obj in self._watches.reclaims.values():
            conditions_of = (obj.get("status") or {}).get("conditions") or ()
            missed = next((one for one in conditions_of if (one["type"], one["status"]) == ("InTime", "False")), None)
            if missed is not None and self._wall() - parse_stamp(missed["lastTransitionTime"]) < LATE_S:
                name = f"{obj['metadata']['namespace']}/{obj['spec']['forRef']['name']}"
                found[name] = f"Reclaim {obj['metadata']['name']}: {missed.get('message', '')}"
        return found


def owners_of(problems: Mapping[tuple[str, Key], str]) -> dict[Key, str]:
    """Problems of children by their owner; a child's name is its owner's and a suffix without a dash."""
    return {(key[0], owner_name(key[1])): said for (_, key), said in problems.items()}


def owner_name(child: str) -> str:
    """The owner's name in a child's."""
    for suffix in ("-gateway-control", "-gateway", "-keeper"):
        if child.endswith(suffix):
            return child.removesuffix(suffix)
    return child.rpartition("-gate-")[0] or child.rpartition("-")[0]


def unheard(snapshot: Snapshot) -> dict[str, set[str]]:
    """The flavors of each service that keeps its GPUs from being lent, since nobody knows its traffic."""
    served = {workload.owner for workload in snapshot.workloads if workload.kind is Kind.INFERENCE}
    return {
        service.name: {variant.flavor for variant in service.variants}
        for service in snapshot.services
        if service.load.stale and (math.isfinite(service.load.age_s) or service.name in served)
    }


def _flavors(snapshot: Snapshot, service: str) -> Iterable[str]:
    for one in snapshot.services:
        if one.name == service:
            return [variant.flavor for variant in one.variants]
    return []
