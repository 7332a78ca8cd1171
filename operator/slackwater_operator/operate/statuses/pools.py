"""Status of GPUFlavors and CapacityPools."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from slackwater_operator.cluster.kube.ports import PoolView, UsageView
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.statuses.conditions import Emit, conditions, counted
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.names import CAPACITY_POOL, GPU_FLAVOR
from slackwater_operator.resources.pool import CapacityPool

SHOWN = 3  # names in a message
COUNTS = ("total", "inference", "training", "cleaning", "releasing", "idle", "broken")


def pool_status(
    obj: Object,
    pool: CapacityPool | None,
    refused: str,
    view: PoolView | None,
    now: str,
    emit: Emit,
    slurm: Collection[str] = (),
    side: str | None = None,
    cordoned: Mapping[str, int] | None = None,
) -> Object:
    """Who holds a pool's GPUs.  pool None: it was refused, for that reason.

    slurm: the clusters whose controllers have written into the status of a job.   side: what keeps the pool's own side
    from its work, "" = nothing; None = this operator runs none for it, or it has said nothing yet.   cordoned: GPUs of
    its nodes that take no new pods, by node.
    """
    status: Object = {"observedGeneration": obj["metadata"].get("generation") or 0}
    if pool is None:
        reasons = {"Ready": ("SpecRefused", refused)}
        return status | {"conditions": conditions(CAPACITY_POOL, obj, reasons, now, emit)}
    usage = view.usage if view else ()
    sums = {name: sum(getattr(one, name) for one in usage) for name in COUNTS}
    status |= {
        "usage": [{"flavor": one.flavor, **{name: getattr(one, name) for name in COUNTS}} for one in usage],
        **{name: sums[name] for name in ("total", "inference", "training", "cleaning", "idle")},
    }
    reasons = {
        "Ready": _ready(view, sums["total"]),
        "NodesExclusive": _exclusive(view),
        "CapacityComplete": _complete(pool, usage, cordoned or {}),
    }
    if pool.spec.slurm is None:
        reasons["SlurmReachable"] = ("NoSlurm", "the pool has no Slurm cluster")
    elif side:
        reasons["SlurmReachable"] = ("SlurmUnreachable", side)
    elif side == "" or pool.spec.slurm.cluster in slurm:
        reasons["SlurmReachable"] = ("SlurmReachable", f"the controller of {pool.spec.slurm.cluster} takes jobs")
    return status | {"conditions": conditions(CAPACITY_POOL, obj, reasons, now, emit)}


def flavor_status(
    obj: Object, flavor: GPUFlavor | None, refused: str, nodes: Iterable[Object], now: str, emit: Emit
) -> Object:
    """What was found of a GPU type."""
    status: Object = {"observedGeneration": obj["metadata"].get("generation") or 0}
    if flavor is None:
        return status | {"conditions": conditions(GPU_FLAVOR, obj, {"Ready": ("SpecRefused", refused)}, now, emit)}
    found = [node for node in nodes if _selects(flavor.spec.node_selector, node)]
    gpus = sum(_gpus(node, flavor.spec.resource_name) for node in found)
    wanted = ", ".join(f"{name}={value}" for name, value in sorted(flavor.spec.node_selector.items()))
    ready = ("NodesFound", f"{gpus} GPUs on {len(found)} nodes") if found else ("NoNodes", f"no node has {wanted}")
    return status | {
        "nodes": len(found),
        "gpus": gpus,
        "conditions": conditions(GPU_FLAVOR, obj, {"Ready": ready}, now, emit),
    }


def stamp(at: datetime) -> str:
    """As metadata has times: whole seconds, UTC."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _ready(view: PoolView | None, total: int) -> tuple[str, str]:
    if view is not None and view.missing_flavors:
        return "FlavorMissing", f"there is no GPUFlavor {_some(view.missing_flavors)}"
    if not total:
        return "NoGPUs", "no node that the pool and one of its flavors select has GPUs"
    return "GPUsFound", f"{total} GPUs"


def _exclusive(view: PoolView | None) -> tuple[str, str]:
    if view is not None and view.disputed:
        return "NodesShared", f"{_some(view.disputed)}: selected by more than one pool or flavor, and used by none"
    return "NodesExclusive", ""


def _complete(pool: CapacityPool, usage: Iterable[UsageView], cordoned: Mapping[str, int]) -> tuple[str, str]:
    found = {one.flavor: one for one in usage}
    broken = [f"{one.broken} {one.flavor}" for one in found.values() if one.broken]
    if broken:
        return "GPUsBroken", f"not usable: {', '.join(broken)}"
    missing = [
        f"{flavor.count - (found[flavor.name].total if flavor.name in found else 0)} {flavor.name}"
        for flavor in pool.spec.flavors
        if flavor.count is not None and (flavor.name not in found or found[flavor.name].total < flavor.count)
    ]
    if missing:
        return "GPUsMissing", f"fewer than stated: {', '.join(missing)} missing"
    if not sum(one.total for one in found.values()):
        return "NoGPUs", "it has no GPU; Ready and NodesExclusive say why"
    if cordoned:
        gpus = counted(sum(cordoned.values()), "GPU")
        return (
            "GPUsCordoned",
            f"{gpus} on nodes that are cordoned or not ready, so nothing starts there: {_some(cordoned)}",
        )
    return "AllGPUsUsable", ""


def _selects(selector: Mapping[str, str], node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in selector.items())


def _gpus(node: Object, resource: str) -> int:
    try:
        return int((node.get("status") or {}).get("allocatable", {}).get(resource) or 0)
    except ValueError:
        return 0


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
