"""What `slackwater get`, `explain` and `what-if` print: documents of JSON values, and the same as text for a terminal.

Pure.  Owns the words and the columns; `sight` brings what is shown.  80 columns are enough.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slackwater_operator.core import Kind, Phase, Snapshot
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.dryrun import Forecast
from slackwater_operator.resources.names import split_policy_flavor

TOPICS = ("pools", "jobs", "services", "reclaims")
COUNTS = ("total", "inference", "training", "cleaning", "releasing", "idle", "broken")
RECENT = 20  # reclaims that are shown
Document = dict[str, Any]


# --- documents ------------------------------------------------------------------------------------


def holders(snapshot: Snapshot) -> list[Document]:
    """Who holds the GPUs of each node."""
    on_node: dict[str, list[Document]] = {}
    for workload in sorted(snapshot.workloads, key=lambda one: one.uid):
        if workload.phase is not Phase.PENDING:
            on_node.setdefault(workload.node, []).append(
                {
                    "pod": workload.uid,
                    "kind": str(workload.kind),
                    "owner": workload.owner,
                    "phase": str(workload.phase),
                    "gpus": workload.gpus,
                }
            )
    found = []
    for node in sorted(snapshot.nodes, key=lambda one: (one.flavor, one.name)):
        pool, flavor = split_policy_flavor(node.flavor)
        found.append(
            {
                "node": node.name,
                "pool": pool,
                "flavor": flavor,
                "gpus": node.gpus,
                "broken": node.broken_gpus,
                "idle": len(node.idle_since_s),
                "schedulable": node.schedulable,
                "holders": on_node.get(node.name, []),
            }
        )
    return found


def pools_document(pools: Iterable[Object], snapshot: Snapshot) -> Document:
    """`get pools`."""
    return {"pools": [_named(pool) for pool in pools], "nodes": holders(snapshot)}


def list_document(topic: str, objects: Iterable[Object]) -> Document:
    """`get jobs`, `get services`; `get reclaims`, the newest first."""
    listed = [_named(obj) for obj in objects]
    if topic == "reclaims":
        listed.sort(key=lambda one: str(one["created"]), reverse=True)
        listed = listed[:RECENT]
    return {topic: listed}


def explain_document(obj: Object, events: Sequence[Object], unseen: str = "") -> Document:
    """`explain`: an object's status, and what was said of it, the newest last.   unseen: why nobody could read that."""
    said = [
        {
            "time": (event.get("series") or {}).get("lastObservedTime") or event.get("eventTime"),
            "type": event.get("type"),
            "reason": event.get("reason"),
            "message": event.get("note", ""),
            "count": (event.get("series") or {}).get("count", 1),
        }
        for event in events
    ]
    said.sort(key=lambda one: str(one["time"]))
    return {"kind": obj.get("kind", ""), **_named(obj), "events": said, "eventsUnseen": unseen}


def what_if_document(forecast: Forecast, multiplier: float) -> Document:
    """`what-if`."""
    return {
        "service": forecast.service,
        "multiplier": multiplier,
        "demandSlots": forecast.demand_slots,
        "demandIsAssumed": forecast.assumed,
        "replicas": {
            "have": forecast.have,
            "need": forecast.need,
            "onIdleGPUs": forecast.free,
            "unmet": forecast.unmet,
        },
        "lostSeconds": round(forecast.lost_s, 1),
        "workers": [
            {
                "pod": stop.uid,
                "job": stop.job,
                "node": stop.node,
                "flavor": stop.flavor,
                "gpus": stop.gpus,
                "withinSeconds": stop.within_s,
                "lostSeconds": round(stop.lost_s, 1),
            }
            for stop in forecast.stops
        ],
    }


# --- text -----------------------------------------------------------------------------------------


