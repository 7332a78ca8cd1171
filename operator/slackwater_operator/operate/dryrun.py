"""What would happen if a service's traffic rose: the policy's plan on a snapshot with it, carried out by nobody.

Pure.  Answers user-made Reclaims (`dryRun: true`) and `slackwater what-if`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slackwater_operator.core import Condition, Kind, Limits, Load, Phase, Service, Snapshot, Verb, Workload
from slackwater_operator.policy import plan
from slackwater_operator.policy.draft import lost_s
from slackwater_operator.resources.base import duration
from slackwater_operator.resources.names import split_policy_flavor
from slackwater_operator.resources.reclaim import MAX_VICTIMS, Answer, StoppedWorker

ACTIVE = (Phase.STARTING, Phase.RUNNING)
NO_BOUND = Limits(max_parallel=1_000_000)  # all of it, not only the first wave


@dataclass(frozen=True, slots=True)
class Stop:
    """A worker that would stop.   within_s: at the latest, from the rise on."""

    uid: str
    job: str
    node: str
    flavor: str
    gpus: int
    within_s: float
    lost_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one rise would bring.

    demand_slots: that it was made with.   assumed: no traffic is known, so every replica was taken for full.
    have, need: replicas.   free: new replicas on GPUs that are idle or already on their way.
    """

    service: str
    demand_slots: float
    assumed: bool
    have: int
    need: int
    free: int
    stops: tuple[Stop, ...]
    unmet: int

    @property
    def lost_s(self) -> float:
        """GPU-seconds of all workers that would stop."""
        return sum(stop.lost_s for stop in self.stops)

    def answer(self) -> Answer:
        """As the status of a Reclaim has it."""
        workers = tuple(
            StoppedWorker(
                pod=stop.uid,
                job=stop.job or None,
                node=stop.node or None,
                flavor=split_policy_flavor(stop.flavor)[1] or None,
                gpus=stop.gpus,
                when=duration(stop.within_s),
                lost_s=round(stop.lost_s, 3),
            )
            for stop in self.stops[:MAX_VICTIMS]
        )
        return Answer(workers=workers, unmet=self.unmet)


def forecast(snapshot: Snapshot, service: str, *, multiplier: float | None = None, gpus: int | None = None) -> Forecast:
    """Exactly one of multiplier (times the traffic of now) and gpus (so many more than it has).

    Raises ValueError for a service that is not in the snapshot.
    """
    assert (multiplier is None) != (gpus is None), "one question at a time"
    asked = next((one for one in snapshot.services if one.name == service), None)
    if asked is None:
        known = ", ".join(sorted(one.name for one in snapshot.services)) or "none"
        raise ValueError(f"there is no service {service}; there are: {known}")
    mine = [w for w in snapshot.workloads if w.kind is Kind.INFERENCE and w.owner == service and w.phase in ACTIVE]
    demand, assumed = present_demand(asked, mine)
    if multiplier is not None:
        raised = replace(asked, load=steady(asked.load, demand * multiplier))
    else:
        assert gpus is not None
        of_one = max(asked.variants, key=lambda one: (one.preference, one.uid)).gpus if asked.variants else 1
        floor = len(mine) + math.ceil(gpus / of_one)
        raised = replace(
            asked,
            min_replicas=max(asked.min_replicas, floor),
            max_replicas=max(asked.max_replicas, floor),
            load=steady(asked.load, demand),
        )
    # The others stay as they are: their traffic of now, held.
    services = tuple(raised if one.name == service else one for one in snapshot.services)
    planned = plan(replace(snapshot, services=services, limits=NO_BOUND))
    variants = {variant.uid: variant for variant in asked.variants}
    stops = tuple(
        _stop(snapshot, action.uid)
        for action in planned.actions
        if action.verb is Verb.EVICT and action.beneficiary in variants
    )
    started = sum(action.count for action in planned.actions if action.verb is Verb.START and action.uid in variants)
    started += sum(action.verb is Verb.CANCEL and _owner(snapshot, action.uid) == service for action in planned.actions)
    freed: dict[str, int] = {}
    for action in planned.actions:
        if action.verb is Verb.EVICT and action.beneficiary in variants:
            freed[action.beneficiary] = freed.get(action.beneficiary, 0) + _workload(snapshot, action.uid).gpus
    by_eviction = sum(count // variants[uid].gpus for uid, count in freed.items())
    need = dict(planned.need_replicas).get(service, 0)
    missing = need - len(mine) - started - by_eviction  # of which some may get GPUs that are on their way anyway
    return Forecast(
        service=service,
        demand_slots=demand * (multiplier or 1.0),
        assumed=assumed,
        have=len(mine),
        need=need,
        free=min(max(0, need - len(mine)), started),
        stops=stops,
        unmet=max(0, missing) if Condition.UNMET_NEED in planned.conditions else 0,
    )


def present_demand(service: Service, replicas: Sequence[Workload]) -> tuple[float, bool]:
    """(slots asked for now, whether that is an assumption)."""
    if not service.load.stale:
        return max(service.load.now_slots, service.load.panic_slots, service.load.stable_slots), False
    slots = {variant.flavor: variant.slots_per_replica for variant in service.variants}
    return float(sum(slots.get(replica.flavor, 0) for replica in replicas)), True


def steady(load: Load, slots: float) -> Load:
    """The same service with that traffic, fresh and without a trend."""
    return replace(
        load,
        now_slots=slots,
        panic_slots=slots,
        stable_slots=slots,
        slope_slots_per_s=0.0,
        window_max_slots=math.inf,
        age_s=0.0,
        stale=False,
    )


def _stop(snapshot: Snapshot, uid: str) -> Stop:
    worker = _workload(snapshot, uid)
    job = next((job for job in snapshot.jobs if job.uid == worker.owner), None)
    within_s = job.checkpoint_s if job else snapshot.limits_of(worker.flavor).retarget_after_s
    lost = lost_s(worker, snapshot.now_s)
    return Stop(uid, worker.owner, worker.node, worker.flavor, worker.gpus, within_s, lost)


def _workload(snapshot: Snapshot, uid: str) -> Workload:
    return next(workload for workload in snapshot.workloads if workload.uid == uid)


def _owner(snapshot: Snapshot, uid: str) -> str:
    return next((workload.owner for workload in snapshot.workloads if workload.uid == uid), "")
