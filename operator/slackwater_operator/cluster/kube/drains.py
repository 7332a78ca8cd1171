"""Replicas that leave without cutting a stream.

Owns the draining mark on a pod, which survives a restart, and when a draining replica may be told to end: once its
gateway no longer sends to it and its last stream is over, or when its grace is.  Called by `cluster` and `tending`.
"""

from collections.abc import Awaitable, Callable
from functools import partial

from slackwater_operator.cluster.kube.pods import Pod
from slackwater_operator.cluster.kube.state import State, together
from slackwater_operator.core import Action, SlackwaterError, TemporaryError, Verb
from slackwater_operator.resources import names

SETTLE_S = 1.5  # a gateway says once a second how many streams there are, so a drained replica may still hear of one
LEAST_GRACE_S = 2.0  # a grace of 0 would take the pod away before its kubelet has ended it


def _replica(state: State, action: Action) -> Pod:
    pod = state.index.ours.get(action.uid)
    if pod is None or pod.is_over or pod.kind != names.POD_INFERENCE:
        raise TemporaryError(f"{action.uid} is gone already")
    if state.leaving_since(pod) is not None:
        raise TemporaryError(f"{action.uid} is leaving already")
    return pod


def mark(state: State, action: Action, now_s: float) -> Callable[[], Awaitable[None]]:
    """A DRAIN takes a replica out of its gateway at once; after a CANCEL it serves on.

    From now on it drains, or does not.  Returns the write.
    """
    pod = _replica(state, action)
    since_s = now_s if action.verb is Verb.DRAIN else None
    if (state.draining_since(pod) is None) == (since_s is None):
        raise TemporaryError(f"{action.uid} is {'not draining' if since_s is None else 'draining already'}")
    state.marks[pod.uid] = since_s

    async def write() -> None:
        try:
            stamp = None if since_s is None else state.now_stamp(since_s)
            await state.annotate(pod, names.ANNOTATION_DRAINING_SINCE, stamp)
        finally:
            state.marks.pop(pod.uid, None)
        tell(state, pod.owner)

    return write


def tell(state: State, service: str) -> None:
    """What the gateway may send to now."""
    state.signals.tell(service, state.endpoints(service))


async def finish(state: State, now_s: float) -> list[SlackwaterError]:
    """End every replica that has drained; returns what went wrong."""
    due = []
    for pod in list(state.index.ours.values()):
        if pod.draining_s is None and pod.uid not in state.marks:  # nearly all
            continue
        since_s = state.draining_since(pod)
        if since_s is None or pod.is_over or state.leaving_since(pod) is not None:
            continue
        waited_s, grace_s = now_s - since_s, _grace_s(state, pod)
        if (waited_s > SETTLE_S and _is_idle(state, pod)) or waited_s > grace_s:
            due.append(partial(state.delete, pod, max(LEAST_GRACE_S, grace_s - waited_s), now_s))
    results = await together(due)
    return [result for result in results if isinstance(result, SlackwaterError)]


def _is_idle(state: State, pod: Pod) -> bool:
    """No stream runs on it and none can come any more."""
    if not pod.is_ready and pod.running_s is None:
        return True  # it never began
    told = state.signals.told(pod.owner)
    return told is not None and pod.uid not in told and state.signals.in_flight(pod.owner, pod.uid) == 0


def _grace_s(state: State, pod: Pod) -> float:
    service = state.catalogue.services.get(pod.owner)
    return service.spec.drain.grace_s if service else 0.0
