"""Status of InferenceDeployments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater_operator.cluster.kube.ports import ReplicaView, ServiceView
from slackwater_operator.core import Load, Phase
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.revisions import Choice, Gate
from slackwater_operator.operate.statuses.conditions import Emit, conditions, counted, lacking
from slackwater_operator.operate.statuses.obstacles import Obstacle
from slackwater_operator.resources.base import duration
from slackwater_operator.resources.inference import InferenceDeployment
from slackwater_operator.resources.names import INFERENCE_DEPLOYMENT, LABEL_KIND, LABEL_OWNER, POD_INFERENCE

SLOW = ("leadTime",)
PANIC_RATIO = 1.2  # of the short mean to the long one
ACTIVE = (Phase.STARTING, Phase.RUNNING)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one service now.

    missing: its pools that are not there, or have none of its flavors.   missing_flavors: those that none of its pools
    has.   has_gateway: one was found, or is somebody else's.
    late: a Reclaim for it that exceeded its deadline lately, "" = none.   releasing: GPUs are on their way to it.
    stuck, gateway, gate: what keeps a replica, a gateway or the gate's pod from starting, None = nothing.
    refused: what a kubelet said of a replica that it did not take, lately.
    """

    view: ServiceView | None
    load: Load | None
    desired: int
    choice: Choice | None
    missing: Sequence[str]
    missing_flavors: Sequence[str]
    has_gateway: bool
    late: str
    releasing: bool
    trouble: str = ""  # of a child that could not be made
    stuck: Obstacle | None = None
    gateway: Obstacle | None = None
    gate: Obstacle | None = None
    refused: str = ""


def service_status(
    obj: Object, service: InferenceDeployment | None, refused: str, seen: Seen, now: str, emit: Emit
) -> Object:
    """How a service stands.  service None: it was refused, for that reason."""
    status: Object = {"observedGeneration": obj["metadata"].get("generation") or 0}
    if service is None:
        reasons = {"Accepted": ("SpecRefused", refused), "Ready": ("NotAccepted", refused)}
        return status | {"conditions": conditions(INFERENCE_DEPLOYMENT, obj, reasons, now, emit)}
    replicas = seen.view.replicas if seen.view else ()
    ready = sum(replica.is_ready for replica in replicas)
    status |= {
        "replicas": len(replicas),
        "readyReplicas": ready,
        "desiredReplicas": seen.desired,
        "selector": f"{LABEL_KIND}={POD_INFERENCE},{LABEL_OWNER}={service.metadata.name}",
        "mode": mode(seen.load),
    }
    if seen.choice is not None and seen.choice.serving is not None:
        status["servingRevision"] = seen.choice.serving.name
    if seen.view is not None and seen.view.lead_s:
        status["leadTime"] = duration(round(seen.view.lead_s, 1))
    accepted = _accepted(service, seen)
    reasons = {
        "Accepted": accepted,
        "Ready": ("NotAccepted", accepted[1])
        if accepted[0] != "Accepted" and not ready
        else _ready(service, seen, ready),
        "SignalsFresh": _signals(seen),
        "NeedMet": _need(seen, replicas),
        "RevisionGated": _gate(seen.choice, seen.gate),
        "ReclaimsInTime": ("ReclaimDeadlineExceeded", seen.late) if seen.late else ("ReclaimsInTime", ""),
    }
    return status | {"conditions": conditions(INFERENCE_DEPLOYMENT, obj, reasons, now, emit)}


def mode(load: Load | None) -> str:
    """How the policy follows the traffic now."""
    if load is None or load.stale:
        return "Hold"
    return "Panic" if load.panic_slots > PANIC_RATIO * max(load.stable_slots, 1.0) else "Stable"


def _accepted(service: InferenceDeployment, seen: Seen) -> tuple[str, str]:
    if len(seen.missing) == len(service.spec.pools):
        return "PoolMissing", f"no CapacityPool {', '.join(seen.missing)} with one of its flavors is there"
    if seen.view is not None and seen.view.refused:
        return "TemplateRefused", seen.view.refused
    if seen.trouble:
        return "TemplateRefused", seen.trouble
    return "Accepted", lacking(seen.missing, seen.missing_flavors)


