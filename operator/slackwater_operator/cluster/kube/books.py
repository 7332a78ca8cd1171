"""Which GPUs of which node are free, and since when.

Owns the count of what is held, promised and reserved on each node, and the idle clock.  A GPU is free only when it is
seen free: the pods that held it have ended or are gone, no pod of ours is on its way to it, and no reservation
waits for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from slackwater_operator.cluster.kube.index import Index
from slackwater_operator.cluster.kube.layout import Layout, Seat
from slackwater_operator.cluster.kube.pods import Pod
from slackwater_operator.resources import names


@dataclass(frozen=True, slots=True)
class Promise:
    """A pod that was asked for and is not seen yet; in_doubt: the answer was lost."""

    node: str
    gpus: int
    since_s: float
    in_doubt: bool = False


@dataclass(slots=True)
class Page:
    """One node's books.  visible: pods without a node that wait here and for which a GPU is free now, since when."""

    seat: Seat
    held: int = 0
    free: int = 0
    idle_since_s: list[float] = field(default_factory=list)
    visible: dict[str, float] = field(default_factory=dict)


class Books:
    """The books of all seated nodes."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.pages: dict[str, Page] = {}
        self.promises: dict[str, Promise] = {}  # by Pod.uid
        self._on_node: dict[str, set[str]] = {}  # node -> uids of `promises`

    def lay_out(self, layout: Layout, now_s: float) -> None:
        """Other nodes, or other GPUs on them; idle times of nodes that stay are kept."""
        self.pages = {
            name: Page(seat) if (page := self.pages.get(name)) is None else page for name, seat in layout.seats.items()
        }
        for name, seat in layout.seats.items():
            self.pages[name].seat = seat
        self.count(layout.seats, now_s)

    def count(self, nodes: Iterable[str], now_s: float) -> None:
        """Count these nodes again."""
        for name in nodes:
            page = self.pages.get(name)
            if page is not None:
                _count(page, list(self._index.on_node(name)), self._promised(name), now_s)

    def promise(self, uid: str, node: str, gpus: int, now_s: float) -> None:
        """GPUs of a pod that is being created; nobody else gets them."""
        self.promises[uid] = Promise(node, gpus, now_s)
        self._on_node.setdefault(node, set()).add(uid)
        self.count((node,), now_s)

    def release(self, uid: str, now_s: float) -> None:
        """The pod was not created after all."""
        promise = self.promises.get(uid)
        if promise is not None:
            self._forget(uid, promise.node)
            self.count((promise.node,), now_s)

    def abandon(self, uid: str, now_s: float) -> None:
        """Nobody will create the pod any more: what is still promised to it is not, unless it may be there."""
        promise = self.promises.get(uid)
        if promise is not None and not promise.in_doubt:
            self.release(uid, now_s)

    def doubt(self, uid: str) -> None:
        """The pod may have been created; its GPUs stay promised until somebody has looked."""
        promise = self.promises.get(uid)
        if promise is not None:
            self.promises[uid] = Promise(promise.node, promise.gpus, promise.since_s, in_doubt=True)

    def _promised(self, node: str) -> int:
        """GPUs of a node that are promised to pods which are not seen yet."""
        total = 0
        for uid in list(self._on_node.get(node, ())):
            if uid in self._index.pods:
                self._forget(uid, node)
            else:
                total += self.promises[uid].gpus
        return total

    def _forget(self, uid: str, node: str) -> None:
        del self.promises[uid]
        there = self._on_node[node]
        there.discard(uid)
        if not there:
            del self._on_node[node]


def _count(page: Page, pods: list[Pod], promised: int, now_s: float) -> None:
    seat = page.seat
    page.held = sum(pod.gpus(seat.resource) for pod in pods if pod.node and not pod.is_over)
    free = max(0, seat.gpus - seat.broken - page.held - promised)
    waiting = sorted((pod for pod in pods if not pod.node and not pod.is_over and pod.deleting_s is None), key=_turn)
    visible = {}
    for pod in waiting:
        gpus = pod.gpus(seat.resource)
        if gpus <= free:
            free -= gpus
            visible[pod.uid] = page.visible.get(pod.uid, now_s)
    page.visible = visible
    page.free = free
    if free > len(page.idle_since_s):
        page.idle_since_s.extend([now_s] * (free - len(page.idle_since_s)))
    else:  # which of a node's GPUs was taken is the kubelet's choice, so assume the longest idle
        del page.idle_since_s[: len(page.idle_since_s) - free]


def _turn(pod: Pod) -> tuple[bool, float, str]:
    """The scheduler's order: by priority, then age."""
    return pod.kind != names.POD_INFERENCE, pod.created_s, pod.uid
