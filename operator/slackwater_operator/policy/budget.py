"""The invariant that is checked before every write.

Owns nothing of the plan and shares no code with those who made it: it looks at the snapshot and the
actions alone, so that a fault in the policy is refused rather than carried out.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

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
    if all(action.verb is Verb.START for action in plan.actions):
        return
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
    if not starts:
        return
    free = _free(snapshot)
    _check_fit(starts, free, 0)
    for size in {gpus for _, gpus in starts}:  # as many as that or larger ones must fit into single nodes
        _check_fit(starts, free, size)


def _check_fit(starts: Mapping[tuple[frozenset[str], int], int], free: Iterable[tuple[Node, int]], size: int) -> None:
    """Each start has a place of its own.

    size: GPUs of a place, for the starts that need so many or more; 0: all of them, a GPU is a place.
    """
    places: Counter[str] = Counter()
    for node, room in free:
        places[node.flavor] += room // (size or 1)
    wanted: Counter[frozenset[str]] = Counter()
    for (flavors, gpus), count in starts.items():
        if gpus >= size:
            wanted[flavors] += count if size else gpus * count
    crowded = _crowded(wanted, places)
    if crowded is None:
        return
    total = sum(count for flavors, count in wanted.items() if flavors <= crowded)
    if size:
        raise BudgetExceeded(f"{total} starts of {size} or more GPUs do not fit the nodes of {sorted(crowded)}")
    seen = sum(places[flavor] for flavor in crowded)
    raise BudgetExceeded(f"starts take {total} GPUs of {sorted(crowded)}, {seen} are seen free")


def _crowded(wanted: Mapping[frozenset[str], int], places: Mapping[str, int]) -> frozenset[str] | None:
    """Flavors that do not have as many places as are wanted of them alone; None if everybody gets one.

    A flow: who finds no free place in its flavors moves others, step by step, to flavors where they may be too.  To
    look at each union of flavors instead takes twice as long with each further combination that some job asks for.
    """
    left = dict(places)
    taken: dict[str, Counter[frozenset[str]]] = {}
    for family in sorted(wanted, key=sorted):
        missing = wanted[family]
        while missing:
            came: dict[str, tuple[str, frozenset[str]]] = {}  # flavor -> who would have to leave which other one for it
            queue = deque(sorted(family))
            seen = set(queue)
            while queue and not left.get(queue[0]):
                flavor = queue.popleft()
                for other in taken.get(flavor, ()):
                    for further in sorted(other - seen):
                        seen.add(further)
                        came[further] = flavor, other
                        queue.append(further)
            if not queue:
                return frozenset(seen)
            path = [queue[0]]
            while path[-1] in came:
                path.append(came[path[-1]][0])
            moved = min(missing, left[path[0]], *(taken[came[to][0]][came[to][1]] for to in path[:-1]))
            left[path[0]] -= moved
            for to in path[:-1]:
                source, other = came[to]
                _move(taken, source, other, -moved)
                _move(taken, to, other, moved)
            _move(taken, path[-1], family, moved)
            missing -= moved
    return None


def _move(taken: dict[str, Counter[frozenset[str]]], flavor: str, family: frozenset[str], count: int) -> None:
    there = taken.setdefault(flavor, Counter())
    there[family] += count
    if not there[family]:
        del there[family]


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