def _ready(service: InferenceDeployment, seen: Seen, ready: int) -> tuple[str, str]:
    replicas = seen.view.replicas if seen.view else ()
    stuck = _stuck(seen)
    if ready:
        serving = f"{ready} of {counted(len(replicas), 'replica')} {'serves' if ready == 1 else 'serve'}"
        serving += f"; {stuck}" if stuck else ""
        objective_s = service.spec.autoscaling.objective.ttfa_p95_s
        if objective_s is None:
            return "Serving", serving
        first_audio_s = seen.load.first_audio_p95_s if seen.load else None
        if first_audio_s is not None and first_audio_s > objective_s:
            said = f"first audio p95 is {first_audio_s:.2f} s, wanted are {objective_s:g} s"
            return "ObjectiveMissed", said
        return "ServingWithinObjective", serving
    if stuck and seen.stuck is not None and seen.stuck.is_sure:
        return "ReplicasStuck", stuck
    if replicas:
        starting = f"{counted(len(replicas), 'replica')} {'starts' if len(replicas) == 1 else 'start'}"
        return "ReplicasStarting", f"{starting}; {stuck}" if stuck else starting
    if seen.desired == 0:
        return "ScaledToZero", "no replica is wanted"
    why = (seen.view.refusal if seen.view else "") or seen.refused
    return "NoReplicas", why or f"{_wanted(seen.desired)}, none is there"


def _wanted(count: int) -> str:
    return f"{counted(count, 'replica')} {'is' if count == 1 else 'are'} wanted"


def _stuck(seen: Seen) -> str:
    """What keeps replicas that hold GPUs from starting."""
    if seen.stuck is None:
        return ""
    how = "cannot start" if seen.stuck.is_sure else "not started yet"
    return f"{seen.stuck.pods} {how}: {seen.stuck.words}"


def _signals(seen: Seen) -> tuple[str, str]:
    if seen.load is not None and not seen.load.stale:
        return "SignalsFresh", "the gateway says what is asked for"
    stuck = f"its gateway does not start: {seen.gateway.words}" if seen.gateway is not None else ""
    if not seen.has_gateway:
        return "GatewayStarting", seen.trouble or stuck or "no gateway is up yet"
    if seen.load is None or math.isinf(seen.load.age_s):
        return "SignalsStale", "the gateway has not answered yet; nothing shrinks, and only minReplicas are kept"
    # Without the age, which would be another message each second.
    return "SignalsStale", "the gateway does not answer; nothing shrinks, grows or is evicted for it"


def _need(seen: Seen, replicas: Sequence[ReplicaView]) -> tuple[str, str]:
    active = sum(replica.phase in ACTIVE for replica in replicas)
    stuck = seen.stuck.pods if seen.stuck is not None and seen.stuck.is_sure else 0
    if active - stuck >= seen.desired:
        return "NeedMet", ""
    if seen.releasing and not stuck:
        return "ReclaimUnderWay", f"{seen.desired - active} more are wanted, and GPUs are on their way"
    why = _stuck(seen) or (seen.view.refusal if seen.view else "") or seen.refused
    there = f"{_wanted(seen.desired)}, {active} {'is' if active == 1 else 'are'} there"
    return "UnmetNeed", f"{there}: {why}" if why else there


def _gate(choice: Choice | None, stuck: Obstacle | None) -> tuple[str, str]:
    if choice is None or choice.gate is Gate.NONE:
        return "NoGate", ""
    match choice.gate:
        case Gate.PASSED:
            return "GatePassed", f"revision {choice.current.name} serves"
        case Gate.FAILED:
            still = f"; {choice.serving.name} still serves" if choice.serving else ""
            return "GateFailed", f"revision {choice.current.name} did not pass: {choice.said}{still}"
    still = f"; {choice.serving.name} serves until then" if choice.serving else "; nothing serves until then"
    why = f"; its pod does not start: {stuck.words}" if stuck is not None else ""
    return "GateRunning", f"revision {choice.current.name} is at its gate{still}{why}"
