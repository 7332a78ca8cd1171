"""The Events of what the policy decided: who got GPUs, who gives them up, and why.

One Event for each object, verb and reason of a tick; a burst of starts is one.  Take-backs are the cluster's to tell.
"""

from collections import Counter
from collections.abc import Iterable

from slackwater_operator.core import Action, Reason, Snapshot, Verb
from slackwater_operator.kube.cache import Cache
from slackwater_operator.operate.statuses.conditions import NORMAL, Emit
from slackwater_operator.operate.watches import Watches
from slackwater_operator.resources.conditions import EventReason
from slackwater_operator.resources.names import split_variant_uid

WHY = {
    Reason.TRAFFIC: "traffic needs it",
    Reason.FLOOR: "fewer than the minimum were there",
    Reason.TRAINING: "training waits for GPUs",
    Reason.NODE: "its node is cordoned or broken",
    Reason.RETARGET: "an earlier victim did not go in time",
    Reason.QUIET: "the others carry the load, and did through the whole window",
    Reason.IDLE: "the GPUs were idle for long enough",
    Reason.LIMIT: "more than the spec allows, or of an older revision",
}


def tell(emit: Emit, watches: Watches, snapshot: Snapshot | None, taken: Iterable[Action]) -> None:
    """Emit the Events of one tick's actions."""
    counts: Counter[tuple[str, str, Verb, Reason]] = Counter()  # (kind of owner, its key, verb, reason)
    owners = {workload.uid: workload.owner for workload in snapshot.workloads} if snapshot else {}
    for action in taken:
        match action.verb:
            case Verb.START if (variant := split_variant_uid(action.uid)) is not None:
                counts["service", f"{variant[0]}/{variant[1]}", action.verb, action.reason] += action.count
            case Verb.START:
                counts["job", action.uid, action.verb, action.reason] += action.count
            case Verb.DRAIN | Verb.CANCEL:
                counts["service", owners.get(action.uid, ""), action.verb, action.reason] += 1
            case _:
                pass
    for (kind, key, verb, reason), count in counts.items():
        cache: Cache = watches.services if kind == "service" else watches.jobs
        obj = cache.get(*key.partition("/")[::2])
        if obj is not None:
            event, what = _words(kind, verb, count)
            emit(obj, NORMAL, event, f"{what}: {WHY[reason]}", str(verb).capitalize())


def _words(kind: str, verb: Verb, count: int) -> tuple[EventReason, str]:
    some = f"{count} replica{'s' if count != 1 else ''}"
    match verb:
        case Verb.START if kind == "service":
            return EventReason.REPLICA_STARTED, f"started {some}"
        case Verb.START:
            return EventReason.LENT, f"lent idle GPUs to {count} worker{'s' if count != 1 else ''}"
        case Verb.DRAIN:
            return EventReason.REPLICA_DRAINING, f"{some} take{'s' if count == 1 else ''} no new request"
    return EventReason.DRAIN_CANCELLED, f"{some} serve{'s' if count == 1 else ''} on"
