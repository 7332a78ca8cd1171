"""All pods that matter, found by node, by owner and by what has to be done about them.

Owns the parsed pods, kept up to date by the cache's changes, so that an observation costs what changed.  Owns no
decision.  A pod that nobody needs (no GPU, not ours) is not in it.
"""

from collections.abc import Iterable
from typing import TypeVar

from slackwater_operator.cluster.kube.pods import Pod, read_pod
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names

K = TypeVar("K")

OURS = (names.POD_INFERENCE, names.POD_CLEANING)


class Index:
    """Pods by uid (`<namespace>/<name>`).

    ours, foreign: of services and jobs, and all others.   over: those of ours that ended and whose objects are there.
    foreign_waiting: want GPUs, have no node.   changed_ours: uids of our pods that came, changed or went, until the
    observer clears it.   gone: the last state of pods of ours that are gone, oldest first, until somebody takes them.
    """

    def __init__(self, objects: Iterable[Object] = ()) -> None:
        self.pods: dict[str, Pod] = {}
        self.ours: dict[str, Pod] = {}
        self.over: dict[str, Pod] = {}
        self.foreign: dict[str, Pod] = {}
        self.foreign_waiting: dict[str, Pod] = {}
        self.changed_ours: set[str] = set()
        self.gone: list[Pod] = []
        self._by_node: dict[str, dict[str, Pod]] = {}
        self._by_owner: dict[tuple[str, str], dict[str, Pod]] = {}
        self._changed_nodes: set[str] = set()
        for obj in objects:
            self.hear("ADDED", obj)

    def hear(self, event: str, obj: Object) -> bool:
        """Take in a change of the cache; whether a pod of ours has ended by it."""
        metadata = obj.get("metadata", {})
        uid = names.object_uid(metadata.get("namespace", ""), metadata.get("name", ""))
        old = self.pods.get(uid)
        if event == "DELETED":
            if old is not None:
                self._remove(old)
                self._say_gone(read_pod(obj) if "spec" in obj else old)
            return old is not None and old.kind in OURS and not old.is_over
        if "spec" not in obj:  # slimmed to its name: not ours, no GPU
            return False
        new = read_pod(obj)
        if new.kind not in OURS and not new.devices:
            return False
        if old is not None:
            if old.k8s_uid != new.k8s_uid:
                self._say_gone(old)
            self._remove(old)
        self._add(new)
        return new.uid in self.over and (old is None or not old.is_over)

    def on_node(self, node: str) -> Iterable[Pod]:
        """Pods bound to a node, and those of ours that wait for it or foreign ones that were promised it."""
        return self._by_node.get(node, {}).values()

    def of(self, kind: str, owner: str) -> Iterable[Pod]:
        """Pods of one service or job."""
        return self._by_owner.get((kind, owner), {}).values()

    def take_changes(self) -> set[str]:
        """Nodes whose pods changed since the last call."""
        changed, self._changed_nodes = self._changed_nodes, set()
        return changed

    def take_gone(self) -> list[Pod]:
        """Pods of ours that are gone since the last call, as they were last seen."""
        gone, self.gone = self.gone, []
        return gone

    def _say_gone(self, pod: Pod) -> None:
        if pod.kind in OURS:
            self.gone.append(pod)

    def _add(self, pod: Pod) -> None:
        self.pods[pod.uid] = pod
        if pod.kind in OURS:
            self.ours[pod.uid] = pod
            self.changed_ours.add(pod.uid)
            self._by_owner.setdefault((pod.kind, pod.owner), {})[pod.uid] = pod
            if pod.is_over:
                self.over[pod.uid] = pod
        else:
            self.foreign[pod.uid] = pod
            if not pod.node and not pod.is_over:
                self.foreign_waiting[pod.uid] = pod
        if pod.place:
            self._by_node.setdefault(pod.place, {})[pod.uid] = pod
            self._changed_nodes.add(pod.place)

    def _remove(self, pod: Pod) -> None:
        del self.pods[pod.uid]
        if self.ours.pop(pod.uid, None) is not None:
            self.changed_ours.add(pod.uid)
        self.over.pop(pod.uid, None)
        self.foreign.pop(pod.uid, None)
        self.foreign_waiting.pop(pod.uid, None)
        _drop(self._by_owner, (pod.kind, pod.owner), pod.uid)
        if pod.place:
            _drop(self._by_node, pod.place, pod.uid)
            self._changed_nodes.add(pod.place)


def _drop(table: dict[K, dict[str, Pod]], key: K, uid: str) -> None:
    there = table.get(key)
    if there is not None:
        there.pop(uid, None)
        if not there:
            del table[key]
