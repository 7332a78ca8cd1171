"""How many decode slots and replicas a service needs.

Owns the arithmetic from `Load` to slots; knows no GPUs and no nodes.  Called by `serve` and `lend`.

Headroom is `max(burst_slots, rise_slots)` and counts as need: it is what arrives before a reclaim is
done, so only a replica that already runs can carry it, and cleaning is evicted to keep it.  The learned
part (`rise_slots`) counts only while there is demand; a service that nobody calls keeps `min_replicas`
and the burst that a person asked for, and yesterday's rises do not hold GPUs all night.
"""

import math
from collections.abc import Sequence

from slackwater_operator.core import Load, Service

EPSILON = 1e-9  # sums of slots are compared with this much tolerance


def demand_slots(load: Load) -> float:
    """Slots asked for now: the newest sample or either mean, whichever is most."""
    return max(load.now_slots, load.panic_slots, load.stable_slots)


def headroom_slots(service: Service, demand: float) -> float:
    """Slots to keep ready above `demand`."""
    return max(float(service.burst_slots), service.load.rise_slots if demand > 0 else 0.0)


def need_slots(service: Service, lead_s: float) -> float:
    """Slots that will be needed once a replica that is asked for now can serve."""
    demand = demand_slots(service.load)
    return demand + max(0.0, service.load.slope_slots_per_s) * lead_s + headroom_slots(service, demand)


def quiet_slots(service: Service) -> float:
    """Slots that the survivors of a shrink must have; infinite while the window is not covered."""
    lead_s = max((variant.lead_s for variant in service.variants), default=0.0)
    peak = service.load.window_max_slots
    return max(need_slots(service, lead_s), peak + headroom_slots(service, peak))


def bounds(service: Service) -> tuple[int, int]:
    """(fewest, most) replicas; where the two contradict, never more than the maximum."""
    return min(service.min_replicas, service.max_replicas), service.max_replicas


def deadband_replicas(service: Service) -> int:
    """Surplus replicas to tolerate.  None after a whole window without a request: zero has no noise."""
    asked = max(demand_slots(service.load), service.load.window_max_slots)
    return service.deadband_replicas if asked > 0 else 0


def wanted_replicas(service: Service, present: Sequence[int]) -> int:
    """Replicas wanted now, for status: those present first, then ones of the preferred variant.

    present: slots of each staying replica, the one to keep longest first.  Held as it is while the
    signals are stale.
    """
    fewest, most = bounds(service)
    if service.load.stale or not service.variants:
        return max(len(present), fewest)
    best = max(service.variants, key=lambda variant: (variant.preference, variant.uid))
    missing = need_slots(service, best.lead_s)
    count = 0
    for slots in present:
        if missing <= EPSILON:
            break
        missing -= slots
        count += 1
    if missing > EPSILON and best.slots_per_replica > 0:
        count += math.ceil(missing / best.slots_per_replica - EPSILON)
    return min(max(count, fewest), most)
