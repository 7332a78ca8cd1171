"""What the process shows of the cluster: usage, services, jobs, take-backs.

Owns the counting.  From memory, without a call; see `ports` for what each value means.
"""

from collections import Counter

from slackwater_operator.cluster.kube.observing import lead_s
from slackwater_operator.cluster.kube.pods import Pod
from slackwater_operator.cluster.kube.ports import JobView, PoolView, ReplicaView, ServiceView, UsageView
from slackwater_operator.cluster.kube.state import State
from slackwater_operator.core import Phase
from slackwater_operator.resources import names


def pools(state: State) -> tuple[PoolView, ...]:
    """Every valid pool; each GPU is counted once."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for page in state.books.pages.values():
        seat = page.seat
        count = counts.setdefault((seat.pool, seat.flavor), Counter())
        count["total"] += seat.gpus
        left = seat.gpus
        for pod in state.index.on_node(seat.node):
            if pod.is_over or not (pod.node or pod.uid in page.visible):
                continue
            gpus = min(left, pod.gpus(seat.resource))
            left -= gpus
            count[_holder(state, pod)] += gpus
        broken = min(left, seat.broken)
        count["broken"] += broken
        idle = min(left - broken, page.free)
        count["idle"] += idle
        count["releasing"] += left - broken - idle  # promised, and not seen yet
    layout = state.catalogue.layout
    return tuple(
        PoolView(
            name=name,
            usage=tuple(
                _usage(listed.name, counts.get((name, listed.name), Counter())) for listed in pool.spec.flavors
            ),
            disputed=layout.disputed.get(name, ()),
            missing_flavors=layout.missing.get(name, ()),
        )
        for name, pool in sorted(state.catalogue.pools.items())
    )


def _holder(state: State, pod: Pod) -> str:
    if state.leaving_since(pod) is not None:
        return "releasing"
    if pod.kind == names.POD_INFERENCE:
        return "inference"
    return "cleaning" if pod.kind == names.POD_CLEANING else "training"


def _usage(flavor: str, count: Counter[str]) -> UsageView:
    fields = ("total", "inference", "training", "cleaning", "releasing", "idle", "broken")
    return UsageView(flavor, **{name: count[name] for name in fields})


def services(state: State) -> tuple[ServiceView, ...]:
    """Every valid service."""
    return tuple(service(state, uid) for uid in sorted(state.catalogue.services))


def service(state: State, uid: str) -> ServiceView:
    """One valid service."""
    spec = state.catalogue.services[uid].spec
    owner = state.owner(names.POD_INFERENCE, uid)
    pods = sorted(state.pods_of(names.POD_INFERENCE, uid), key=lambda pod: pod.uid)
    leads = [
        lead
        for pool in spec.pools
        for variant in spec.variants
        if (lead := lead_s(state, f"{uid}/{names.policy_flavor(pool, variant.flavor)}")) is not None
    ]
    return ServiceView(
        name=uid,
        replicas=tuple(_replica(state, pod) for pod in pods if not pod.is_over),
        lead_s=max(leads, default=None),
        refusal=owner.broken or owner.refusal,
        refused=owner.refused,
    )


def _replica(state: State, pod: Pod) -> ReplicaView:
    if state.leaving_since(pod) is not None:
        phase = Phase.LEAVING
    elif pod.draining_s is not None:
        phase = Phase.DRAINING
    elif not pod.node:
        phase = Phase.PENDING
    else:
        phase = Phase.RUNNING if pod.is_ready else Phase.STARTING
    return ReplicaView(pod.uid, pod.policy_flavor, pod.place, phase, pod.revision, pod.is_ready, pod.reason)


def jobs(state: State, now_s: float) -> tuple[JobView, ...]:
    """Every valid job."""
    found = []
    for uid in sorted(state.catalogue.jobs):
        owner = state.owner(names.POD_CLEANING, uid)
        running = starting = leaving = 0
        gpu_seconds = owner.gpu_seconds
        for pod in state.pods_of(names.POD_CLEANING, uid):
            if pod.is_over:
                continue
            gpu_seconds += state.gpu_seconds(pod, now_s)
            is_leaving = state.leaving_since(pod) is not None
            leaving += is_leaving
            running += pod.is_ready and not is_leaving
            starting += not pod.is_ready and not is_leaving
        found.append(
            JobView(
                uid=uid,
                running=running,
                starting=starting,
                leaving=leaving,
                lost=owner.lost,
                unverified=owner.unverified,
                gpu_seconds=gpu_seconds,
                durable_wall_s=owner.durable_wall_s,
                is_complete=owner.is_done,
                failure=owner.broken,
                refusal=owner.refusal,
                refused=owner.refused,
            )
        )
    return tuple(found)
