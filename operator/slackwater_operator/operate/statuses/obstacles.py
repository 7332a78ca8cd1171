"""Why pods that hold GPUs, or that others wait for, do not start: in the words of kubelet and scheduler.

Owns the table of our pods that are not ready, kept as the pod cache changes, and the few questions for their Events: a
claim that is missing stands nowhere else.  Decides nothing; what hangs for too long is ended by the cluster's part.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slackwater_operator.cluster.kube.pods import read_pod
from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.types import EVENTS, Key, Object, key_of, parse_stamp, uid_of
from slackwater_operator.resources import names

SLOW_S = 10.0  # a pod whose containers are not made by then is asked about
LONG_S = 60.0  # and by then it is said that nobody knows why
ASK_EVERY_S = 15.0
ASK_FOR_S = 2.0
ASK_AT_ONCE = 4
DENIED_S = 300.0  # a namespace whose Events we may not read is not asked again for so long
REFUSED_S = 60.0  # a kubelet's no is told for so long
MAX_WORDS_CHARS = 400
MAKING = ("", "ContainerCreating", "PodInitializing")  # a container waits for these by itself
KINDS = (names.POD_INFERENCE, names.POD_CLEANING, names.POD_GATEWAY, names.POD_KEEPER, names.POD_GATE)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps pods of one owner from starting.

    pods: how many of them.   words: about the oldest.   is_sure: it will not pass by waiting alone, as far as the
    cluster says; else it only takes long.
    """

    pods: int
    words: str
    is_sure: bool


@dataclass(frozen=True, slots=True)
class _Hanging:
    """A pod that is not ready, read once for each of its changes: while a fleet fills there are thousands.

    words: why it will not start, as its status says; "" = nothing.
    """

    uid: str
    key: Key
    revision: str
    made_s: float
    is_being_made: bool
    words: str


@dataclass(slots=True)
class _Waiting:
    """Our pods that are not ready, and what kubelets refused.  Heard by the cache, so it holds nothing else."""

    wall: Callable[[], float]
    pods: dict[tuple[str, Key], dict[Key, _Hanging]] = field(default_factory=dict)  # by kind and owner
    refused: dict[tuple[str, Key], tuple[float, str]] = field(default_factory=dict)

    def hear(self, change: str, obj: Object) -> None:
        labels = obj["metadata"].get("labels") or {}
        kind = labels.get(names.LABEL_KIND)
        if kind not in KINDS or labels.get(names.LABEL_MANAGED_BY) != names.MANAGED_BY:
            return
        key, status = key_of(obj), obj.get("status") or {}
        where = (kind, (key[0], labels.get(names.LABEL_OWNER, "")))
        phase = status.get("phase", "Pending")
        if change != "DELETED" and phase == "Failed" and (said := read_pod(obj).refused):
            node = (obj.get("spec") or {}).get("nodeName", "?")
            self.refused[where] = (self.wall(), f"node {node} did not take {key[1]}: {said}")
        is_waiting = phase in ("Pending", "Running") and not _is_ready(status)
        if change != "DELETED" and is_waiting and "deletionTimestamp" not in obj["metadata"]:
            self.pods.setdefault(where, {})[key] = _read(obj)
        elif (there := self.pods.get(where)) is not None and there.pop(key, None) is not None and not there:
            del self.pods[where]


