"""A plan in the making.

Owns the actions so far, and what each of them leaves for the next: GPUs, evictions, victims.  Created
by `planner.plan`, handed through `serve`, `reclaim` and `lend`.
"""

from collections.abc import Iterator

from slackwater_operator.core import (
    PRIORITY,
    Action,
    Condition,
    Kind,
    Phase,
    Plan,
    Reason,
    Snapshot,
    Verb,
    Workload,
)
from slackwater_operator.policy.pool import Pool

ACTIVE = (Phase.STARTING, Phase.RUNNING)
CLAIMS = (Reason.TRAFFIC, Reason.FLOOR, Reason.TRAINING)  # somebody waits for the GPUs of the victim


def victim_order(victim: Workload, now_s: float) -> tuple[int, float, float, str]:
    """Whom to send away first: lower priority, less work lost, newer, uid.

    Those that leave already come before all of these, by counting as supply; the right flavor is
    between the loss and the age, and `reclaim` puts it there.
    """
    return PRIORITY[victim.kind], lost_s(victim, now_s), -victim.started_s, victim.uid


def lost_s(victim: Workload, now_s: float) -> float:
    """GPU-seconds that an eviction costs: work since the last durable point, and starting again."""
    if victim.phase is Phase.STARTING:
        return victim.restart_cost_s  # it has done nothing yet
    durable_s = victim.started_s if victim.durable_s is None else victim.durable_s
    return max(0.0, now_s - durable_s) * victim.gpus + victim.restart_cost_s


class Draft:
    """The actions of one plan as they are decided, in the order to apply them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.pool = Pool(snapshot)
        self.actions: list[Action] = []
        self.conditions: set[Condition] = set()
        self.chosen: set[str] = set()  # uids that are evicted by this plan
        self._evictable: dict[str, list[Workload]] | None = None  # by flavor, in no order
        self._ordered: dict[str, list[Workload]] = {}
        self._by_owner: dict[tuple[Kind, str], list[Workload]] = {}
        for workload in snapshot.workloads:
            self._by_owner.setdefault((workload.kind, workload.owner), []).append(workload)
        leaving = self.pool.leaving
        hung = [w for w in leaving if w.uid in self.pool.given_up]
        self.evictions_left = max(0, snapshot.limits.max_parallel - (len(leaving) - len(hung)))
        self._unreplaced = self._hung_without_substitute(leaving, hung)
        self._kept = self._floor_workers()

    def owned(self, kind: Kind, owner: str) -> list[Workload]:
        """The workloads of a service or a job, in the snapshot's order."""
        return self._by_owner.get((kind, owner), [])

    def act(self, verb: Verb, uid: str, reason: Reason, count: int = 1, beneficiary: str = "") -> None:
        """Add one action."""
        self.actions.append(Action(verb, uid, count, reason, beneficiary))

    def evict(self, victim: Workload, reason: Reason, beneficiary: str = "") -> None:
        """Evict one workload; its GPUs count as coming from now on."""
        assert victim.uid not in self.chosen
        assert self.evictions_left > 0
        self.chosen.add(victim.uid)
        self.evictions_left -= 1
        if victim.node in self.pool.coming:
            self.pool.coming[victim.node] += victim.gpus
        if reason in CLAIMS and self._unreplaced.get(victim.flavor, 0) >= victim.gpus:
            self._unreplaced[victim.flavor] -= victim.gpus
            reason = Reason.RETARGET
        self.act(Verb.EVICT, victim.uid, reason, beneficiary=beneficiary)

    def candidates(self, priority: int, flavor: str) -> Iterator[Workload]:
        """Workloads on usable nodes of a flavor that something of `priority` may have evicted, by `victim_order`."""
        for workload in self._able(flavor):
            if PRIORITY[workload.kind] < priority and workload.uid not in self.chosen:
                yield workload

    def finish(self, need_replicas: tuple[tuple[str, int], ...]) -> Plan:
        """The plan, with its conditions in one order."""
        return Plan(tuple(self.actions), need_replicas, tuple(sorted(self.conditions)))

    def _able(self, flavor: str) -> list[Workload]:
        """Put in order once a plan, since many claims ask."""
        if self._evictable is None:
            self._evictable = {}
            for workload in self.snapshot.workloads:
                if (
                    workload.preemptible
                    and workload.kind is not Kind.INFERENCE
                    and workload.phase in ACTIVE
                    and workload.node in self.pool.nodes
                    and workload.uid not in self._kept
                ):
                    self._evictable.setdefault(self.pool.nodes[workload.node].flavor, []).append(workload)
        if flavor not in self._ordered:
            now_s = self.snapshot.now_s
            able = self._evictable.get(flavor, [])
            self._ordered[flavor] = sorted(able, key=lambda workload: victim_order(workload, now_s))
        return self._ordered[flavor]

    def _hung_without_substitute(self, leaving: list[Workload], hung: list[Workload]) -> dict[str, int]:
        """By flavor, GPUs of hung victims for which no other victim was sent away since."""
        missing: dict[str, int] = {}
        deadline_s: dict[str, float] = {}
        for workload in hung:
            missing[workload.flavor] = missing.get(workload.flavor, 0) + workload.gpus
            late_s = self.pool.given_up[workload.uid]
            deadline_s[workload.flavor] = min(late_s, deadline_s.get(workload.flavor, late_s))
        for workload in leaving:
            since_s = workload.leaving_since_s
            if since_s is not None and since_s >= deadline_s.get(workload.flavor, since_s + 1.0):
                missing[workload.flavor] = max(0, missing[workload.flavor] - workload.gpus)
        return missing

    def _floor_workers(self) -> set[str]:
        """The `min_workers` of each job that are kept from eviction: those that would lose most."""
        kept: set[str] = set()
        for job in self.snapshot.jobs:
            if not job.min_workers:
                continue
            workers = [
                workload
                for workload in self.owned(Kind.CLEANING, job.uid)
                if workload.phase in ACTIVE and workload.node in self.pool.nodes
            ]
            # A worker that may not be evicted anyway is the first to fill the floor.
            workers.sort(key=lambda worker: (worker.preemptible, *victim_order_dearest(worker, self.snapshot.now_s)))
            kept.update(worker.uid for worker in workers[: job.min_workers])
        return kept


def victim_order_dearest(victim: Workload, now_s: float) -> tuple[float, float, str]:
    """The reverse of `victim_order` within one kind, but for the uid."""
    return -lost_s(victim, now_s), victim.started_s, victim.uid
