"""The Events of what the policy decided: who got GPUs, who gives them up, and why.

One Event for each object, verb, reason and beneficiary of a tick; a burst of starts is one.  A take-back is told to the
job that gives the GPUs up; of its Reclaim the cluster tells.
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
TOO_MANY = "the job is suspended, or has more than maxWorkers, its queue or its pool allow"


def tell(emit: Emit, watches: Watches, snapshot: Snapshot | None, taken: Iterable[Action]) -> None:
    """Emit the Events of one tick's actions."""
    counts: Counter[tuple[str, str, Verb, Reason, str]] = Counter()  # (kind of owner, its key, verb, reason, for whom)
    owners = {workload.uid: workload.owner for workload in snapshot.workloads} if snapshot else {}
    for action in taken:
        match action.verb:
            case Verb.START if (variant := split_variant_uid(action.uid)) is not None:
                counts["service", f"{variant[0]}/{variant[1]}", action.verb, action.reason, ""] += action.count
            case Verb.START:
                counts["job", action.uid, action.verb, action.reason, ""] += action.count
            case Verb.DRAIN | Verb.CANCEL:
                counts["service", owners.get(action.uid, ""), action.verb, action.reason, ""] += 1
            case Verb.EVICT:
                whom = _beneficiary(action.beneficiary)
                counts["job", owners.get(action.uid, ""), action.verb, action.reason, whom] += 1
    for (kind, key, verb, reason, whom), count in counts.items():
        cache: Cache = watches.services if kind == "service" else watches.jobs
        obj = cache.get(*key.partition("/")[::2])
        if obj is not None:
            event, what = _words(kind, verb, count)
            why = TOO_MANY if (verb, reason) == (Verb.EVICT, Reason.LIMIT) else WHY[reason]
            emit(obj, NORMAL, event, f"{what}{whom}: {why}", str(verb).capitalize())


def _beneficiary(uid: str) -> str:
    """`" for serving/tts"`; "" for nobody."""
    variant = split_variant_uid(uid)
    return f" for {variant[0]}/{variant[1]}" if variant is not None else f" for {uid}" if uid else ""


def _words(kind: str, verb: Verb, count: int) -> tuple[EventReason, str]:
    some = f"{count} replica{'s' if count != 1 else ''}"
    match verb:
        case Verb.START if kind == "service":
            return EventReason.REPLICA_STARTED, f"started {some}"
        case Verb.START:
            return EventReason.LENT, f"lent idle GPUs to {count} worker{'s' if count != 1 else ''}"
        case Verb.EVICT:
            return EventReason.TAKEN_BACK, f"{count} worker{'s' if count != 1 else ''} must give GPUs up"
        case Verb.DRAIN:
            return EventReason.REPLICA_DRAINING, f"{some} take{'s' if count == 1 else ''} no new request"
    return EventReason.DRAIN_CANCELLED, f"{some} serve{'s' if count == 1 else ''} on"
