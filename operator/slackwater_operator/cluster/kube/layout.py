"""Which GPUs there are: nodes, told apart by pool and flavor.

Owns that reading, pure: a node belongs to a pool's flavor when the selectors of both match it.  A node that two
pools or two flavors select is nobody's, since both would give its GPUs away.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slackwater_operator.cluster.kube.fits import Wishes, fits
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.pool import CapacityPool


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What we use of a node."""

    name: str
    labels: Mapping[str, str]
    capacity: tuple[tuple[str, int], ...]
    allocatable: tuple[tuple[str, int], ...]
    is_ready: bool
    is_cordoned: bool
    taints: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's GPUs in one pool.  gpus: those that count; broken: of these, those that the kubelet does not offer."""

    node: str
    pool: str
    flavor: str
    resource: str
    gpus: int
    broken: int
    is_ready: bool
    is_schedulable: bool
    labels: Mapping[str, str]
    taints: tuple[Object, ...] = ()

    @property
    def policy_flavor(self) -> str:
        return names.policy_flavor(self.pool, self.flavor)

    def suits(self, wishes: Wishes) -> bool:
        """Whether a pod with these wishes could go there."""
        return fits(wishes, self.node, self.labels, self.taints)


@dataclass(frozen=True, slots=True)
class Layout:
    """All seats by node.  disputed, missing: by pool, nodes that others select too, flavors that do not exist."""

    seats: dict[str, Seat] = field(default_factory=dict)
    disputed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, policy_flavor: str) -> list[Seat]:
        """The seats of one flavor of one pool, by the node's name."""
        return [seat for seat in self.seats.values() if seat.policy_flavor == policy_flavor]


def read_node(obj: Object) -> NodeFacts:
    """A node from its JSON."""
    metadata, status = obj["metadata"], obj.get("status", {})
    return NodeFacts(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        capacity=_counts(status.get("capacity")),
        allocatable=_counts(status.get("allocatable")),
        is_ready=any(
            one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions", ())
        ),
        is_cordoned=bool(obj.get("spec", {}).get("unschedulable")),
        taints=tuple(obj.get("spec", {}).get("taints") or ()),
    )


def _counts(resources: Object | None) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, int(value)) for name, value in (resources or {}).items() if str(value).isdigit()))


def lay_out(nodes: Iterable[NodeFacts], flavors: Mapping[str, GPUFlavor], pools: Sequence[CapacityPool]) -> Layout:
    """Seat every node that exactly one flavor of one pool selects, in the order of names, up to the pools' counts."""
    left = {(pool.metadata.name, listed.name): listed.count for pool in pools for listed in pool.spec.flavors}
    layout = Layout(
        missing={
            pool.metadata.name: gone
            for pool in pools
            if (gone := tuple(listed.name for listed in pool.spec.flavors if listed.name not in flavors))
        }
    )
    disputed: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        claims = [
            (pool.metadata.name, flavors[listed.name])
            for pool in pools
            if _selects(pool.spec.node_selector, node)
            for listed in pool.spec.flavors
            if listed.name in flavors and _selects(flavors[listed.name].spec.node_selector, node)
        ]
        if len(claims) > 1:
            for name in {pool for pool, _ in claims}:
                disputed.setdefault(name, []).append(node.name)
        elif claims:
            pool_name, flavor = claims[0]
            seat = _seat(node, pool_name, flavor, left)
            if seat.gpus:
                layout.seats[node.name] = seat
    layout.disputed.update({pool: tuple(found) for pool, found in disputed.items()})
    return layout


def _selects(selector: Mapping[str, str] | None, node: NodeFacts) -> bool:
    return all(node.labels.get(key) == value for key, value in (selector or {}).items())


def _seat(node: NodeFacts, pool: str, flavor: GPUFlavor, left: dict[tuple[str, str], int | None]) -> Seat:
    resource, key = flavor.spec.resource_name, (pool, flavor.metadata.name)
    allocatable = dict(node.allocatable).get(resource, 0)
    capacity = max(allocatable, dict(node.capacity).get(resource, 0))
    most = left[key]
    counted = capacity if most is None else min(capacity, most)
    if most is not None:
        left[key] = most - counted
    return Seat(
        node=node.name,
        pool=pool,
        flavor=flavor.metadata.name,
        resource=resource,
        gpus=counted,
        broken=max(0, counted - allocatable),
        is_ready=node.is_ready,
        is_schedulable=node.is_ready and not node.is_cordoned,
        labels=node.labels,
        taints=node.taints,
    )
