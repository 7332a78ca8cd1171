"""The order in which a plan is made: inference, training, lost nodes, limits, lending.

Owns that order and the small parts without a module of their own.  Called through `policy.plan`.
"""

from collections.abc import Mapping

from slackwater_operator.core import PRIORITY, Condition, Kind, Phase, Plan, Reason, Snapshot, Workload
from slackwater_operator.policy.draft import ACTIVE, Draft, victim_order
from slackwater_operator.policy.lend import lend
from slackwater_operator.policy.reclaim import Claim, reclaim
from slackwater_operator.policy.serve import Serving


def plan(snapshot: Snapshot) -> Plan:
    """What to do now.  Its actions are in the order to apply them.

    1. Services, by name: floors of all, then what their traffic needs.  Stale signals hold: floors
       are kept, but nothing grows or shrinks with traffic, is evicted for it, or is lent.
    2. Training jobs that wait get GPUs of cleaning, oldest first.
    3. Preemptible work leaves nodes that are cordoned or broken; jobs above their maximum give back.
    4. Replicas that were not needed for long are drained.
    5. GPUs that are idle all the same are lent to cleaning.
    """
    draft = Draft(snapshot)
    services = [Serving(draft, service) for service in sorted(snapshot.services, key=lambda service: service.name)]
    for serving in services:
        serving.grow(Reason.FLOOR)
    for serving in services:
        if serving.service.load.stale:
            draft.conditions.add(Condition.SIGNALS_STALE)
        else:
            serving.grow(Reason.TRAFFIC)
    _make_room_for_training(draft)
    _leave_lost_nodes(draft)
    _keep_limits(draft)
    for serving in services:
        serving.shrink()
    lend(draft, services)
    return draft.finish(tuple((serving.service.name, serving.wanted()) for serving in services))


def _make_room_for_training(draft: Draft) -> None:
    """Set GPUs aside for training jobs that wait, evicting cleaning; starting them is their owner's part."""
    waiting = [w for w in draft.snapshot.workloads if w.kind is Kind.TRAINING and w.phase is Phase.PENDING]
    for job in sorted(waiting, key=lambda job: (job.started_s, job.uid)):
        if draft.pool.take_free(job.flavor, job.gpus) or draft.pool.take_coming(job.flavor, job.gpus):
            continue

        def unmet(more: Mapping[str, int]) -> bool:
            return not any(more.values())

        shapes, uids = {job.flavor: job.gpus}, {job.flavor: job.uid}
        reclaim(draft, Claim(shapes, uids, unmet, job.gpus, PRIORITY[Kind.TRAINING], Reason.TRAINING))


def _leave_lost_nodes(draft: Draft) -> None:
    """Evict preemptible work from nodes that are cordoned or broken, or hold more than is whole."""
    pool = draft.pool
    lost = {
        node.name: node
        for node in draft.snapshot.nodes
        if node.name not in pool.nodes or pool.held[node.name] > node.gpus - node.broken_gpus
    }
    if not lost:
        return
    on_node: dict[str, list[Workload]] = {name: [] for name in sorted(lost)}
    for workload in draft.snapshot.workloads:
        if workload.phase is not Phase.PENDING and workload.node in lost:
            on_node[workload.node].append(workload)
    for name, there in on_node.items():
        node = lost[name]
        able = [
            workload
            for workload in there
            if workload.preemptible
            and workload.kind is not Kind.INFERENCE
            and workload.phase in ACTIVE
            and workload.uid not in draft.chosen
        ]
        able.sort(key=lambda workload: victim_order(workload, draft.snapshot.now_s))
        going = sum(w.gpus for w in there if w.phase is Phase.LEAVING or w.uid in draft.chosen)
        excess = sum(w.gpus for w in there) - going - (node.gpus - node.broken_gpus)
        for workload in able:
            if draft.evictions_left and (node.name not in draft.pool.nodes or excess > 0):
                draft.evict(workload, Reason.NODE)
                excess -= workload.gpus


def _keep_limits(draft: Draft) -> None:
    """Evict the cheapest workers of a job that has more than its maximum."""
    for job in sorted(draft.snapshot.jobs, key=lambda job: job.uid):
        mine = draft.owned(Kind.CLEANING, job.uid)
        if len(mine) <= job.max_workers:
            continue
        workers = [w for w in mine if w.phase in ACTIVE and w.uid not in draft.chosen]
        excess = len(workers) - job.max_workers
        if excess <= 0:
            continue
        able = sorted((w for w in workers if w.preemptible), key=lambda w: victim_order(w, draft.snapshot.now_s))
        for worker in able[: min(excess, draft.evictions_left)]:
            draft.evict(worker, Reason.LIMIT)
