"""Status of CleaningJobs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from slackwater_operator.cluster.kube.endings import HELD, STOPPED
from slackwater_operator.cluster.kube.ports import JobProgress, JobView
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.statuses.conditions import Emit, conditions, counted, lacking
from slackwater_operator.operate.statuses.obstacles import Obstacle
from slackwater_operator.operate.statuses.room import Room, shortage
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.names import CLEANING_JOB, LABEL_KIND, LABEL_OWNER, POD_CLEANING

SLOW = ("items", "gpuSeconds", "lastDurableTime")
RUNS = ("Accepted", "QueueMissing")
SILENT_S = 30.0  # a keeper that said nothing for so long


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one job now.

    missing_pools, missing_flavors: what it names and nobody has.   queues: those of its pools.
    has_keeper: one was found, or is somebody else's.   room: the GPUs that it may have.
    stuck, keeper: what keeps a worker or its keeper from starting, None = nothing.
    """

    view: JobView | None
    progress: JobProgress | None
    missing_pools: Sequence[str]
    missing_flavors: Sequence[str]
    queues: Collection[str]
    has_keeper: bool
    now_s: float
    room: Room = field(default_factory=Room)
    stuck: Obstacle | None = None
    keeper: Obstacle | None = None
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
        status |= {"lost": view.lost, "unverified": view.unverified, "gpuSeconds": float(round(view.gpu_seconds))}
        if view.durable_wall_s is not None:
            status["lastDurableTime"] = datetime.fromtimestamp(view.durable_wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    accepted = _accepted(job, seen)
    is_refused = accepted[0] not in RUNS and not running + starting
    reasons = {
        "Progressing": ("NotAccepted", accepted[1]) if is_refused else _progressing(job, seen, slurm),
        "Accepted": accepted,
        "Complete": _complete(view, progress),
        "Failed": _failed(job, view),
        "LedgerReadable": _ledger(job, seen),
        "WorkDurable": _durable(job, view),
    }
    return status | {"conditions": conditions(CLEANING_JOB, obj, reasons, now, emit)}


def _accepted(job: CleaningJob, seen: Seen) -> tuple[str, str]:
    if len(seen.missing_pools) == len(job.spec.pools):
        return "PoolMissing", f"there is no CapacityPool {', '.join(seen.missing_pools)}"
    if len(seen.missing_flavors) == len(job.spec.flavors):
        return "FlavorMissing", f"none of its pools has {', '.join(seen.missing_flavors)}"
    if view_refused := seen.view.refused if seen.view else "":
        return "TemplateRefused", view_refused
    if seen.trouble:
        return "TemplateRefused", seen.trouble
    if job.spec.queue is not None and job.spec.queue not in seen.queues:
        words = "it runs with weight 1, as a job without a queue does; add the queue to a pool or take out spec.queue"
        return "QueueMissing", f"none of its pools has a queue {job.spec.queue}: {words}"
    return "Accepted", lacking(seen.missing_pools, seen.missing_flavors)


def on_slurm(obj: Object) -> tuple[int, str]:
    """(workers that run on Slurm, what the controller there says); it writes its part of the status itself."""
    slurm = (obj.get("status") or {}).get("slurm") or {}
    said = str(slurm.get("message") or "")
    return int(slurm.get("running") or 0), said or f"on Slurm cluster {slurm.get('cluster') or '?'}"


def _progressing(job: CleaningJob, seen: Seen, slurm: tuple[int, str]) -> tuple[str, str]:
    view, spec = seen.view, job.spec
    running, starting = (view.running, view.starting) if view is not None else (0, 0)
    is_complete = view is not None and view.is_complete
    over = "every item is settled" if is_complete else view.failure if view is not None else ""
    if spec.suspend and not is_complete:
        return "Suspended", "spec.suspend is true; set it to false to let it go on"
    if over and (running or slurm[0]):  # whoever works has not ended
        return "WorkersRunning", f"{counted(running + slurm[0], 'worker')} at work; no other is started: {over}"
    if over:
        return ("Held" if over == HELD else "Ended"), over
    here = spec.max_workers - slurm[0]
    wants_more = "Kubernetes" in spec.placement and running + starting < here
    if running:
        why = f"{running} of {here} run: {_why_none(job, seen, running + starting)[1]}" if wants_more else ""
        return "WorkersRunning", _with(_stuck(seen), why)
    if slurm[0]:
        return "WorkersRunning", slurm[1]
    if starting:
        stuck = seen.stuck is not None and seen.stuck.is_sure
        return ("WorkersStuck" if stuck else "WorkersStarting"), _stuck(seen)
    if "Kubernetes" not in spec.placement:
        return "NoIdleGPUs", f"it runs on Slurm alone: {slurm[1]}"
    return _why_none(job, seen, 0)


def _why_none(job: CleaningJob, seen: Seen, workers: int) -> tuple[str, str]:
    """Why there are no more than so many workers, though some of maxWorkers are missing."""
    view, progress = seen.view, seen.progress
    if not job.spec.max_workers:
        namespace, name = job.metadata.namespace, job.metadata.name
        how = f"kubectl -n {namespace} scale clj/{name} --replicas=N lets it start"
        return "NoWorkersWanted", f"spec.maxWorkers is 0; {how}"
    if view is not None and view.refusal:
        return "BackingOff", view.refusal
    if progress is not None and progress.shards_open is not None and progress.shards_open <= workers:
        return "NoWork", "every open item is claimed"
    return shortage(job, seen.room, workers)


def _stuck(seen: Seen) -> str:
    """What keeps workers that hold GPUs from starting."""
    if seen.stuck is None:
        return ""
    count = seen.stuck.pods
    how = "cannot start" if seen.stuck.is_sure else f"{'has' if count == 1 else 'have'} not started yet"
    return f"{counted(count, 'worker')} that {'holds' if count == 1 else 'hold'} GPUs {how}: {seen.stuck.words}"


def _with(*said: str) -> str:
    return "; ".join(one for one in said if one)


def _failed(job: CleaningJob, view: JobView | None) -> tuple[str, str]:
    match view.failure if view is not None else "":
        case "":
            return "NotFailed", ""
        case failure if failure == HELD:
            return ("NotFailed", "") if job.spec.suspend else ("Held", failure)
        case failure if failure == STOPPED:
            return "Stopped", failure
        case failure:
            return "BadConfiguration", failure


def _complete(view: JobView | None, progress: JobProgress | None) -> tuple[str, str]:
    if view is not None and view.is_complete:
        if progress is None:
            return "WorkersDone", "a worker ended with 0: there was nothing left to do"
        quarantined = progress.items_quarantined or 0
        aside = f", {quarantined} of them quarantined" if quarantined else ""
        return "LedgerComplete", f"every item is settled{aside}"
    left = progress.items_open if progress is not None and progress.items_open is not None else None
    return "ItemsOpen", "" if left is None else "items are left"


def _ledger(job: CleaningJob, seen: Seen) -> tuple[str, str]:
    if job.spec.ledger is None and job.spec.keeper.url is None:
        return "NoLedger", "the job has no ledger, so nothing can be read back"
    claim = f" (claim {job.spec.ledger.claim_name})" if job.spec.ledger is not None else ""
    stuck = f"its keeper{claim} does not start: {seen.keeper.words}" if seen.keeper is not None else ""
    if seen.progress is None:
        if seen.has_keeper:
            return "KeeperUnreachable", stuck or "its keeper has not answered yet"
        return "KeeperStarting", seen.trouble or stuck or f"its keeper{claim} is not up yet"
    if seen.now_s - seen.progress.seen_s > SILENT_S:
        silent = "its keeper does not answer; workers go on, and no preemption can be verified"
        return "KeeperUnreachable", _with(silent, stuck)
    return "LedgerReadable", ""


def _durable(job: CleaningJob, view: JobView | None) -> tuple[str, str]:
    if job.spec.checkpoint.verify == "None":
        return "NotVerified", "checkpoint.verify is None"
    if view is not None and view.lost:
        whose = "a worker" if view.lost == 1 else f"{view.lost} workers"
        return "WorkLost", f"the ledger does not hold the newest durable record of {whose}"
    if view is not None and view.unverified:
        return "NotVerified", f"nobody could look for the newest durable record of {counted(view.unverified, 'worker')}"
    if view is None or view.durable_wall_s is None:
        return "NotVerified", "no worker has been taken back yet"
    return "AllVerified", ""