def pools_text(document: Document) -> str:
    """Usage of each pool and flavor, then every node."""
    usage = [
        [
            pool["name"],
            one["flavor"],
            *(one.get(name, 0) for name in COUNTS),
        ]
        for pool in document["pools"]
        for one in pool["status"].get("usage", ())
    ]
    titles = ("POOL", "FLAVOR", "GPUS", "INFERENCE", "TRAINING", "CLEANING", "RELEASING", "IDLE", "BROKEN")
    parts = [table(titles, usage)] if usage else [_no_usage([pool["name"] for pool in document["pools"]])]
    nodes = []
    for node in document["nodes"]:
        held = _held(node["holders"])
        held += [f"{node['idle']} idle"] if node["idle"] else []
        held += [f"{node['broken']} broken"] if node["broken"] else []
        held += [] if node["schedulable"] else ["cordoned"]
        nodes.append([node["node"], node["pool"], node["flavor"], node["gpus"], ", ".join(held)])
    if nodes:
        parts += ["", table(("NODE", "POOL", "FLAVOR", "GPUS", "HELD BY"), nodes)]
    return "\n".join(parts)


def jobs_text(document: Document) -> str:
    """Every cleaning job."""
    rows = []
    for job in document["jobs"]:
        status = job["status"]
        workers, items = status.get("workers", {}), status.get("items", {})
        done = f"{items['done']}/{items['total']}" if items.get("total") else "?"
        state = _state(status, ("Failed", "Complete", "Progressing"))
        here, slurm = workers.get("running", 0), (status.get("slurm") or {}).get("running", "-")
        rows.append([job["name"], here, slurm, workers.get("leaving", 0), done, status.get("lost", 0), state])
    head = ("JOB", "RUNNING", "SLURM", "LEAVING", "DONE", "LOST", "STATE")
    return table(head, rows) if rows else "no cleaning jobs"


def services_text(document: Document) -> str:
    """Every service."""
    rows = []
    for service in document["services"]:
        status = service["status"]
        rows.append(
            [
                service["name"],
                status.get("desiredReplicas", 0),
                status.get("replicas", 0),
                status.get("readyReplicas", 0),
                status.get("mode", "?"),
                status.get("leadTime", "?"),
                _state(status, ("Accepted", "NeedMet", "SignalsFresh", "Ready")),
            ]
        )
    titles = ("SERVICE", "WANTED", "THERE", "READY", "MODE", "LEAD", "STATE")
    return table(titles, rows) if rows else "no inference deployments"


def reclaims_text(document: Document) -> str:
    """The newest reclaims."""
    rows = []
    for reclaim in document["reclaims"]:
        spec, status = reclaim["spec"], reclaim["status"]
        outcomes = [victim.get("outcome", "?") for victim in status.get("victims", ())]
        what = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
        rows.append(
            [
                reclaim["name"],
                f"{spec['forRef']['kind']}/{spec['forRef']['name']}",
                spec.get("gpus", "?"),
                "dry run" if spec.get("dryRun") else spec.get("reason", "?"),
                status.get("phase", "?"),
                status.get("took", ""),
                what,
            ]
        )
    titles = ("RECLAIM", "FOR", "GPUS", "WHY", "PHASE", "TOOK", "WORKERS")
    return table(titles, rows) if rows else "no reclaims"


def explain_text(document: Document) -> str:
    """Conditions in words, then the newest decisions."""
    parts = [f"{document['kind']} {document['name']}", ""]
    conditions = document["status"].get("conditions") or ()
    rows = [[one["type"], one["status"], one["reason"], one.get("message", "")] for one in conditions]
    parts.append(table(("CONDITION", "", "REASON", ""), rows) if rows else "the operator has not looked at it yet")
    if document["events"]:
        events = [
            [_short(event["time"]), event["reason"], _times(event["count"]), event["message"]]
            for event in document["events"]
        ]
        parts += ["", table(("WHEN", "DECISION", "", ""), events)]
    elif document["eventsUnseen"]:
        parts += ["", f"what was decided about it is not shown: {document['eventsUnseen']}"]
    else:
        parts += ["", "nothing was decided about it lately"]
    return "\n".join(parts)


