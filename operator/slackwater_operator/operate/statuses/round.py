"""One round over all our objects: gathers what is known of each, and hands its status to the writer.

Owns the gathering; the words are of `services`, `jobs` and `pools`, the writes of `writer`.  Called by `lead`, once a
second; a Reclaim's own status is the cluster's part, but for the answers of dry runs.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Protocol

from slackwater_operator.cluster.kube.ports import JobProgress, JobView, PoolView, ServiceView
from slackwater_operator.core import Phase, Snapshot
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.types import Key, Object, key_of, parse_stamp
from slackwater_operator.loop import Loop
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.children import Children
from slackwater_operator.operate.dryrun import forecast
from slackwater_operator.operate.revisions import Ledger
from slackwater_operator.operate.services import missing_pools
from slackwater_operator.operate.statuses import jobs, pools, services
from slackwater_operator.operate.statuses.conditions import Emit, conditions
from slackwater_operator.operate.statuses.writer import Event, StatusWriter
from slackwater_operator.operate.watches import Watches
from slackwater_operator.resources.names import RECLAIM
from slackwater_operator.resources.reclaim import Reclaim

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

    async def write(self, known: Known) -> None:
        """Once over everything."""
        snapshot = known.loop.snapshot
        if snapshot is None:
            return
        now = pools.stamp(datetime.fromtimestamp(self._wall(), UTC))
        self._pools(known, now)
        self._services(known, snapshot, now)
        self._jobs(known, snapshot, now)
        self._answers(snapshot, now)
        await self._writer.flush()
        self._writer.forget(self._watches.ours)

    def _pools(self, known: Known, now: str) -> None:
        views = {view.name: view for view in known.cluster.pools()}
        shelf = self._catalog.pools
        slurm = {job.status.slurm.cluster for job in self._catalog.jobs.valid.values() if job.status.slurm is not None}
        for obj in [*self._watches.pools.values()]:
            key = key_of(obj)
            refused = shelf.refused.get(key, "")
            said = Said()
            pool, view, side = shelf.valid.get(key), views.get(key[1]), known.side_word(key[1])
            status = pools.pool_status(obj, pool, refused, view, now, said, slurm, side)
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
            service = self._catalog.services.valid.get(key)
            seen = services.Seen(
                view=views.get(name),
                load=loads.get(name),
                desired=need.get(name, 0),
                choice=known.ledger.choices.get(name),
                missing=missing_pools(service, self._catalog.pools.valid) if service else (),
                has_gateway=known.has_gateway(name),
                late=late.get(name, ""),
                releasing=bool(releasing) and any(flavor in releasing for flavor in _flavors(snapshot, name)),
                trouble=troubles.get(key, ""),
            )
            refused = self._catalog.services.refused.get(key, "")
            said = Said()
            status = services.service_status(obj, service, refused, seen, now, said)
            self._writer.want(self._watches.services, obj, status, services.SLOW, said)

    def _jobs(self, known: Known, snapshot: Snapshot, now: str) -> None:
        views = {view.uid: view for view in known.cluster.jobs()}
        troubles = owners_of(known.children.problems)
        there = self._catalog.pools.valid
        lent_on = {job.uid: job.flavors for job in snapshot.jobs}
        unheard = {s.name: {v.flavor for v in s.variants} for s in snapshot.services if s.load.stale}
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
                unheard=[name for name, its in unheard.items() if not its.isdisjoint(lent_on.get(uid, ()))],
                trouble=troubles.get(key, ""),
            )
            refused = self._catalog.jobs.refused.get(key, "")
            said = Said()
            status = jobs.job_status(obj, job, refused, seen, now, said)
            self._writer.want(self._watches.jobs, obj, status, jobs.SLOW, said)

    def _answers(self, snapshot: Snapshot, now: str) -> None:
        for key, reclaim in self._catalog.reclaims.valid.items():
            obj = self._watches.reclaims.get(*key)
            if obj is None or not reclaim.spec.dry_run or (obj.get("status") or {}).get("phase"):
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


def answer(obj: Object, reclaim: Reclaim, snapshot: Snapshot, now: str, emit: Emit) -> Object:
    """The status of a dry run, answered from the newest snapshot."""
    service = f"{reclaim.metadata.namespace}/{reclaim.spec.for_ref.name}"
    multiplier = None if reclaim.spec.multiplier is None else float(reclaim.spec.multiplier)
    status: Object = {"observedGeneration": obj["metadata"].get("generation") or 0}
    try:
        found = forecast(snapshot, service, multiplier=multiplier, gpus=reclaim.spec.gpus)
    except ValueError as error:
        reasons = {"Answered": ("CannotAnswer", str(error))}
        return status | {"phase": "Failed", "conditions": conditions(RECLAIM, obj, reasons, now, emit)}
    said = (
        f"{found.demand_slots:g} slots are asked for; {found.need} replicas are needed, {found.have} are there, "
        f"{found.free} start on idle GPUs, {len(found.stops)} workers stop"
    )
    if found.assumed:
        said += "; no traffic is known, so every replica was taken for full"
    return status | {
        "phase": "Planned",
        "answer": found.answer().dump(),
        "lostSeconds": round(found.lost_s, 3),
        "timings": {"decidedAt": now},
        "conditions": conditions(RECLAIM, obj, {"Answered": ("Answered", said)}, now, emit),
    }


def owners_of(problems: Mapping[tuple[str, Key], str]) -> dict[Key, str]:
    """Problems of children by their owner; a child's name is its owner's and a suffix without a dash."""
    return {(key[0], owner_name(key[1])): said for (_, key), said in problems.items()}


def owner_name(child: str) -> str:
    """The owner's name in a child's."""
    for suffix in ("-gateway-control", "-gateway", "-keeper"):
        if child.endswith(suffix):
            return child.removesuffix(suffix)
    return child.rpartition("-gate-")[0] or child.rpartition("-")[0]


def _flavors(snapshot: Snapshot, service: str) -> Iterable[str]:
    for one in snapshot.services:
        if one.name == service:
            return [variant.flavor for variant in one.variants]
    return []
