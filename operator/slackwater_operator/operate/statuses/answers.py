"""Status of dry runs: the answer, and what is waited for until it can be given.

Owns how long a question waits.  A service and its gateway are often made together with the question, and an answer is
given once; so one that would have to be guessed waits for a while.  Called by `round` with each snapshot.
"""

from datetime import UTC, datetime

from slackwater_operator.core import Snapshot
from slackwater_operator.kube.types import Object, parse_stamp
from slackwater_operator.operate.dryrun import Forecast, forecast
from slackwater_operator.operate.statuses.conditions import Emit, Reasons, conditions
from slackwater_operator.resources.base import duration
from slackwater_operator.resources.conditions import NOT_SEEN
from slackwater_operator.resources.names import RECLAIM
from slackwater_operator.resources.reclaim import Reclaim

WAIT_S = 30.0  # from the question on; a gateway whose image is on its node answers within a few seconds
ANSWERED = "Answered"


def is_open(obj: Object) -> bool:
    """A dry run without its answer."""
    return bool(obj["spec"].get("dryRun")) and not (obj.get("status") or {}).get("phase")


def answer(obj: Object, reclaim: Reclaim, snapshot: Snapshot, now: str, emit: Emit) -> Object:
    """The status of a dry run, from the newest snapshot.   now: RFC 3339, by the server's clock."""
    service = f"{reclaim.metadata.namespace}/{reclaim.spec.for_ref.name}"
    multiplier = None if reclaim.spec.multiplier is None else float(reclaim.spec.multiplier)
    status: Object = {"observedGeneration": obj["metadata"].get("generation") or 0}
    until_s = parse_stamp(obj["metadata"]["creationTimestamp"]) + WAIT_S
    awaited = _awaited(snapshot, service)
    if awaited and parse_stamp(now) < until_s:
        latest = datetime.fromtimestamp(until_s, UTC).strftime("%H:%M:%S")
        waits = {"Answered": (NOT_SEEN, f"{awaited}; the answer waits for it until {latest} UTC at the latest")}
        return status | {"conditions": conditions(RECLAIM, obj, waits, now, emit)}
    try:
        found = forecast(snapshot, service, multiplier=multiplier, gpus=reclaim.spec.gpus)
    except ValueError as error:
        reasons = {"Answered": ("CannotAnswer", str(error))}
        return status | {"phase": "Failed", "conditions": conditions(RECLAIM, obj, reasons, now, emit)}
    return status | {
        "phase": ANSWERED,
        "answer": found.answer().dump(),
        "lostSeconds": round(found.lost_s, 3),
        "timings": {"decidedAt": now},
        "conditions": conditions(RECLAIM, obj, _reasons(found), now, emit),
    }


def _awaited(snapshot: Snapshot, service: str) -> str:
    """What is not known yet and may soon be, "" = nothing."""
    asked = next((one for one in snapshot.services if one.name == service), None)
    if asked is None:
        return f"there is no service {service} yet"
    return f"the gateway of {service} has not said how much traffic there is" if asked.load.stale else ""


def _reasons(found: Forecast) -> Reasons:
    said = (
        f"{found.demand_slots:g} slots are asked for; {found.need} replicas are needed, {found.have} are there, "
        f"{found.free} start on idle GPUs, {len(found.stops)} workers stop"
    )
    if found.assumed:
        said += f"; no traffic was known within {WAIT_S:g} s, so every replica was taken for full"
    if not found.stops:
        nobody = "a dry run, and no worker would have to leave"
        return {"Answered": ("Answered", said), "InTime": (NOT_SEEN, nobody), "Lossless": ("NotVerified", nobody)}
    slowest = duration(max(stop.within_s for stop in found.stops))
    return {
        "Answered": ("Answered", said),
        "InTime": (NOT_SEEN, f"a dry run: nobody was asked to leave; the slowest worker would be gone in {slowest}"),
        "Lossless": (
            "NotVerified",
            f"a dry run: nobody was asked to leave; {found.lost_s:g} GPU-seconds would be worked again, "
            "and what is durable stays",
        ),
    }
