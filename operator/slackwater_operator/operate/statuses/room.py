"""Why a cleaning job gets no GPU, or no more of them: what of its flavors there is, and what is in the way.

Pure.  Owns the count of each flavor's GPUs as lending sees them, and the words.  These have no number that changes with
each pod: hundreds of statuses would be written anew whenever one GPU is given on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slackwater_operator.core import CleaningJob as Appetite
from slackwater_operator.core import Snapshot
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.names import split_policy_flavor
from slackwater_operator.resources.pool import CapacityPool


@dataclass(slots=True)
class Stock:
    """The GPUs of one flavor of one pool.

    idle: on nodes that take pods.   off: idle on those that do not.   kept: of `idle`, what the pool does not lend.
    young: of the rest, those idle for less than `lendAfter`.   most: of the rest on one node.
    """

    total: int = 0
    idle: int = 0
    off: int = 0
    kept: int = 0
    young: int = 0
    most: int = 0
    lend_after_s: float = 0.0


def stocks(snapshot: Snapshot) -> dict[str, Stock]:
    """By the policy's flavor."""
    found: dict[str, Stock] = {}
    for node in snapshot.nodes:
        stock = found.get(node.flavor)
        if stock is None:
            stock = found[node.flavor] = Stock(lend_after_s=snapshot.limits_of(node.flavor).lend_after_s)
        stock.total += node.gpus
        if not node.schedulable:
            stock.off += len(node.idle_since_s)
            continue
        ages_s = [snapshot.now_s - since_s for since_s in node.idle_since_s]
        lendable = [age_s for age_s in ages_s if age_s > float("-inf")]  # idle since the end of time: kept by the pool
        stock.idle += len(ages_s)
        stock.kept += len(ages_s) - len(lendable)
        stock.young += sum(age_s < stock.lend_after_s for age_s in lendable)
        stock.most = max(stock.most, len(lendable))
    return found


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for one job.

    appetite: as the policy was told; None = it was not, yet.   unheard: services on its flavors whose signals are
    stale.   refused: what a kubelet said of a worker that it did not take, lately.
    """

    appetite: Appetite | None = None
    stocks: Sequence[Stock] = ()
    pools: Sequence[CapacityPool] = ()
    unheard: Sequence[str] = ()
    refused: str = ""


def room(
    appetite: Appetite | None,
    known: Mapping[str, Stock],
    pools: Iterable[CapacityPool],
    unheard: Mapping[str, set[str]],
    refused: str,
) -> Room:
    """Of one job.   pools: its own.   unheard: flavors by service."""
    flavors = appetite.flavors if appetite is not None else ()
    used = {split_policy_flavor(flavor)[0] for flavor in flavors}
    return Room(
        appetite=appetite,
        stocks=[known[flavor] for flavor in flavors if flavor in known],
        pools=[pool for pool in pools if pool.metadata.name in used],
        unheard=[service for service, its in unheard.items() if not its.isdisjoint(flavors)],
        refused=refused,
    )


def shortage(job: CleaningJob, seen: Room, workers: int) -> tuple[str, str]:
    """(reason, words) why it has no more than so many workers.  Called only where it wants more."""
    spec, appetite = job.spec, seen.appetite
    if appetite is None:
        return "NoIdleGPUs", "no plan has been made with it yet"
    if spec.queue is not None and workers >= appetite.max_workers:
        return "QueueFull", f"its queue {spec.queue} holds all GPUs that its maxGPUs allows"
    where = f"{', '.join(spec.flavors)} in {', '.join(spec.pools)}"
    total, idle = sum(one.total for one in seen.stocks), sum(one.idle for one in seen.stocks)
    if not total:
        return "NoGPUs", f"there is no GPU of {where}: kubectl describe cpool {spec.pools[0]} says why"
    if not idle and any(one.off for one in seen.stocks):
        return "NoIdleGPUs", f"GPUs of {where} are idle only on nodes that are cordoned or not ready"
    kept = sum(one.kept for one in seen.stocks)
    if idle and kept == idle:
        return "GPUsReserved", f"what is idle of {where} is not lent: {_limits(seen.pools, total)}"
    if seen.unheard and idle:
        held = f"none is lent where {', '.join(seen.unheard)} may run, whose gateway is not heard"
        return "NoIdleGPUs", f"no other GPU of its flavors is idle; {held}"
    if idle - kept <= sum(one.young for one in seen.stocks):
        after_s = max(one.lend_after_s for one in seen.stocks)
        return "NoIdleGPUs", f"no GPU of {where} has been idle for {after_s:g} s (lendAfter)"
    if max(one.most for one in seen.stocks) < spec.gpus_per_worker:
        return "NoRoom", f"no node has {spec.gpus_per_worker} idle GPUs together (gpusPerWorker)"
    if seen.refused:
        return "NoRoom", f"{seen.refused}; lower what spec.template requests, or add nodes that have it"
    return "NoIdleGPUs", (
        "what is idle is kept for a rise of traffic that would come before a worker has made work durable, "
        "or goes to jobs that have less for their weight"
    )


def _limits(pools: Iterable[CapacityPool], total: int) -> str:
    said = []
    for pool in pools:
        reserved, fraction = pool.spec.inference.reserved_gpus, float(pool.spec.lending.max_lent_fraction)
        limits = [f"inference.reservedGPUs is {reserved}"] if reserved else []
        limits += [f"lending.maxLentFraction is {fraction:g}"] if fraction < 1 else []
        if limits:
            said.append(f"of CapacityPool {pool.metadata.name} {' and '.join(limits)}")
    return f"{'; '.join(said) or 'its pools lend no more'}; there are {total} GPUs"
