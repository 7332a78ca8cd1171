"""Idle GPUs to cleaning jobs.

Owns who gets a GPU that inference and training leave over, and whether the lease is worth a start.
Called by `planner` last, so that everything more important has taken its share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from slackwater_operator.core import CleaningJob, Condition, Kind, Phase, Reason, Verb, Workload
from slackwater_operator.policy.draft import Draft
from slackwater_operator.policy.serve import Serving


@dataclass(slots=True)
class Appetite:
    """A job while workers are handed out.

    room: workers that may still be added; the maximum and the open work allow no more.
    kept: by flavor, free GPUs that inference will want before a new worker has something durable.
    """

    job: CleaningJob
    workers: int
    room: int
    kept: dict[str, int]
    floor: int = 0  # workers added because of `min_workers`
    idle: int = 0  # workers added because GPUs were idle

    def share(self) -> tuple[float, str]:
        """GPUs held for each unit of weight; the job with the smallest is served next."""
        return (self.workers + self.floor + self.idle) * self.job.gpus / self.job.weight, self.job.uid


def lend(draft: Draft, services: Sequence[Serving]) -> None:
    """Start workers on idle GPUs: floors first, then by weight.

    A GPU is lent only if, going by the slope, inference will not want it before the worker has
    started and reached its first durable point.  A floor waits neither for that nor for `lend_after_s`.
    Nothing is lent on flavors of a service whose signals are stale.  One that was never heard and has no replica, as
    where the operator may not make its gateway, holds nobody up: no traffic reaches it.
    """
    unsure = [serving for serving in services if serving.service.load.stale and (serving.was_heard or serving.has_any)]
    stale = {variant.flavor for serving in unsure for variant in serving.service.variants}
    kept: dict[int, dict[str, int]] = {}  # by how long a worker takes until something is durable
    jobs = [_appetite(draft, job, services, kept) for job in sorted(draft.snapshot.jobs, key=lambda job: job.uid)]
    for wish in jobs:
        while wish.room and wish.workers + wish.floor < wish.job.min_workers and _place_floor(draft, wish.job, stale):
            wish.floor += 1
            wish.room -= 1
    hungry = [(wish.share(), wish) for wish in jobs if wish.room]  # a share ends in the uid, so no two are equal
    heapify(hungry)
    while hungry:
        wish = heappop(hungry)[1]
        if not _place_idle(draft, wish, stale):
            continue
        wish.idle += 1
        wish.room -= 1
        if wish.room:
            heappush(hungry, (wish.share(), wish))
    for wish in jobs:
        if wish.floor:
            draft.act(Verb.START, wish.job.uid, Reason.FLOOR, wish.floor)
        if wish.idle:
            draft.act(Verb.START, wish.job.uid, Reason.IDLE, wish.idle)
    left = any(draft.pool.rested[name] for name, node in draft.pool.nodes.items() if node.flavor not in stale)
    if left and not any(job.open_units for job in draft.snapshot.jobs):
        draft.conditions.add(Condition.NO_WORK)


def _appetite(
    draft: Draft, job: CleaningJob, services: Sequence[Serving], known: dict[int, dict[str, int]]
) -> Appetite:
    """What a job has and could take; workers that only begin have not claimed their unit yet."""
    pending, starting, workers = list[Workload](), 0, 0
    for worker in draft.owned(Kind.CLEANING, job.uid):
        phase = worker.phase
        starting += phase is Phase.STARTING
        if phase is Phase.PENDING:
            pending.append(worker)
            workers += 1
        elif (phase is Phase.RUNNING or phase is Phase.STARTING) and worker.uid not in draft.chosen:
            workers += 1
    unclaimed = job.open_units - len(pending) - starting
    for worker in pending:  # it goes to a GPU that is free now, or waits for one
        draft.pool.take_free(worker.flavor, worker.gpus)
        known.clear()  # less is free now
    until_s = math.ceil(job.start_s + job.checkpoint_s)  # hundreds of jobs, whose starts were measured, ask alike
    kept = known.get(until_s)
    if kept is None:
        kept = known[until_s] = {}
        for serving in services:
            for flavor, gpus in serving.expected_gpus(until_s).items():
                kept[flavor] = kept.get(flavor, 0) + gpus
    return Appetite(job, workers, max(0, min(job.max_workers - workers, unclaimed)), kept)


def _place_floor(draft: Draft, job: CleaningJob, stale: set[str]) -> bool:
    return any(flavor not in stale and draft.pool.take_free(flavor, job.gpus) for flavor in job.flavors)


def _place_idle(draft: Draft, wish: Appetite, stale: set[str]) -> bool:
    """Take GPUs for one worker where the free ones that remain outlast it."""
    pool, gpus = draft.pool, wish.job.gpus
    return any(
        flavor not in stale
        and pool.free_of_flavor.get(flavor, 0) - gpus >= wish.kept.get(flavor, 0)
        and pool.take_rested(flavor, gpus)
        for flavor in wish.job.flavors
    )
