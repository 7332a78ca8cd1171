"""The conditions of each kind and the reasons of Events: closed sets, so that alerts and people can rely on them.

A reason belongs to one type and decides its status; `True` is always the good state but for `Complete` and `Failed`,
which are plain facts.  Owns no decision about when a condition holds.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Final

from slackwater_operator.resources.base import Condition, ConditionStatus
from slackwater_operator.resources.names import (
    CAPACITY_POOL,
    CLEANING_JOB,
    GPU_FLAVOR,
    INFERENCE_DEPLOYMENT,
    RECLAIM,
    KindNames,
)

TRUE: Final = "True"
FALSE: Final = "False"
UNKNOWN: Final = "Unknown"
NOT_SEEN: Final = "NotSeen"
"""The reason of every condition that nobody has looked at yet."""

Reasons = Mapping[str, ConditionStatus]

_ACCEPTED: Final[Reasons] = {
    "Accepted": TRUE,
    "PoolMissing": FALSE,  # names a CapacityPool that is not there
    "FlavorMissing": FALSE,  # names a GPUFlavor that is not there, or that none of its pools has
    "QueueMissing": TRUE,  # it runs all the same, with weight 1
    "TemplateRefused": FALSE,  # the API server did not take a pod made from the template
    "SpecRefused": FALSE,  # the object does not pass our own check
}

CONDITIONS: Final[Mapping[str, Mapping[str, Reasons]]] = {
    GPU_FLAVOR.kind: {
        "Ready": {"NodesFound": TRUE, "NoNodes": FALSE, "SpecRefused": FALSE},
    },
    CAPACITY_POOL.kind: {
        "Ready": {"GPUsFound": TRUE, "NoGPUs": FALSE, "FlavorMissing": FALSE, "SpecRefused": FALSE},
        # A node of two pools, or of two flavors of one, is used by neither.
        "NodesExclusive": {"NodesExclusive": TRUE, "NodesShared": FALSE},
        "CapacityComplete": {
            "AllGPUsUsable": TRUE,
            "NoGPUs": FALSE,
            "GPUsBroken": FALSE,
            "GPUsMissing": FALSE,
            "GPUsCordoned": FALSE,  # on nodes that take no new pods, or are not ready
        },
        "SlurmReachable": {"SlurmReachable": TRUE, "NoSlurm": UNKNOWN, "SlurmUnreachable": FALSE},
    },
    INFERENCE_DEPLOYMENT.kind: {
        "Ready": {
            "ServingWithinObjective": TRUE,
            "Serving": TRUE,  # no objective was stated
            "ScaledToZero": TRUE,
            "ObjectiveMissed": FALSE,
            "ReplicasStarting": FALSE,
            "ReplicasStuck": FALSE,  # none serves, and one of them cannot start
            "NoReplicas": FALSE,
            "NotAccepted": FALSE,
        },
        "Accepted": {name: status for name, status in _ACCEPTED.items() if name != "QueueMissing"},
        "SignalsFresh": {"SignalsFresh": TRUE, "SignalsStale": FALSE, "GatewayStarting": FALSE},
        "NeedMet": {"NeedMet": TRUE, "ReclaimUnderWay": FALSE, "UnmetNeed": FALSE},
        "RevisionGated": {
            "NoGate": TRUE,
            "GatePassed": TRUE,
            "GateRunning": FALSE,
            "GateFailed": FALSE,
        },
        "ReclaimsInTime": {"ReclaimsInTime": TRUE, "ReclaimDeadlineExceeded": FALSE},
    },
    CLEANING_JOB.kind: {
        "Progressing": {
            "WorkersRunning": TRUE,
            "WorkersStarting": TRUE,
            "WorkersStuck": FALSE,  # they hold GPUs, and one of them cannot start
            "NoGPUs": FALSE,  # its pools have none of its flavors
            "NoIdleGPUs": FALSE,
            "GPUsReserved": FALSE,  # idle ones that a pool does not lend
            "NoRoom": FALSE,  # idle ones on nodes that its workers do not fit
            "QueueFull": FALSE,
            "NoWorkersWanted": FALSE,  # maxWorkers is 0
            "NoWork": FALSE,  # every open item is claimed
            "BackingOff": FALSE,  # workers failed; started again with a delay
            "Suspended": FALSE,
            "Held": FALSE,  # restartPolicy Hold, after a preemption
            "Ended": FALSE,
            "NotAccepted": FALSE,
        },
        "Accepted": _ACCEPTED,
        "Complete": {"LedgerComplete": TRUE, "WorkersDone": TRUE, "ItemsOpen": FALSE},
        "Failed": {
            "BadConfiguration": TRUE,  # a worker ended with 2
            "Stopped": TRUE,  # restartPolicy Stop, after a preemption
            "Held": FALSE,  # restartPolicy Hold, after a preemption: it waits for a person
            "NotFailed": FALSE,
        },
        "LedgerReadable": {
            "LedgerReadable": TRUE,
            "KeeperStarting": FALSE,
            "KeeperUnreachable": FALSE,
            "NoLedger": UNKNOWN,
        },
        "WorkDurable": {
            "AllVerified": TRUE,
            "WorkLost": FALSE,  # a receipt that the ledger does not hold
            "NotVerified": UNKNOWN,
        },
    },
    RECLAIM.kind: {
        "InTime": {"WithinDeadline": TRUE, "ReclaimDeadlineExceeded": FALSE},
        "Lossless": {
            "AllCheckpointed": TRUE,
            "WorkLost": FALSE,
            "KilledAtDeadline": FALSE,
            "NotVerified": UNKNOWN,
        },
        "Answered": {"Answered": TRUE, "CannotAnswer": FALSE},
    },
}
"""Kind -> condition type -> reason -> status."""


class EventReason(StrEnum):
    """Why an Event was written.  Few: decisions and faults, not steps."""

    REFUSED = "SpecRefused"
    RECLAIM_STARTED = "ReclaimStarted"
    RECLAIM_DEADLINE_EXCEEDED = "ReclaimDeadlineExceeded"
    WORK_LOST = "WorkLost"
    LENT = "Lent"
    TAKEN_BACK = "TakenBack"
    WORKERS_STUCK = "WorkersStuck"
    REPLICA_STARTED = "ReplicaStarted"
    REPLICA_DRAINING = "ReplicaDraining"
    DRAIN_CANCELLED = "DrainCancelled"
    SIGNALS_STALE = "SignalsStale"
    SIGNALS_FRESH = "SignalsFresh"
    UNMET_NEED = "UnmetNeed"
    GATE_PASSED = "GatePassed"
    GATE_FAILED = "GateFailed"
    BACKING_OFF = "BackingOff"
    COMPLETE = "LedgerComplete"
    FAILED = "BadConfiguration"
    TEMPLATE_REFUSED = "TemplateRefused"
    QUEUE_MISSING = "QueueMissing"
    NODES_SHARED = "NodesShared"
    SLURM_UNREACHABLE = "SlurmUnreachable"


def status_of(kind: KindNames, type_: str, reason: str) -> ConditionStatus:
    """The status that a reason stands for.   Raises ValueError for one outside the closed set."""
    types = CONDITIONS[kind.kind]
    if type_ not in types:
        raise ValueError(f"{kind.kind} has no condition {type_}; known are {', '.join(types)}")
    if reason == NOT_SEEN:
        return UNKNOWN
    if reason not in types[type_]:
        raise ValueError(f"{kind.kind} {type_} has no reason {reason}; known are {', '.join(types[type_])}")
    return types[type_][reason]


def set_condition(
    kind: KindNames,
    conditions: Iterable[Condition],
    type_: str,
    reason: str,
    message: str = "",
    *,
    now: datetime,
    generation: int,
) -> tuple[Condition, ...]:
    """The conditions with one of them set; its transition time moves only when its status changes."""
    listed = tuple(conditions)
    status = status_of(kind, type_, reason)
    before = next((one for one in listed if one.type == type_), None)
    since = before.last_transition_time if before is not None and before.status == status else now
    after = Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=since,
        observed_generation=generation,
    )
    if before is None:
        return (*listed, after)
    return tuple(after if one is before else one for one in listed)


def complete(
    kind: KindNames, conditions: Iterable[Condition], *, now: datetime, generation: int
) -> tuple[Condition, ...]:
    """Every condition of the kind, in the order of the closed set; those that nobody has set are Unknown."""
    known = {one.type: one for one in conditions}
    for type_ in CONDITIONS[kind.kind]:
        if type_ not in known:
            [known[type_]] = set_condition(kind, (), type_, NOT_SEEN, now=now, generation=generation)
    return tuple(known[type_] for type_ in CONDITIONS[kind.kind])
