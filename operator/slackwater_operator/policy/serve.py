"""One inference service, up or down.

Up at once and straight to the need: cancel drains, start on free GPUs, count what is on its way, evict
for the rest.  Down slowly: only a surplus that lasted, a tenth of the replicas a step, by drains that
cut no stream.  Called by `planner` for each service, the first of the parts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slackwater_operator.core import (
    PRIORITY,
    Condition,
    Kind,
    Phase,
    Reason,
    Service,
    Variant,
    Verb,
    Workload,
)
from slackwater_operator.policy.draft import ACTIVE, Draft
from slackwater_operator.policy.need import (
    EPSILON,
    bounds,
    deadband_replicas,
    need_slots,
    quiet_slots,
    wanted_replicas,
)
from slackwater_operator.policy.reclaim import Claim, reclaim

STEP_RATIO = 0.1  # of the replicas that one shrink may drain, at least one; the next waits until they are gone


@dataclass(slots=True)
class Supply:
    """What a service has or is about to get."""

    replicas: int = 0
    slots: int = 0

    def add(self, slots: int) -> None:
        self.replicas += 1
        self.slots += slots


class Serving:
    """A service while its part of the plan is made.

    staying: replicas that serve or will, on usable nodes; supply counts them and what this plan adds.
    displaced: replicas on cordoned or broken nodes: they serve until others can take over.
    """

    def __init__(self, draft: Draft, service: Service) -> None:
        self.service = service
        self._draft = draft
        self._variants = sorted(service.variants, key=lambda variant: (-variant.preference, variant.uid))
        self._of_flavor = {variant.flavor: variant for variant in reversed(self._variants)}
        mine = draft.owned(Kind.INFERENCE, service.name)
        placed = [w for w in mine if w.phase in ACTIVE]
        self.staying = sorted((w for w in placed if w.node in draft.pool.nodes), key=self._drain_order)
        self.displaced = sorted((w for w in placed if w.node not in draft.pool.nodes), key=self._drain_order)
        self.draining = sorted((w for w in mine if w.phase is Phase.DRAINING), key=self._drain_order)
        self.supply = Supply(len(self.staying), sum(map(self._slots, self.staying)))
        self._pending = 0
        self._needs: dict[float, float] = {}  # by how far ahead
        self._bounds = bounds(service)
        for workload in sorted((w for w in mine if w.phase is Phase.PENDING), key=lambda w: w.uid):
            # Asked for, not placed yet.  With a GPU to go to it is supply, without one it is not there.
            if draft.pool.take_free(workload.flavor, workload.gpus):
                self.supply.add(self._slots(workload))
                self._pending += 1

    @property
    def was_heard(self) -> bool:
        """Whether there is any sample of its traffic, however old."""
        return math.isfinite(self.service.load.age_s)

    @property
    def has_any(self) -> bool:
        """Whether anything serves, will serve or still serves."""
        return bool(self.staying or self.displaced or self.draining or self._pending)

    def grow(self, reason: Reason) -> None:
        """Bring the supply up to the floor (Reason.FLOOR) or to the need of its traffic (Reason.TRAFFIC)."""
        if not any(self._lacks(reason, variant) for variant in self._variants):
            return
        self._cancel(reason)
        self._start(reason)
        for variant in self._variants:  # on its way: nothing to do but wait
            while self._lacks(reason, variant) and self._draft.pool.take_coming(variant.flavor, variant.gpus):
                self.supply.add(variant.slots_per_replica)
        self._reclaim(reason)

    def shrink(self) -> None:
        """Drain what the spec does not allow, what was replaced and what was not needed for long."""
        drained = self._drain(self.staying, len(self.staying) - self._bounds[1], Reason.LIMIT)
        if self.service.load.stale or drained:
            return
        if self.displaced and self._replaced():
            self._drain(self.displaced, len(self.displaced), Reason.NODE)
        under_way = self.draining or self.displaced or self._pending
        if under_way or any(replica.phase is Phase.STARTING for replica in self.staying):
            return
        if self.supply.replicas == len(self.staying):  # nothing was added by this plan
            surplus = self._surplus()
            step = max(1, int(len(self.staying) * STEP_RATIO))
            self._drain(surplus, min(step, len(surplus) - deadband_replicas(self.service)), Reason.QUIET)

    def expected_gpus(self, horizon_s: float) -> dict[str, int]:
        """By flavor, free GPUs that the need will have grown into after `horizon_s`, by its slope."""
        expected: dict[str, int] = {}
        if self.service.load.stale:
            return expected
        missing = self._need_slots(horizon_s) - self.supply.slots
        count = self._bounds[1] - self.supply.replicas
        for variant in self._variants:
            if missing <= EPSILON or count <= 0:
                break
            free = self._draft.pool.fits(variant.flavor, variant.gpus)
            while missing > EPSILON and count > 0 and free > 0:
                expected[variant.flavor] = expected.get(variant.flavor, 0) + variant.gpus
                missing -= variant.slots_per_replica
                count -= 1
                free -= 1
        return expected

    def wanted(self) -> int:
        """Replicas wanted now, for status."""
        present = [self._slots(replica) for replica in reversed(self.staying)]
        return wanted_replicas(self.service, present)

    def _lacks(self, reason: Reason, variant: Variant, extra: Supply | None = None) -> bool:
        """Whether one more replica of `variant` is needed, with `extra` added to the supply."""
        replicas = self.supply.replicas + (extra.replicas if extra else 0)
        slots = self.supply.slots + (extra.slots if extra else 0)
        fewest, most = self._bounds
        if reason is Reason.FLOOR:
            return replicas < fewest
        return replicas < most and self._need_slots(variant.lead_s) - slots > EPSILON

    def _need_slots(self, lead_s: float) -> float:
        """The same all through a plan, and asked for again and again."""
        if lead_s not in self._needs:
            self._needs[lead_s] = need_slots(self.service, lead_s)
        return self._needs[lead_s]

    def _why(self, reason: Reason) -> Reason:
        """NODE where only replicas on lost nodes make the difference."""
        serving = Supply(len(self.displaced), sum(map(self._slots, self.displaced)))
        if self.displaced and not self._lacks(reason, self._variants[0], serving):
            return Reason.NODE
        return reason

    def _cancel(self, reason: Reason) -> None:
        for replica in reversed(self.draining):
            variant = self._of_flavor.get(replica.flavor)
            if variant and replica.node in self._draft.pool.nodes and self._lacks(reason, variant):
                self._draft.act(Verb.CANCEL, replica.uid, self._why(reason))
                self.draining.remove(replica)
                self.supply.add(variant.slots_per_replica)

    def _start(self, reason: Reason) -> None:
        for variant in self._variants:
            counts: dict[Reason, int] = {}
            while self._lacks(reason, variant) and self._draft.pool.take_free(variant.flavor, variant.gpus):
                why = self._why(reason)
                counts[why] = counts.get(why, 0) + 1
                self.supply.add(variant.slots_per_replica)
            for why, count in counts.items():
                self._draft.act(Verb.START, variant.uid, why, count)

    def _reclaim(self, reason: Reason) -> None:
        """Evict for what is still missing, looking as far ahead as the preferred variant must."""
        if not self._variants or not self._lacks(reason, self._variants[0]):
            return
        best = self._variants[0]

        def unmet(more: Mapping[str, int]) -> bool:
            extra = Supply()
            for flavor, count in more.items():
                extra.replicas += count
                extra.slots += count * self._of_flavor[flavor].slots_per_replica
            return self._lacks(reason, best, extra)

        missing = Supply()
        while self._lacks(reason, best, missing):
            missing.add(max(1, best.slots_per_replica))
        claim = Claim(
            shapes={variant.flavor: variant.gpus for variant in self._variants},
            uids={variant.flavor: variant.uid for variant in self._variants},
            unmet=unmet,
            most_gpus=missing.replicas * best.gpus,
            priority=PRIORITY[Kind.INFERENCE],
            reason=self._why(reason),
        )
        for flavor, count in reclaim(self._draft, claim).items():
            for _ in range(count):
                self.supply.add(self._of_flavor[flavor].slots_per_replica)
        if self._lacks(reason, best) and claim.reason is not Reason.NODE:
            self._draft.conditions.add(Condition.UNMET_NEED)

    def _replaced(self) -> bool:
        """Whether replicas that run on good nodes carry the need without the displaced ones."""
        running = [replica for replica in self.staying if replica.phase is Phase.RUNNING]
        have = sum(map(self._slots, running))
        needed = max((need_slots(self.service, variant.lead_s) for variant in self._variants), default=0.0)
        return len(running) >= self._bounds[0] and (have >= needed - EPSILON or len(running) >= self._bounds[1])

    def _surplus(self) -> list[Workload]:
        """Replicas without which the rest has the floor and carries the whole window, N/(N-1) style."""
        needed = quiet_slots(self.service)
        left = Supply(len(self.staying), sum(map(self._slots, self.staying)))
        surplus = []
        for replica in self.staying:
            slots = self._slots(replica)
            if left.replicas - 1 >= self._bounds[0] and left.slots - slots >= needed - EPSILON:
                surplus.append(replica)
                left.replicas -= 1
                left.slots -= slots
        return surplus

    def _drain(self, replicas: list[Workload], count: int, reason: Reason) -> int:
        for replica in replicas[: max(0, count)]:
            self._draft.act(Verb.DRAIN, replica.uid, reason)
        return max(0, count)

    def _slots(self, replica: Workload) -> int:
        variant = self._of_flavor.get(replica.flavor)
        return variant.slots_per_replica if variant else 0

    def _drain_order(self, replica: Workload) -> tuple[int, int, float, str]:
        """Fewest live streams, least preferred variant, newest, uid."""
        variant = self._of_flavor.get(replica.flavor)
        preference = variant.preference if variant else 0
        return replica.running_slots, preference, -replica.started_s, replica.uid
