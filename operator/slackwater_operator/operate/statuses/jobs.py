"""Status of CleaningJobs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from slackwater_operator.cluster.kube.ports import JobProgress, JobView
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.statuses.conditions import Emit, conditions
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.names import CLEANING_JOB, LABEL_KIND, LABEL_OWNER, POD_CLEANING

SLOW = ("items", "gpuSeconds", "lastDurableTime")
SILENT_S = 30.0  # a keeper that said nothing for so long


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one job now.

    missing_pools, missing_flavors: what it names and nobody has.   queues: those of its pools.
    has_keeper: one was found, or is somebody else's.   unheard: services on its flavors whose signals are stale.
    """

    view: JobView | None
    progress: JobProgress | None
    missing_pools: Sequence[str]
    missing_flavors: Sequence[str]
    queues: Collection[str]
    has_keeper: bool
    now_s: float
    unheard: Sequence[str] = ()
    trouble: str = ""  # of a child that could not be made


def job_status(obj: Object, job: CleaningJob | None, refused: str, seen: Seen, now: str, emit: Emit) -> Object:
    """How far a job is.  job None: it was refused, for that reason."""
    status: Object = {"observedGeneration": obj["metadata"].get("generation") or 0}
    if job is None:
        reasons = {"Accepted": ("SpecRefused", refused), "Progressing": ("NotAccepted", refused)}
        return status | {"conditions": conditions(CLEANING_JOB, obj, reasons, now, emit)}
    view, progress = seen.view, seen.progress
    running, starting, leaving = (view.running, view.starting, view.leaving) if view else (0, 0, 0)
    is_over = view is not None and (view.is_complete or bool(view.failure))
    slurm = on_slurm(obj)
    wanted = 0 if job.spec.suspend or is_over else job.spec.max_workers - slurm[0]
    status |= {
        "workers": {
            "running": running,
            "starting": starting,
            "leaving": leaving,
            "pending": max(0, wanted - running - starting),
        },
        "replicas": running + starting + leaving,
        "selector": f"{LABEL_KIND}={POD_CLEANING},{LABEL_OWNER}={job.metadata.name}",
    }
    if progress is not None and progress.items_total is not None:
        status["items"] = {
            "total": progress.items_total,
            "done": progress.items_done or 0,
            "quarantined": progress.items_quarantined or 0,
            "open": progress.items_open or 0,
        }
    if view is not None:
        status |= {"lost": view.lost, "gpuSeconds": float(round(view.gpu_seconds))}
        if view.durable_wall_s is not None:
            status["lastDurableTime"] = datetime.fromtimestamp(view.durable_wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    accepted = _accepted(job, seen)
    is_refused = accepted[0] != "Accepted" and not running + starting
    reasons = {
        "Progressing": ("NotAccepted", accepted[1]) if is_refused else _progressing(job, seen, slurm),
        "Accepted": accepted,
        "Complete": _complete(view, progress),
        "Failed": ("BadConfiguration", view.failure) if view and view.failure else ("NotFailed", ""),
        "LedgerReadable": _ledger(job, seen),
        "WorkDurable": _durable(job, view),
    }
    return status | {"conditions": conditions(CLEANING_JOB, obj, reasons, now, emit)}


def _accepted(job: CleaningJob, seen: Seen) -> tuple[str, str]:
    if len(seen.missing_pools) == len(job.spec.pools):
        return "PoolMissing", f"there is no CapacityPool {', '.join(seen.missing_pools)}"
    if len(seen.missing_flavors) == len(job.spec.flavors):
        return "FlavorMissing", f"none of its pools has {', '.join(seen.missing_flavors)}"
    if job.spec.queue is not None and job.spec.queue not in seen.queues:
        return "QueueMissing", f"none of its pools has a queue {job.spec.queue}"
    if view_refused := seen.view.refused if seen.view else "":
        return "TemplateRefused", view_refused
    return ("TemplateRefused", seen.trouble) if seen.trouble else ("Accepted", "")


def on_slurm(obj: Object) -> tuple[int, str]:
    """(workers that run on Slurm, what the controller there says); it writes its part of the status itself."""
    slurm = (obj.get("status") or {}).get("slurm") or {}
    said = str(slurm.get("message") or "")
    return int(slurm.get("running") or 0), said or f"on Slurm cluster {slurm.get('cluster') or '?'}"


def _progressing(job: CleaningJob, seen: Seen, slurm: tuple[int, str]) -> tuple[str, str]:
    view = seen.view
    if view is not None and view.is_complete:
        return "Ended", "every item is settled"
    if view is not None and view.failure:
        return "Ended", view.failure
    if job.spec.suspend:
        return "Suspended", "spec.suspend is true"
    if view is not None and view.running:
        return "WorkersRunning", ""
    if slurm[0]:
        return "WorkersRunning", slurm[1]
    if view is not None and view.starting:
        return "WorkersStarting", ""
    if "Kubernetes" not in job.spec.placement:
        return "NoIdleGPUs", f"it runs on Slurm alone: {slurm[1]}"
    if view is not None and view.refusal:
        return "BackingOff", view.refusal
    if seen.progress is not None and seen.progress.shards_open == 0:
        return "NoWork", "every open item is claimed"
    if seen.unheard:
        held = f"none is lent where {', '.join(seen.unheard)} may run, whose gateway is not heard"
        return "NoIdleGPUs", f"no other GPU of its flavors is idle; {held}"
    return "NoIdleGPUs", "no GPU of its flavors has been idle long enough"


def _complete(view: JobView | None, progress: JobProgress | None) -> tuple[str, str]:
    if view is not None and view.is_complete:
        return ("LedgerComplete", "") if progress is not None else ("WorkersDone", "")
    left = progress.items_open if progress is not None and progress.items_open is not None else None
    return "ItemsOpen", "" if left is None else "items are left"


def _ledger(job: CleaningJob, seen: Seen) -> tuple[str, str]:
    if job.spec.ledger is None and job.spec.keeper.url is None:
        return "NoLedger", "the job has no ledger, so nothing can be read back"
    if seen.progress is None:
        if seen.has_keeper:
            return "KeeperUnreachable", "its keeper has not answered yet"
        return "KeeperStarting", seen.trouble or "its keeper is not up yet"
    if seen.now_s - seen.progress.seen_s > SILENT_S:
        return "KeeperUnreachable", "its keeper does not answer; workers go on, and no preemption can be verified"
    return "LedgerReadable", ""


def _durable(job: CleaningJob, view: JobView | None) -> tuple[str, str]:
    if job.spec.checkpoint.verify == "None":
        return "NotVerified", "checkpoint.verify is None"
    if view is not None and view.lost:
        return "WorkLost", f"{view.lost} workers left with work that the ledger does not hold"
    if view is None or view.durable_wall_s is None:
        return "NotVerified", "no worker has been taken back yet"
    return "AllVerified", ""
