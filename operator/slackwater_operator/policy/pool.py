"""The GPUs that a plan can give on: seen free, or held by a workload that is leaving.

Owns the running count while a plan is made, and which nodes can be used.  Called by the planner's parts
in order of priority, so that what one has taken the next cannot.
"""

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from slackwater_operator.core import Node, Phase, Snapshot, Workload

_MOST_PATIENCE = 8


def is_usable(node: Node) -> bool:
    """Whether something may start there: not cordoned and not wholly broken."""
    return node.schedulable and node.broken_gpus < node.gpus


def given_up(snapshot: Snapshot, leaving: Iterable[Workload]) -> dict[str, float]:
    """Leaving workloads that nobody waits for any more, by uid: since when.

    Those sent away after others of their flavor were given up on are waited for twice as long as these, up to
    `_MOST_PATIENCE` times `retarget_after_s`: where all nodes are slow, more victims do not help.
    """
    waiting: dict[str, list[tuple[float, str]]] = {}
    for workload in leaving:
        if workload.leaving_since_s is not None:
            waiting.setdefault(workload.flavor, []).append((workload.leaving_since_s, workload.uid))
    late: dict[str, float] = {}
    for flavor, those in waiting.items():
        least_s = patience_s = snapshot.limits_of(flavor).retarget_after_s
        first_s = min(those)[0]
        for since_s, uid in sorted(those):
            if since_s >= first_s + patience_s:
                first_s, patience_s = since_s, min(2 * patience_s, _MOST_PATIENCE * least_s)
            if snapshot.now_s - since_s > patience_s:
                late[uid] = since_s + patience_s
    return late


class Pool:
    """Free and coming GPUs of each usable node; taking them is remembered.

    held: what workloads have of each, those that leave too, as the snapshot shows it.
    leaving: workloads that do.   given_up: as the function has it; their GPUs are not counted on.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.nodes = {node.name: node for node in snapshot.nodes if is_usable(node)}
        self._of_flavor: dict[str, list[str]] = {}
        for name in sorted(self.nodes):
            self._of_flavor.setdefault(self.nodes[name].flavor, []).append(name)
        self.leaving = [workload for workload in snapshot.workloads if workload.phase is Phase.LEAVING]
        self.given_up = given_up(snapshot, self.leaving)
        held = dict.fromkeys(self.nodes, 0)
        self.coming = dict.fromkeys(self.nodes, 0)
        for workload in snapshot.workloads:
            if workload.phase is not Phase.PENDING and workload.node in held:
                held[workload.node] += workload.gpus
        for workload in self.leaving:
            if workload.node in held and workload.uid not in self.given_up:
                self.coming[workload.node] += workload.gpus
        self.held = held
        self.free: dict[str, int] = {}
        self.rested: dict[str, int] = {}  # free for `lend_after_s`; others are not lent yet
        rests_s = {flavor: snapshot.limits_of(flavor).lend_after_s for flavor in self._of_flavor}
        for name, node in self.nodes.items():
            room = node.gpus - node.broken_gpus - held[name]
            self.free[name] = max(0, min(room, len(node.idle_since_s)))
            # Of a node that holds more than is whole, less comes back than leaves.
            self.coming[name] = max(0, min(self.coming[name], room + self.coming[name] - self.free[name]))
            lend_after_s = rests_s[node.flavor]
            rested = sum(snapshot.now_s - since_s >= lend_after_s for since_s in node.idle_since_s)
            self.rested[name] = min(self.free[name], rested)
        self.free_of_flavor = {f: sum(self.free[name] for name in names) for f, names in self._of_flavor.items()}
        # Thousands of GPUs are lent one by one, so who is asked next is kept, by flavor, rest and GPUs.
        self._turns: dict[str, dict[tuple[bool, int], list[tuple[int, str]]]] = {}

    def flavor_nodes(self, flavor: str) -> list[str]:
        """The usable nodes of a flavor, by name."""
        return self._of_flavor.get(flavor, [])

    def fits(self, flavor: str, gpus: int) -> int:
        """How many workloads of `gpus` the free GPUs of a flavor take."""
        return sum(self.free[name] // gpus for name in self.flavor_nodes(flavor))

    def take_free(self, flavor: str, gpus: int) -> bool:
        """Take `gpus` free GPUs of one node, the fullest that has them; False if none has."""
        return self._take(flavor, gpus, rested=False)

    def take_rested(self, flavor: str, gpus: int) -> bool:
        """As `take_free`, but only GPUs that have been idle for `lend_after_s`."""
        return self._take(flavor, gpus, rested=True)

    def take_coming(self, flavor: str, gpus: int) -> bool:
        """Set aside `gpus` of one node that are free or will be; False if no node has so many."""
        roomy = [name for name in self.flavor_nodes(flavor) if self.free[name] + self.coming[name] >= gpus]
        if not roomy:
            return False
        name = min(roomy, key=lambda name: (self.free[name] + self.coming[name], name))
        soon = min(gpus, self.coming[name])
        self.coming[name] -= soon
        self._remove(name, gpus - soon)
        return True

    def room(self, extra: Mapping[str, int], flavor_gpus: Mapping[str, int]) -> dict[str, int]:
        """By flavor, how many more workloads of `flavor_gpus[flavor]` would fit with `extra` GPUs by node."""
        more = dict.fromkeys(flavor_gpus, 0)
        for name, added in extra.items():
            flavor = self.nodes[name].flavor
            now = self.free[name] + self.coming[name]
            more[flavor] += (now + added) // flavor_gpus[flavor] - now // flavor_gpus[flavor]
        return more

    def _take(self, flavor: str, gpus: int, *, rested: bool) -> bool:
        counted = self.rested if rested else self.free
        turns = self._turns.setdefault(flavor, {})
        turn = turns.get((rested, gpus))
        if turn is None:
            roomy = (name for name in self.flavor_nodes(flavor) if counted[name] >= gpus)
            turn = turns[rested, gpus] = [(self.free[name], name) for name in roomy]
            heapify(turn)
        while turn:
            free, name = turn[0]
            if free == self.free[name] and counted[name] >= gpus:
                self._remove(name, gpus)
                return True
            heappop(turn)  # less is free there by now; if it is still enough, that stands there too
        return False

    def _remove(self, name: str, gpus: int) -> None:
        # Which of a node's GPUs the cluster hands out is its choice, so assume the longest idle.
        if not gpus:
            return
        flavor = self.nodes[name].flavor
        self.free[name] -= gpus
        self.free_of_flavor[flavor] -= gpus
        self.rested[name] = min(self.free[name], max(0, self.rested[name] - gpus))
        for (rested, least), turn in self._turns.get(flavor, {}).items():
            if (self.rested if rested else self.free)[name] >= least:
                heappush(turn, (self.free[name], name))