class Obstacles:
    """What keeps our pods from starting, as of the newest `look`."""

    def __init__(self, kube: Kube, pods: Cache, wall: Callable[[], float]) -> None:
        self._kube = kube
        self._wall = wall
        self._waiting = _Waiting(wall)
        self._said: dict[str, tuple[str, bool]] = {}  # pod's uid -> its newest Event, and whether it is a warning
        self._asked_s: dict[str, float] = {}  # pod's uid
        self._denied_s: dict[str, float] = {}  # namespace
        for pod in pods.values():
            self._waiting.hear("ADDED", pod)
        weakref.finalize(self, pods.on_change(self._waiting.hear))  # the cache outlives each leader's time

    async def look(self) -> None:
        """Ask for the Events of a few pods that hang without a word; raises nothing."""
        now_s = self._wall()
        if self._asked_s:
            present = {pod.uid for there in self._waiting.pods.values() for pod in there.values()}
            self._said = {uid: said for uid, said in self._said.items() if uid in present}
            self._asked_s = {uid: at_s for uid, at_s in self._asked_s.items() if uid in present}
        self._waiting.refused = {
            where: said for where, said in self._waiting.refused.items() if now_s - said[0] < REFUSED_S
        }
        due = [
            pod for there in self._waiting.pods.values() if (pod := self._unclear(there.values(), now_s)) is not None
        ]
        due.sort(key=lambda pod: self._asked_s.get(pod.uid, 0.0))
        await asyncio.gather(*(self._ask(pod, now_s) for pod in due[:ASK_AT_ONCE]))

    def of(self, kind: str, owner: Key, revision: str = "") -> Obstacle | None:
        """What keeps pods of one owner from starting; None = nothing that is known.

        revision: only those of that one.
        """
        found = []
        now_s = self._wall()
        for pod in self._waiting.pods.get((kind, owner), {}).values():
            if not revision or pod.revision == revision:
                words, is_sure = self._words(pod, now_s)
                if words:
                    found.append((not is_sure, pod.made_s, pod.key[1], words))
        if not found:
            return None
        is_unsure, _, name, words = min(found)
        count = sum(one[0] == is_unsure for one in found)
        return Obstacle(count, f"{name}: {words}", not is_unsure)

    def refused(self, kind: str, owner: Key) -> str:
        """What a kubelet said of a pod that it did not take, lately; "" = nothing."""
        return self._waiting.refused.get((kind, owner), (0.0, ""))[1]

    def _words(self, pod: _Hanging, now_s: float) -> tuple[str, bool]:
        """(why it does not start, whether that is sure); "" = it goes on as it should."""
        if pod.words:
            return pod.words, True
        if not pod.is_being_made:
            return "", False
        if (said := self._said.get(pod.uid)) is not None:
            return said
        if now_s - pod.made_s < LONG_S:
            return "", False
        where = f"kubectl -n {pod.key[0]} describe pod {pod.key[1]}"
        return f"its containers are not made after a minute; {where} says what it waits for", False

    def _unclear(self, pods: Iterable[_Hanging], now_s: float) -> _Hanging | None:
        """The oldest pod of an owner that hangs for a reason that only its Events can tell."""
        hanging = [pod for pod in pods if pod.is_being_made and now_s - pod.made_s >= SLOW_S]
        pod = min(hanging, key=lambda pod: (pod.made_s, pod.key[1]), default=None)
        if pod is None or now_s - self._asked_s.get(pod.uid, 0.0) < ASK_EVERY_S:
            return None
        return None if now_s - self._denied_s.get(pod.key[0], 0.0) < DENIED_S else pod

    async def _ask(self, pod: _Hanging, now_s: float) -> None:
        namespace, uid = pod.key[0], pod.uid
        self._asked_s[uid] = now_s
        try:
            async with asyncio.timeout(ASK_FOR_S):
                events, _ = await self._kube.list(EVENTS, namespace, fields=f"regarding.uid={uid}")
        except PermanentError:
            self._denied_s[namespace] = now_s  # without that right people are sent to `kubectl describe`
            return
        except (TemporaryError, TimeoutError):
            return
        newest = max(events, key=_moment, default={})
        if newest.get("type") == "Warning" or newest.get("reason") == "Pulling":
            words = _short(f"{newest.get('reason', '')}: {newest.get('note', '')}")
            self._said[uid] = (words, newest.get("type") == "Warning")
        else:
            self._said.pop(uid, None)


def _read(pod: Object) -> _Hanging:
    metadata, created = pod["metadata"], pod["metadata"].get("creationTimestamp")
    # One that is gated waits for a GPU that is on its way.
    is_gated = bool((pod.get("spec") or {}).get("schedulingGates"))
    words = "" if is_gated else _said(pod.get("status") or {})
    return _Hanging(
        uid=uid_of(pod),
        key=key_of(pod),
        revision=(metadata.get("annotations") or {}).get(names.ANNOTATION_REVISION, ""),
        made_s=parse_stamp(created) if created else 0.0,
        is_being_made=not is_gated and _is_being_made(pod),
        words=words,
    )


def _said(status: Object) -> str:
    """What a container or the scheduler says that waiting alone does not mend."""
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "") not in MAKING:
            return _short(f"{waiting['reason']}: {waiting.get('message', '')}")
    for condition in status.get("conditions") or ():
        if (condition.get("type"), condition.get("reason")) == ("PodScheduled", "Unschedulable"):
            return _short(str(condition.get("message") or "no node takes it"))
    return ""


def _is_ready(status: Object) -> bool:
    conditions = status.get("conditions") or ()
    return any((one.get("type"), one.get("status")) == ("Ready", "True") for one in conditions)


def _is_being_made(pod: Object) -> bool:
    """Its node has it, and none of its containers has begun or said why not."""
    status = pod.get("status") or {}
    states = [one.get("state") or {} for one in status.get("containerStatuses") or ()]
    has_node = bool((pod.get("spec") or {}).get("nodeName"))
    return has_node and all((state.get("waiting") or {}).get("reason") in MAKING for state in states)


def _moment(event: Object) -> str:
    last = (event.get("series") or {}).get("lastObservedTime") or event.get("eventTime")
    return str(last or event.get("deprecatedLastTimestamp") or event["metadata"].get("creationTimestamp") or "")


def _short(words: str) -> str:
    return " ".join(words.split())[:MAX_WORDS_CHARS].rstrip(": ")
