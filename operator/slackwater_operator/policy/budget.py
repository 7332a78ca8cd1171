"""The invariant that is checked before every write.

Owns nothing of the plan and shares no code with those who made it: it looks at the snapshot and the
actions alone, so that a fault in the policy is refused rather than carried out.
"""

from collections import Counter
from collections.abc import Iterable

from slackwater_operator.core import BudgetExceeded, Kind, Node, Phase, Plan, Snapshot, Verb

MAY = {  # the phases in which a workload can be the object of a verb
    Verb.EVICT: (Phase.STARTING, Phase.RUNNING),
    Verb.DRAIN: (Phase.STARTING, Phase.RUNNING),
    Verb.CANCEL: (Phase.DRAINING,),
}


def check_budget(snapshot: Snapshot, plan: Plan) -> None:
    """Raises BudgetExceeded if carrying out `plan` could give a GPU away twice or evict the wrong workload.

    - Every start has its GPUs, seen free, on a usable node of its flavor, also when all starts are
      carried out together, and no flavor gets over its size.
    - No workload is named twice; only preemptible ones that are not inference are evicted, only
      replicas are drained or cancelled, each in a phase where that means something.
    A pool that is over its size already (a GPU broke under its holder) may still evict, not start.
    """
    _check_uids(snapshot, plan)
    _check_starts(snapshot, plan)


def _check_uids(snapshot: Snapshot, plan: Plan) -> None:
    workloads = {workload.uid: workload for workload in snapshot.workloads}
    named: set[str] = set()
    for action in plan.actions:
        if action.verb is Verb.START:
            continue
        workload = workloads.get(action.uid)
        if workload is None:
            raise BudgetExceeded(f"{action.verb} names {action.uid}, which is not in the snapshot")
        if action.uid in named:
            raise BudgetExceeded(f"{action.uid} is named by two actions of one plan")
        named.add(action.uid)
        if workload.phase not in MAY[action.verb]:
            raise BudgetExceeded(f"{action.verb} of {action.uid}, which is {workload.phase}")
        if (action.verb is Verb.EVICT) == (workload.kind is Kind.INFERENCE):
            raise BudgetExceeded(f"{action.verb} of {action.uid}, which is {workload.kind}")
        if action.verb is Verb.EVICT and not workload.preemptible:
            raise BudgetExceeded(f"evict of {action.uid}, which is not preemptible")


def _check_starts(snapshot: Snapshot, plan: Plan) -> None:
    starts: Counter[tuple[frozenset[str], int]] = Counter()  # (flavors it may go to, GPUs of one) -> how many
    shapes = _shapes(snapshot)
    for action in plan.actions:
        if action.verb is Verb.START:
            if action.uid not in shapes or action.count < 1:
                raise BudgetExceeded(f"start of {action.count} {action.uid}, which nobody asked for")
            starts[shapes[action.uid]] += action.count
    free = _free(snapshot)
    for flavors in sorted(_unions(flavors for flavors, _ in starts), key=sorted):
        inside = Counter({gpus: 0 for _, gpus in starts})
        for (wanted, gpus), count in starts.items():
            if wanted <= flavors:
                inside[gpus] += count
        rooms = [room for node, room in free if node.flavor in flavors]
        total = sum(gpus * count for gpus, count in inside.items())
        if total > sum(rooms):
            raise BudgetExceeded(f"starts take {total} GPUs of {sorted(flavors)}, {sum(rooms)} are seen free")
        for size in inside:  # as many as that or larger ones must fit into single nodes
            large = sum(count for gpus, count in inside.items() if gpus >= size)
            if large > sum(room // size for room in rooms):
                raise BudgetExceeded(f"{large} starts of {size} or more GPUs do not fit the nodes of {sorted(flavors)}")


def _free(snapshot: Snapshot) -> list[tuple[Node, int]]:
    """GPUs of each usable node that are seen free and not held, in a pool within its size."""
    held: Counter[str] = Counter()
    for workload in snapshot.workloads:
        if workload.phase is not Phase.PENDING:
            held[workload.node] += workload.gpus
    return [
        (node, max(0, min(len(node.idle_since_s), node.gpus - node.broken_gpus - held[node.name])))
        for node in snapshot.nodes
        if node.schedulable
    ]


def _shapes(snapshot: Snapshot) -> dict[str, tuple[frozenset[str], int]]:
    shapes = {job.uid: (frozenset(job.flavors), job.gpus) for job in snapshot.jobs}
    for service in snapshot.services:
        for variant in service.variants:
            shapes[variant.uid] = (frozenset({variant.flavor}), variant.gpus)
    return shapes


def _unions(families: Iterable[frozenset[str]]) -> set[frozenset[str]]:
    """All unions of sets of flavors: starts fit together only if each union has room for its own."""
    found: set[frozenset[str]] = set()
    for family in families:
        found |= {family} | {family | other for other in found}
    return found
