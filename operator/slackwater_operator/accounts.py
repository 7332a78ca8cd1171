"""Where every GPU second went.

Owns the sums of GPU-seconds by state, from one snapshot to the next; each GPU is in exactly one state,
so the sum over the states is GPUs times wall time.  Owns no clock and decides nothing.  Called by the
loop, the simulator and through them by metrics, status and the demo's report.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from slackwater_operator.core import Action, Kind, Node, Phase, Service, Snapshot, Verb, Workload

STATES = ("serving", "serving_headroom", "background", "training", "starting", "draining", "free", "broken")


@dataclass(slots=True)
class Held:
    """A cleaning worker's seconds: what it held while running, and what of its life is durable."""

    lived_s: float = 0.0
    running_s: float = 0.0
    first_committed_s: float = 0.0  # when the account began; not ours to count
    committed_s: float = 0.0

    @property
    def counted_s(self) -> float:
        """Committed since the account began; a worker cannot commit more than it lived."""
        return min(self.committed_s - self.first_committed_s, self.lived_s)


class Accounts:
    """The books of one pool.

    seconds: GPU-seconds by state (`STATES`).
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STATES, 0.0)
        self._held: dict[str, Held] = {}
        self._gone_committed_s = 0.0
        self._lost_s = 0.0

    def add(self, snapshot: Snapshot, until_s: float, actions: Iterable[Action] = ()) -> None:
        """Book the time from the snapshot to `until_s` as if nothing had changed in between.

        actions: what was done right after the snapshot; who is told to leave by them does no work for
        the account from then on.  A worker of an earlier snapshot that is not in this one is gone: what
        it held while running beyond what it committed is lost.  Raises ValueError when `until_s` is
        before the snapshot.
        """
        if until_s < snapshot.now_s:
            raise ValueError(f"until_s must not be before the snapshot at {snapshot.now_s}, got {until_s}")
        took_s = until_s - snapshot.now_s
        slots = slots_by_owner(snapshot.services)
        workloads = after(snapshot.workloads, actions)
        on_node: dict[str, list[Workload]] = {}
        for workload in workloads:
            if workload.phase is not Phase.PENDING:
                on_node.setdefault(workload.node, []).append(workload)
        for node in snapshot.nodes:
            self._add_node(node, on_node.get(node.name, []), slots, took_s)
        self._follow_workers(workloads, took_s)

    def settle(self, uid: str, committed_s: float) -> None:
        """The last word of a worker that left: its final `committed_s`, which no snapshot showed."""
        if uid in self._held:
            held = self._held[uid]
            held.committed_s = max(held.committed_s, committed_s)

    @property
    def owned_s(self) -> float:
        """GPU-seconds of all GPUs, broken ones included."""
        return sum(self.seconds.values())

    @property
    def committed_s(self) -> float:
        """Background GPU-seconds whose results are durable."""
        return self._gone_committed_s + sum(held.counted_s for held in self._held.values())

    @property
    def lost_s(self) -> float:
        """Background GPU-seconds whose results died with their worker."""
        return self._lost_s

    @property
    def useful_ratio(self) -> float:
        """(serving + training + committed background) / (owned - broken); 0 before any time passed."""
        return self._ratio(self.seconds["serving"] + self.seconds["training"] + self.committed_s)

    @property
    def useful_ratio_without_filling(self) -> float:
        """The same fleet and traffic had nothing been lent: (serving + training) / (owned - broken)."""
        return self._ratio(self.seconds["serving"] + self.seconds["training"])

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values; seconds are GPU-seconds."""
        return {
            "seconds": dict(self.seconds),
            "owned_s": self.owned_s,
            "committed_s": self.committed_s,
            "lost_s": self.lost_s,
            "useful_ratio": self.useful_ratio,
            "useful_ratio_without_filling": self.useful_ratio_without_filling,
        }

    def _ratio(self, useful_s: float) -> float:
        working_s = self.owned_s - self.seconds["broken"]
        return useful_s / working_s if working_s > 0 else 0.0

    def _add_node(
        self, node: Node, workloads: list[Workload], slots: dict[tuple[str, str], int], took_s: float
    ) -> None:
        left = node.gpus
        for workload in sorted(workloads, key=_uid):
            gpus = min(workload.gpus, left)  # a node never counts for more than it has
            left -= gpus
            if workload.kind is Kind.CLEANING and workload.phase is Phase.RUNNING:  # nearly all of a large fleet
                self.seconds["background"] += gpus * took_s
                continue
            for state, share in shares(workload, slots.get((workload.owner, workload.flavor), 0)):
                self.seconds[state] += share * gpus * took_s
        broken = min(node.broken_gpus, left)  # one that broke under its holder counts as held until that is gone
        self.seconds["broken"] += broken * took_s
        self.seconds["free"] += (left - broken) * took_s

    def _follow_workers(self, workloads: Iterable[Workload], took_s: float) -> None:
        workers = [one for one in workloads if one.kind is Kind.CLEANING and one.phase is not Phase.PENDING]
        for worker in workers:
            held = self._held.get(worker.uid)
            if held is None:
                held = self._held[worker.uid] = Held(first_committed_s=worker.committed_s)
            held_s = worker.gpus * took_s
            held.lived_s += held_s
            if worker.phase is Phase.RUNNING:
                held.running_s += held_s
            if worker.committed_s > held.committed_s:
                held.committed_s = worker.committed_s
        if len(workers) == len(self._held):
            return  # nobody has gone
        gone = self._held.keys() - {worker.uid for worker in workers}
        for uid in sorted(gone):  # in one order, for sums that are the same in each run
            held = self._held.pop(uid)
            self._gone_committed_s += held.counted_s
            self._lost_s += max(0.0, held.running_s - held.counted_s)


def _uid(workload: Workload) -> str:
    return workload.uid


def after(workloads: Iterable[Workload], actions: Iterable[Action]) -> list[Workload]:
    """The workloads with those that the actions evict LEAVING and those that they drain DRAINING."""
    phases = {Verb.EVICT: Phase.LEAVING, Verb.DRAIN: Phase.DRAINING}
    told = {action.uid: phases[action.verb] for action in actions if action.verb in phases}
    if not told:
        return list(workloads)
    return [replace(workload, phase=told[workload.uid]) if workload.uid in told else workload for workload in workloads]


def shares(workload: Workload, slots: int) -> tuple[tuple[str, float], ...]:
    """The states that a workload's GPUs are in, with the share of each.  slots: of one replica, 0 = unknown."""
    match workload.phase:
        case Phase.STARTING:
            return (("starting", 1.0),)
        case Phase.LEAVING:
            return (("draining", 1.0),)
        case _ if workload.kind is Kind.TRAINING:
            return (("training", 1.0),)
        case _ if workload.kind is Kind.CLEANING:
            return (("background", 1.0),)
    # A replica, and its slots in use are served also while it drains.
    used_ratio = min(1.0, workload.running_slots / slots) if slots else 0.0
    rest = "draining" if workload.phase is Phase.DRAINING else "serving_headroom"
    return (("serving", used_ratio), (rest, 1.0 - used_ratio))


def slots_by_owner(services: tuple[Service, ...]) -> dict[tuple[str, str], int]:
    """Decode slots of one replica by (service, flavor)."""
    return {
        (service.name, variant.flavor): variant.slots_per_replica
        for service in services
        for variant in service.variants
    }