def what_if_text(document: Document) -> str:
    """The answer in words, then each worker."""
    replicas = document["replicas"]
    parts = [
        f"{document['service']} with {document['multiplier']:g} times the traffic of now asks for "
        f"{document['demandSlots']:g} decode slots.",
        f"It needs {replicas['need']} replicas and has {replicas['have']}: {replicas['onIdleGPUs']} start on idle "
        f"GPUs, {len(document['workers'])} cleaning workers stop for the rest.",
    ]
    if document["demandIsAssumed"]:
        parts.append("Its gateway could not be asked, so every replica was taken for full.")
    if replicas["unmet"]:
        parts.append(f"{replicas['unmet']} replicas could not be had at all.")
    if document["workers"]:
        rows = [
            [one["pod"], one["node"], one["gpus"], f"{one['withinSeconds']:g} s", f"{one['lostSeconds']:g} s"]
            for one in document["workers"]
        ]
        parts += ["", table(("WORKER THAT STOPS", "NODE", "GPUS", "WITHIN", "WORK REDONE"), rows)]
        parts.append(
            f"\nAll together {document['lostSeconds']:g} GPU-seconds are worked again; nothing durable is lost."
        )
    return "\n".join(parts)


TEXTS = {"pools": pools_text, "jobs": jobs_text, "services": services_text, "reclaims": reclaims_text}


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they need be, numbers to the right, the last one as long as it is."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [all(row[column].isdigit() for row in cells) and bool(cells) for column in range(len(titles))]
    widths = [max([len(titles[column]), *(len(row[column]) for row in cells)]) for column in range(len(titles))]
    lines = []
    for row in [list(titles), *cells]:
        placed = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(placed).rstrip())
    return "\n".join(lines)


def _named(obj: Object) -> Document:
    metadata = obj["metadata"]
    namespace = metadata.get("namespace")
    return {
        "name": f"{namespace}/{metadata['name']}" if namespace else metadata["name"],
        "created": metadata.get("creationTimestamp"),
        "spec": obj.get("spec", {}),
        "status": obj.get("status") or {},
    }


def _no_usage(pools: Sequence[str]) -> str:
    """Why there is nothing to show, and what to do."""
    if not pools:
        return "there is no CapacityPool; make one that says which nodes' GPUs are shared: kubectl explain cpool.spec"
    which = f"pool {pools[0]} has no GPUs yet" if len(pools) == 1 else "no pool has GPUs yet"
    return f"{which}; slackwater explain cpool/{pools[0]} says why"


def _held(holders: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each holder once, with how many of the kind there are."""
    counts = Counter(map(_holder, holders))
    return [f"{holder} x{count}" if count > 1 else holder for holder, count in counts.items()]


def _holder(holder: Mapping[str, Any]) -> str:
    name = holder["pod"] if holder["kind"] == Kind.INFERENCE else holder["owner"]
    gpus = f" ({holder['gpus']} GPUs)" if holder["gpus"] > 1 else ""
    phase = "" if holder["phase"] == Phase.RUNNING else f" {holder['phase']}"
    return f"{holder['kind']} {name}{phase}{gpus}"


def _state(status: Mapping[str, Any], order: Sequence[str]) -> str:
    """The reason that says most: the first of these conditions that is not as it should be, else the last."""
    good = {"Failed": "False", "Complete": "False"}
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    for type_ in order:
        one = conditions.get(type_)
        if one is not None and one["status"] != good.get(type_, "True"):
            return str(one["reason"])
    last = conditions.get(order[-1])
    return str(last["reason"]) if last else "?"


def _short(time: object) -> str:
    return str(time or "?").partition(".")[0].removesuffix("Z").replace("T", " ")


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""
