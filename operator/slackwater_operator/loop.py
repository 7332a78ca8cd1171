"""Observe, plan, check, apply: one tick after another, for any cluster.

Owns the traffic histories and the account of GPU seconds; the cluster owns everything that acts.
Called by the supervisor of one machine here, by the operator in Kubernetes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slackwater_operator.accounts import Accounts
from slackwater_operator.cluster.base import Cluster, Observation
from slackwater_operator.core import (
    Action,
    Limits,
    Load,
    Plan,
    Service,
    Snapshot,
    Variant,
)
from slackwater_operator.policy import check_budget, plan
from slackwater_operator.traffic import History, Window

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """The part of a `Variant` that a person writes."""

    uid: str
    flavor: str
    slots_per_replica: int
    gpus: int = 1
    preference: int = 0


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The part of a `Service` that a person writes; the rest is measured."""

    name: str
    min_replicas: int
    max_replicas: int
    variants: tuple[VariantSpec, ...]
    burst_slots: int
    deadband_replicas: int
    window: Window = field(default_factory=Window)


@dataclass(frozen=True, slots=True)
class _Known:
    """A `Load` as of the newest sample, and what it was made for; until the next one only its age changes."""

    load: Load
    lead_s: float
    sample_s: float


class Loop:
    """Runs the policy on one cluster.

    `snapshot`, `plan` and `accounts` hold the newest tick's, for status and metrics.
    """

    def __init__(self, cluster: Cluster, services: Sequence[ServiceSpec], limits: Limits) -> None:
        self._cluster = cluster
        self._limits = limits
        self._specs: tuple[ServiceSpec, ...] = ()
        self._histories: dict[str, History] = {}
        self._loads: dict[str, _Known] = {}
        self._sample_s: dict[str, float] = {}  # service -> its newest sample
        self._variants: dict[str, tuple[tuple[object, ...], tuple[Variant, ...]]] = {}  # and what they were made from
        self.serve(services)
        self._taken: tuple[Action, ...] = ()  # of the newest tick
        self._said: set[tuple[str, str]] = set()
        self.accounts = Accounts()
        self.snapshot: Snapshot | None = None
        self.plan = Plan()

    def serve(self, services: Sequence[ServiceSpec]) -> None:
        """These services from now on; what is known of the traffic of those that stay is kept.

        A changed window forgets: its samples were not kept for the new one.
        """
        windows = {spec.name: spec.window for spec in self._specs}
        self._histories = {
            spec.name: self._histories[spec.name] if windows.get(spec.name) == spec.window else History(spec.window)
            for spec in services
        }
        kept = {spec.name for spec in services if windows.get(spec.name) == spec.window}
        self._loads = {name: known for name, known in self._loads.items() if name in kept}
        self._sample_s = {name: sample_s for name, sample_s in self._sample_s.items() if name in kept}
        self._variants = {name: known for name, known in self._variants.items() if name in self._histories}
        self._specs = tuple(services)

    async def tick(self, now_s: float) -> tuple[Action, ...]:
        """One round; returns the actions that the cluster took on."""
        return await self.carry_out(self.decide(now_s), now_s)

    def decide(self, now_s: float) -> Plan:
        """Observe and plan.  Until somebody says otherwise, the account takes its actions as done."""
        if self.snapshot is not None:
            self.accounts.add(self.snapshot, now_s, self._taken)
        seen = self._cluster.observe(now_s)
        for uid, committed_s in seen.departed:
            self.accounts.settle(uid, committed_s)
        self._taken = ()
        self.snapshot = self._snapshot(seen, now_s)
        self.plan = plan(self.snapshot)
        check_budget(self.snapshot, self.plan)
        self._taken = self.plan.actions
        return self.plan

    async def carry_out(self, decided: Plan, now_s: float, more: Sequence[Action] = ()) -> tuple[Action, ...]:
        """Have a plan applied; returns the actions that the cluster took on.   more: actions beside it."""
        actions = (*decided.actions, *more)
        refusals = await self._cluster.apply(actions, now_s) if actions else ()
        for refusal in refusals:
            self._say_once(refusal.action, str(refusal.error))
        refused = {refusal.action for refusal in refusals}
        taken = tuple(action for action in actions if action not in refused)
        for action in taken:
            logger.info("%s uid=%s count=%d reason=%s", action.verb, action.uid, action.count, action.reason)
        begun = {action.uid for action in taken}
        self._said = {said for said in self._said if said[0] not in begun}
        if self.plan is decided:
            self._taken = taken
        return taken

    def _say_once(self, action: Action, message: str) -> None:
        """A refused action is planned again every tick; one line about it is enough."""
        said = (action.uid, message.split(" after ")[0])
        if said not in self._said:
            self._said.add(said)
            logger.warning("%s uid=%s not possible now: %s", action.verb, action.uid, message)

    def _snapshot(self, seen: Observation, now_s: float) -> Snapshot:
        for service, sample in seen.samples:
            if service in self._histories and self._histories[service].append(sample):
                self._loads.pop(service, None)
                self._sample_s[service] = sample.t_s
        leads = dict(seen.lead_s)
        return Snapshot(
            now_s=now_s,
            nodes=seen.nodes,
            workloads=seen.workloads,
            services=tuple(self._service(spec, leads, now_s) for spec in self._specs),
            jobs=seen.jobs,
            flavors=seen.flavors,
            limits=self._limits,
        )

    def _service(self, spec: ServiceSpec, lead_s: dict[str, float], now_s: float) -> Service:
        leads_s = tuple(lead_s.get(variant.uid, 0.0) for variant in spec.variants)
        made_from = (spec.variants, leads_s)
        known = self._variants.get(spec.name)
        if known is None or known[0] != made_from:
            known = self._variants[spec.name] = (made_from, tuple(map(_variant, spec.variants, leads_s)))
        return Service(
            name=spec.name,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            variants=known[1],
            load=self._load(spec, max(leads_s, default=0.0), now_s),
            burst_slots=spec.burst_slots,
            deadband_replicas=spec.deadband_replicas,
        )

    def _load(self, spec: ServiceSpec, lead_s: float, now_s: float) -> Load:
        """A service's demand.  With hundreds of services most have no new sample in a tick, and windows are long."""
        known = self._loads.get(spec.name)
        if known is None or known.lead_s != lead_s:
            load = self._histories[spec.name].load(now_s, lead_s)
            if spec.name in self._sample_s:
                self._loads[spec.name] = _Known(load, lead_s, self._sample_s[spec.name])
            return load
        age_s = max(0.0, now_s - known.sample_s)
        return replace(known.load, age_s=age_s, stale=age_s > spec.window.stale_after_s)


def _variant(spec: VariantSpec, lead_s: float) -> Variant:
    return Variant(
        uid=spec.uid,
        flavor=spec.flavor,
        slots_per_replica=spec.slots_per_replica,
        lead_s=lead_s,
        gpus=spec.gpus,
        preference=spec.preference,
    )
