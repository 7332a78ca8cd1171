"""Conditions as JSON, from reasons of the closed sets; and the Events that go with a change of some of them.

Owns transition times, and which change is worth an Event.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slackwater_operator.kube.types import Object
from slackwater_operator.resources.conditions import CONDITIONS, NOT_SEEN, EventReason, status_of
from slackwater_operator.resources.names import KindNames

MAX_MESSAGE_CHARS = 1024
NORMAL, WARNING = "Normal", "Warning"

Emit = Callable[[Object, str, str, str, str], None]  # (object, type, reason, message, action)
Reasons = Mapping[str, tuple[str, str]]  # condition type -> (reason, message)


@dataclass(frozen=True, slots=True)
class Announcement:
    """The Event of a condition that came to have a reason.  after: only if it had one of these statuses before."""

    type: str
    reason: EventReason
    after: tuple[str, ...] = ("True", "False", "Unknown", "")


ANNOUNCEMENTS: Mapping[tuple[str, str], Announcement] = {
    ("SignalsFresh", "SignalsStale"): Announcement(WARNING, EventReason.SIGNALS_STALE, ("True",)),
    ("SignalsFresh", "SignalsFresh"): Announcement(NORMAL, EventReason.SIGNALS_FRESH, ("False",)),
    ("NeedMet", "UnmetNeed"): Announcement(WARNING, EventReason.UNMET_NEED),
    ("RevisionGated", "GatePassed"): Announcement(NORMAL, EventReason.GATE_PASSED, ("False",)),
    ("RevisionGated", "GateFailed"): Announcement(WARNING, EventReason.GATE_FAILED),
    ("Progressing", "BackingOff"): Announcement(WARNING, EventReason.BACKING_OFF),
    ("Complete", "LedgerComplete"): Announcement(NORMAL, EventReason.COMPLETE),
    ("Failed", "BadConfiguration"): Announcement(WARNING, EventReason.FAILED),
    ("WorkDurable", "WorkLost"): Announcement(WARNING, EventReason.WORK_LOST),
    ("Accepted", "TemplateRefused"): Announcement(WARNING, EventReason.TEMPLATE_REFUSED),
    ("Progressing", "WorkersStuck"): Announcement(WARNING, EventReason.WORKERS_STUCK),
    ("Accepted", "QueueMissing"): Announcement(WARNING, EventReason.QUEUE_MISSING),
    ("Accepted", "SpecRefused"): Announcement(WARNING, EventReason.REFUSED),
    ("Ready", "SpecRefused"): Announcement(WARNING, EventReason.REFUSED),
    ("NodesExclusive", "NodesShared"): Announcement(WARNING, EventReason.NODES_SHARED),
    ("SlurmReachable", "SlurmUnreachable"): Announcement(WARNING, EventReason.SLURM_UNREACHABLE),
}


def conditions(kind: KindNames, obj: Object, reasons: Reasons, now: str, emit: Emit) -> list[Object]:
    """Every condition of the kind; those without a reason are Unknown.  now: RFC 3339."""
    generation = int(obj["metadata"].get("generation") or 0)
    before: dict[str, Any] = {one.get("type"): one for one in (obj.get("status") or {}).get("conditions") or ()}
    found = []
    for type_ in CONDITIONS[kind.kind]:
        reason, message = reasons.get(type_, (NOT_SEEN, ""))
        status = status_of(kind, type_, reason)
        old = before.get(type_) or {}
        if old.get("reason") != reason:
            _announce(obj, (type_, reason), str(old.get("status", "")), message, emit)
        found.append(
            {
                "type": type_,
                "status": status,
                "reason": reason,
                "message": message[:MAX_MESSAGE_CHARS],
                "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == status else now,
                "observedGeneration": generation,
            }
        )
    return found


def _announce(obj: Object, what: tuple[str, str], before: str, message: str, emit: Emit) -> None:
    announcement = ANNOUNCEMENTS.get(what)
    if announcement is not None and before in announcement.after:
        emit(obj, announcement.type, announcement.reason, message or announcement.reason, what[0])


def lacking(pools: Sequence[str], flavors: Sequence[str]) -> str:
    """Which of the pools and GPU types that it names an object has to do without; "" = none."""
    said = [f"CapacityPool {name}, which is not there or has none of its flavors" for name in pools]
    said += [f"flavor {name}, which none of its pools has" for name in flavors]
    return f"without {'; without '.join(said)}" if said else ""


def counted(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
