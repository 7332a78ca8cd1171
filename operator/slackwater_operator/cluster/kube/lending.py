"""How much of a pool may be lent.

Owns the two limits that a pool states for all of its flavors together: GPUs reserved for inference and the largest
part that is lent at once.  Called by `starts` before a worker is made and by `observing` for what the policy sees.
"""

import math

from slackwater_operator.cluster.kube.state import State
from slackwater_operator.resources import names
from slackwater_operator.resources.pool import CapacityPool


def is_limited(pool: CapacityPool) -> bool:
    """Whether a pool keeps any of its GPUs from being lent."""
    return pool.spec.inference.reserved_gpus > 0 or float(pool.spec.lending.max_lent_fraction) < 1.0


def lent_room(state: State, pool: CapacityPool) -> int:
    """GPUs of a pool that may be lent beside those that are."""
    name = pool.metadata.name
    total = sum(page.seat.gpus for page in state.books.pages.values() if page.seat.pool == name)
    if not is_limited(pool):
        return total
    lent = sum(
        pod.gpus(state.catalogue.resource_of(pod.flavor))
        for pod in state.index.ours.values()
        if pod.kind == names.POD_CLEANING and pod.pool == name and pod.node and not pod.is_over
    )
    lent += sum(
        promise.gpus
        for promise in state.books.promises.values()
        if (page := state.books.pages.get(promise.node)) is not None and page.seat.pool == name
    )
    most = math.floor(float(pool.spec.lending.max_lent_fraction) * total + 1e-9)
    return max(0, min(most, total - pool.spec.inference.reserved_gpus) - lent)
