"""What no plan asks for: finishing what was begun, and giving up on what does not come to an end.

Owns drains' ends, overdue victims, reservations that nobody needs, pods that ended, hang or are stranded, and writes
whose answers were lost.  Called once after each tick; waits for writes, never for pods.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from slackwater_operator.cluster.kube import drains
from slackwater_operator.cluster.kube.endings import Endings
from slackwater_operator.cluster.kube.evictions import DEFAULT_DEADLINE_S, advance, let_in, settle_doubt
from slackwater_operator.cluster.kube.pods import STUCK, Pod
from slackwater_operator.cluster.kube.records import Records
from slackwater_operator.cluster.kube.state import State, together
from slackwater_operator.cluster.kube.takes import Take
from slackwater_operator.core import SlackwaterError
from slackwater_operator.kube.errors import NotFound
from slackwater_operator.kube.types import PODS
from slackwater_operator.resources import names
from slackwater_operator.resources.conditions import EventReason
from slackwater_operator.resources.pool import CapacityPool

logger = logging.getLogger(__name__)

UNBOUND_S = 5.0  # a replica that was not bound to a free GPU for so long is made anew
STUCK_S = 60.0  # an image that cannot be had by then is a failure
STRANDED_S = 5.0  # a pod whose node is not there any more ended with it
FORCE_EVERY_S = 5.0

Calls = list[Callable[[], Awaitable[None]]]


@dataclass(slots=True)
class Tending:
    """Keeps how long things have been as they should not be."""

    state: State
    endings: Endings
    records: Records
    _since_s: dict[tuple[str, str], float] = field(default_factory=dict)

    async def tend(self, now_s: float) -> None:
        """One round."""
        state = self.state
        over = self.endings.take_in(now_s)
        state.refresh(now_s)
        self.endings.verify(now_s)
        calls: Calls = [
            partial(self._look_for, uid, now_s) for uid, promise in state.books.promises.items() if promise.in_doubt
        ]
        for take in list(state.takes.values()):
            if take.in_doubt:
                calls.append(partial(settle_doubt, state, take))
            elif not take.is_planned:
                calls.append(partial(advance, state, take, now_s))
        await self._run(calls)
        problems = await drains.finish(state, now_s)
        calls = [partial(state.delete, pod, 0, now_s) for pod in over]
        calls += [partial(state.annotate, pod, names.ANNOTATION_BOOKED, "true") for pod in self.endings.unmarked()]
        seen: set[tuple[str, str]] = set()
        for pod in list(state.index.ours.values()):
            if pod.is_over:
                continue
            calls += (
                self._hung(pod, now_s, seen) if state.leaving_since(pod) is not None else self._stray(pod, now_s, seen)
            )
        self._since_s = {key: since_s for key, since_s in self._since_s.items() if key in seen}
        await self._run(calls)
        for problem in problems:
            logger.warning("a drain goes on later: %s", problem)
        await self.records.write(now_s)
        state.forget_owners()
        state.closed = {key for key in state.closed if state.caches.reclaims.get(*key) is not None}

    async def _run(self, calls: Calls) -> None:
        for problem in await together(calls):
            if isinstance(problem, SlackwaterError):
                logger.warning("to be done later: %s", problem)

    def _for_s(self, what: str, pod: Pod, now_s: float, seen: set[tuple[str, str]]) -> float:
        """How long something has been so; it has to be asked in every round."""
        key = (what, pod.k8s_uid)
        seen.add(key)
        return now_s - self._since_s.setdefault(key, now_s)

    async def _look_for(self, uid: str, now_s: float) -> None:
        """A pod whose creation was not answered."""
        namespace, _, name = uid.partition("/")
        try:
            self.state.remember_pod(await self.state.kube.get(PODS, name, namespace))
        except NotFound:
            self.state.books.release(uid, now_s)

    # --- pods that leave ----------------------------------------------------------------------------

    def _hung(self, pod: Pod, now_s: float, seen: set[tuple[str, str]]) -> Calls:
        """One that should be gone by now: say so, and end it by force where no kubelet can."""
        since_s = self.state.leaving_since(pod)
        assert since_s is not None
        waited_s, take = now_s - since_s, self.state.victims.get(pod.uid)
        pool = self.state.catalogue.pools.get(pod.pool)
        deadline_s = take.deadline_s if take else pool.spec.reclaim.deadline_s if pool else DEFAULT_DEADLINE_S
        if waited_s <= deadline_s:
            return []
        if take is not None:
            self._say_late(take, pod, waited_s)
        facts = self.state.catalogue.nodes.get(pod.node)
        if (facts is not None and facts.is_ready) or waited_s <= deadline_s + pod.grace_s:
            return []
        key = ("forced", pod.k8s_uid)
        is_new = key not in self._since_s
        if not is_new and self._for_s("forced", pod, now_s, seen) < FORCE_EVERY_S:
            return []
        self._since_s[key] = now_s
        seen.add(key)
        logger.warning("forcing uid=%s out after %.0f s: its node %s is not ready", pod.uid, waited_s, pod.node)
        return [partial(self.state.delete, pod, 0, now_s, again=True)]

    def _say_late(self, take: Take, pod: Pod, waited_s: float) -> None:
        if take.is_late:
            return
        take.is_late = True
        logger.warning(
            "uid=%s is still there %.0f s after it was told to go; deadline_s=%.0f", pod.uid, waited_s, take.deadline_s
        )
        obj = self.state.caches.reclaims.get(take.namespace, take.name)
        if obj is not None:
            said = f"{pod.uid} on {pod.node} is still there after {waited_s:.0f} s; another worker may go instead"
            self.state.emit(obj, "Warning", EventReason.RECLAIM_DEADLINE_EXCEEDED, said, "Reclaim")

    # --- pods that do not get on ----------------------------------------------------------------------

    def _stray(self, pod: Pod, now_s: float, seen: set[tuple[str, str]]) -> Calls:
        """One that waits for what does not come."""
        state = self.state
        if not pod.node:
            return self._unbound(pod, now_s, seen) if pod.kind == names.POD_INFERENCE else []
        if pod.node not in state.catalogue.nodes:
            if self._for_s("stranded", pod, now_s, seen) < STRANDED_S:
                return []
            logger.warning("removing uid=%s: its node %s is gone", pod.uid, pod.node)
            return [partial(state.delete, pod, 0, now_s)]
        why, words = pod.waiting
        if why in STUCK and now_s - state.clock.moment(pod.created_s) > STUCK_S:
            said = f"{pod.name} cannot be started: {why}: {words}".rstrip(": ")
            delay_s = state.owner_of(pod).failed(now_s, said)
            logger.error("failed uid=%s backoff_s=%.0f %s", pod.uid, delay_s, said)
            return [partial(state.delete, pod, None, now_s)]
        return []

    def _unbound(self, pod: Pod, now_s: float, seen: set[tuple[str, str]]) -> Calls:
        """A replica that waits for a victim's GPUs: for how long, and for whom still?"""
        state = self.state
        page, take = state.books.pages.get(pod.target), state.takes.get((pod.namespace, pod.reclaim))
        if page is not None and pod.uid in page.visible:
            if now_s - page.visible[pod.uid] > UNBOUND_S:
                return self._give_up(pod, "it was not replaced on a free GPU", now_s)
            return [partial(let_in, state, take, pod, now_s)] if take is not None else []
        living = [victim for victim in take.living if victim.node == pod.target] if take else []
        if take is not None and living:
            if now_s - take.decided_s <= _retarget_after_s(state.catalogue.pools.get(take.pool)):
                return []
            take.forsaken.add(pod.target)
            return self._give_up(pod, "the workers that it waits for hang", now_s)
        if self._for_s("unbound", pod, now_s, seen) <= UNBOUND_S:
            return []
        return self._give_up(pod, "its GPU went elsewhere", now_s)

    def _give_up(self, pod: Pod, why: str, now_s: float) -> Calls:
        logger.warning("removing uid=%s, which waited for a GPU of %s: %s", pod.uid, pod.target, why)
        return [partial(self.state.delete, pod, 0, now_s)]


def _retarget_after_s(pool: CapacityPool | None) -> float:
    return pool.spec.reclaim.retarget_after_s if pool else DEFAULT_DEADLINE_S
