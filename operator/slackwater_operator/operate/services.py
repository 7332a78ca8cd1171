"""What the policy is given of each InferenceDeployment and CapacityPool: `ServiceSpec` and `Limits`.

Pure.  Owns the translation only; `rollout` may raise a service's floor for a while.  Called by `lead` and `dryrun`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from operator import is_

from slackwater_operator.core import Limits
from slackwater_operator.kube.types import Key
from slackwater_operator.loop import ServiceSpec, VariantSpec
from slackwater_operator.resources import names
from slackwater_operator.resources.inference import InferenceDeployment
from slackwater_operator.resources.pool import CapacityPool
from slackwater_operator.traffic import Window


class Specs:
    """`service_spec` of each service, worked out anew only when it or one of its pools has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], ServiceSpec]] = {}

    def of(self, service: InferenceDeployment, pools: Mapping[Key, CapacityPool]) -> ServiceSpec:
        """One service's."""
        made_from = (service, *(pools.get(("", name)) for name in service.spec.pools))
        known = self._known.get(service.key)
        if known is None or len(known[0]) != len(made_from) or not all(map(is_, known[0], made_from)):
            known = self._known[service.key] = (made_from, service_spec(service, pools))
        return known[1]

    def forget(self, services: Collection[str]) -> None:
        """Only these are left."""
        self._known = {name: known for name, known in self._known.items() if name in services}


def service_spec(service: InferenceDeployment, pools: Mapping[Key, CapacityPool]) -> ServiceSpec:
    """One service on every GPU type that one of its pools has; pools and types that are not there are passed over."""
    spec = service.spec
    autoscaling = spec.autoscaling
    return ServiceSpec(
        name=service.key,
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        variants=tuple(_variants(service, pools)),
        burst_slots=autoscaling.burst_slots,
        deadband_replicas=autoscaling.scale_down.deadband,
        window=Window(
            panic_s=autoscaling.panic_window_s,
            stable_s=autoscaling.stable_window_s,
            down_s=autoscaling.scale_down.window_s,
            stale_after_s=autoscaling.stale_after_s,
        ),
    )


def with_bounds(spec: ServiceSpec, min_replicas: int, max_replicas: int) -> ServiceSpec:
    """The same service with other bounds."""
    return replace(spec, min_replicas=min_replicas, max_replicas=max_replicas)


def limits(pools: Iterable[CapacityPool]) -> Limits:
    """What holds for all pools together: as many evictions at once as they allow each, summed.

    The other limits are each flavor's own, and come with the observation.
    """
    return Limits(max_parallel=sum(pool.spec.reclaim.max_parallel for pool in pools) or Limits().max_parallel)


def missing_pools(service: InferenceDeployment, pools: Mapping[Key, CapacityPool]) -> list[str]:
    """Pools that it names and that are not there, or have none of its GPU types."""
    wanted = {variant.flavor for variant in service.spec.variants}
    return [
        name
        for name in service.spec.pools
        if (pool := pools.get(("", name))) is None or wanted.isdisjoint(one.name for one in pool.spec.flavors)
    ]


def missing_flavors(service: InferenceDeployment, pools: Mapping[Key, CapacityPool]) -> list[str]:
    """GPU types of its variants that none of its pools has."""
    mine = (pool for name in service.spec.pools if (pool := pools.get(("", name))) is not None)
    there = {flavor.name for pool in mine for flavor in pool.spec.flavors}
    return [variant.flavor for variant in service.spec.variants if variant.flavor not in there]


def _variants(service: InferenceDeployment, pools: Mapping[Key, CapacityPool]) -> Iterable[VariantSpec]:
    count = len(service.spec.pools)
    for position, pool_name in enumerate(service.spec.pools):
        pool = pools.get(("", pool_name))
        if pool is None:
            continue
        there = {flavor.name for flavor in pool.spec.flavors}
        for variant in service.spec.variants:
            if variant.flavor in there:
                yield VariantSpec(
                    uid=names.variant_uid(service.metadata.namespace, service.metadata.name, pool_name, variant.flavor),
                    flavor=names.policy_flavor(pool_name, variant.flavor),
                    slots_per_replica=variant.slots_per_replica,
                    gpus=variant.gpus,
                    # The GPU type counts first, then the order of the pools.
                    preference=variant.preference * count + (count - 1 - position),
                )
