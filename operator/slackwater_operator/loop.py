"""Observe, plan, check, apply: one tick after another, for any cluster.

Owns the traffic histories and the account of GPU seconds; the cluster owns everything that acts.
Called by the supervisor of one machine here, by the operator in Kubernetes.
"""

import logging
from dataclasses import dataclass

from slackwater_operator.accounts import Accounts
from slackwater_operator.cluster.base import Cluster, Observation
from slackwater_operator.core import (
    Action,
    Limits,
    PermanentError,
    Plan,
    Service,
    Snapshot,
    TemporaryError,
    Variant,
)
from slackwater_operator.policy import check_budget, plan
from slackwater_operator.traffic import History, Window

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The part of a `Service` that a person writes; the rest is measured."""

    name: str
    min_replicas: int
    max_replicas: int
    slots_per_replica: int
    flavors: tuple[str, ...]
    burst_slots: int
    deadband_replicas: int


class Loop:
    """Runs the policy on one cluster.

    `snapshot`, `plan` and `accounts` hold the newest tick's, for status and metrics.
    """

    def __init__(self, cluster: Cluster, services: tuple[ServiceSpec, ...], window: Window, limits: Limits) -> None:
        self._cluster = cluster
        self._specs = services
        self._limits = limits
        self._histories = {spec.name: History(window) for spec in services}
        self._taken: tuple[Action, ...] = ()  # of the newest tick
        self._said: set[tuple[str, str]] = set()
        self.accounts = Accounts()
        self.snapshot: Snapshot | None = None
        self.plan = Plan()

    async def tick(self, now_s: float) -> tuple[Action, ...]:
        """One round; returns the actions that the cluster took on."""
        if self.snapshot is not None:
            self.accounts.add(self.snapshot, now_s, self._taken)
        seen = self._cluster.observe(now_s)
        for uid, committed_s in seen.departed:
            self.accounts.settle(uid, committed_s)
        self.snapshot = self._snapshot(seen, now_s)
        self.plan = plan(self.snapshot)
        check_budget(self.snapshot, self.plan)
        taken = []
        for action in self.plan.actions:
            try:
                await self._cluster.apply(action, now_s)
            except (TemporaryError, PermanentError) as error:
                self._say_once(action, str(error))
            else:
                logger.info("%s uid=%s count=%d reason=%s", action.verb, action.uid, action.count, action.reason)
                self._said = {said for said in self._said if said[0] != action.uid}
                taken.append(action)
        self._taken = tuple(taken)
        return self._taken

    def _say_once(self, action: Action, message: str) -> None:
        """A refused action is planned again every tick; one line about it is enough."""
        said = (action.uid, message.split(" after ")[0])
        if said not in self._said:
            self._said.add(said)
            logger.warning("%s uid=%s not possible now: %s", action.verb, action.uid, message)

    def _snapshot(self, seen: Observation, now_s: float) -> Snapshot:
        for service, sample in seen.samples:
            if service in self._histories:
                self._histories[service].append(sample)
        return Snapshot(
            now_s=now_s,
            nodes=seen.nodes,
            workloads=seen.workloads,
            services=tuple(self._service(spec, dict(seen.lead_s), now_s) for spec in self._specs),
            jobs=seen.jobs,
            limits=self._limits,
        )

    def _service(self, spec: ServiceSpec, lead_s: dict[str, float], now_s: float) -> Service:
        variants = tuple(
            Variant(
                uid=f"{spec.name}/{flavor}",
                flavor=flavor,
                slots_per_replica=spec.slots_per_replica,
                lead_s=lead_s.get(f"{spec.name}/{flavor}", 0.0),
            )
            for flavor in spec.flavors
        )
        longest_s = max((variant.lead_s for variant in variants), default=0.0)
        return Service(
            name=spec.name,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            variants=variants,
            load=self._histories[spec.name].load(now_s, longest_s),
            burst_slots=spec.burst_slots,
            deadband_replicas=spec.deadband_replicas,
        )
