"""What happened to our workers between two looks at a cluster.

Owns the comparison: requeues and their cause, returns, ends, and how long training waited for GPUs that
it took from us.  Pure.  Called by `cluster`; its results feed the metrics and the failure brake.

Slurm tells moments in whole seconds, and a look comes every few: a wait is good to a second, a return to
a second and the time between looks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slackwater_slurm.core import Job, NodeState
from slackwater_slurm.observation import Array, Observation, Task, is_marked

EARLY_S = 120.0  # a worker that ends sooner than this, with work left, did not get to work
TAKEN_S = 60.0  # training starts at the latest a KillWait after our workers were told to go


class Cause(StrEnum):
    """Why a worker went back to the queue."""

    PREEMPTED = "preempted"  # Slurm gave its GPU to training
    YIELDED = "yielded"  # we sent it away: a drain, a maintenance, a lowered maximum
    NODE = "node"  # its node went down


@dataclass(frozen=True, slots=True)
class Changes:
    """requeues: (job, cause) to workers.   returned_s: seconds from a requeue seen until it ran again.
    ended: job to workers that are over for good; ended_early: those that lived less than EARLY_S.
    training_waited_s: submit to start, of other people's jobs that took GPUs from us.
    """

    requeues: tuple[tuple[tuple[str, Cause], int], ...] = ()
    returned_s: tuple[float, ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    ended_early: tuple[tuple[str, int], ...] = ()
    training_waited_s: tuple[float, ...] = ()


@dataclass(slots=True)
class ChangeLog:
    """Compares each look with the one before; the first has nothing to be compared with.

    What we do ourselves is told: `send_away` for tasks, `forget` for arrays that we cancel.
    """

    _last: Observation | None = None
    _restarts: dict[str, int] = field(default_factory=dict)  # ref -> restarts
    _displaced_s: dict[str, float] = field(default_factory=dict)  # ref -> when it was seen sent back
    _taken_s: dict[str, float] = field(default_factory=dict)  # node -> when workers were seen preempted there
    _others: set[int] = field(default_factory=set)  # other people's jobs that held GPUs
    _sent_away: set[str] = field(default_factory=set)
    _cancelled: set[int] = field(default_factory=set)

    def send_away(self, refs: Sequence[str]) -> None:
        """These tasks go back to the queue by our will."""
        self._sent_away.update(refs)

    def forget(self, array_id: int) -> None:
        """The tasks of this array do not end by themselves."""
        self._cancelled.add(array_id)

    def compare(self, seen: Observation, jobs: Sequence[Job]) -> Changes:
        """Changes since the last look."""
        restarts = {ref: count for array in seen.arrays for ref, count in array.restarts_of}
        holding = _holding(seen)
        changes = Changes()
        if self._last is not None:
            held = _holding(self._last)
            rose = {ref for ref, count in restarts.items() if count > self._restarts.get(ref, 0)}
            back = sorted(ref for ref in self._displaced_s if ref in holding)
            ended, early = self._ends(self._last, seen)
            self._taken_s |= {held[ref].node: seen.now_s for ref in rose - self._sent_away if ref in held}
            changes = Changes(
                requeues=self._requeues(seen, held, rose),
                returned_s=tuple(max(0.0, holding[ref].start_s - self._displaced_s[ref]) for ref in back),
                ended=tuple(sorted(ended.items())),
                ended_early=tuple(sorted(early.items())),
                training_waited_s=self._waits(jobs, seen.now_s),
            )
            self._displaced_s |= dict.fromkeys((ref for ref in rose if ref not in holding), seen.now_s)
            self._sent_away -= rose
        self._displaced_s = {ref: t for ref, t in self._displaced_s.items() if ref in restarts and ref not in holding}
        self._others = {job.job_id for job in jobs if job.holds_gpus and not is_marked(job)}
        self._restarts, self._last = restarts, seen
        return changes

    def _waits(self, jobs: Sequence[Job], now_s: float) -> tuple[float, ...]:
        """Of other people's jobs that began since the last look on nodes where we lost workers."""
        self._taken_s = {node: t for node, t in self._taken_s.items() if now_s - t <= TAKEN_S}
        return tuple(
            max(0.0, job.start_s - job.submit_s)
            for job in jobs
            if job.holds_gpus
            and not is_marked(job)
            and job.job_id not in self._others
            and job.start_s is not None
            and job.submit_s is not None
            and job.restarts == 0  # else its submission was long ago
            and self._taken_s.keys() & set(job.nodes)
        )

    def _requeues(
        self, seen: Observation, held: dict[str, Task], rose: set[str]
    ) -> tuple[tuple[tuple[str, Cause], int], ...]:
        down = {node.name for node in seen.nodes if node.state is NodeState.DOWN or not node.responding}
        jobs = {ref: array.job for array in seen.arrays for ref, _ in array.restarts_of}
        causes: Counter[tuple[str, Cause]] = Counter()
        for ref in rose:
            cause = Cause.PREEMPTED
            if ref in self._sent_away:
                cause = Cause.YIELDED
            elif ref in held and held[ref].node in down:
                cause = Cause.NODE
            causes[jobs[ref], cause] += 1
        return tuple(sorted(causes.items()))

    def _ends(self, last: Observation, seen: Observation) -> tuple[Counter[str], Counter[str]]:
        """Also those that began and ended between the two looks: an array only ever gets smaller."""
        now = {array.array_id: array for array in seen.arrays}
        ended: Counter[str] = Counter()
        early: Counter[str] = Counter()
        for array in last.arrays:
            left = now.get(array.array_id)
            if left is None and array.array_id in self._cancelled:
                continue
            gone = array.live - (left.live if left else 0)
            long = _long_lived(array, left, seen.now_s)
            if gone > 0:
                ended[array.job] += gone
                early[array.job] += max(0, gone - long)
        return +ended, +early


def _holding(seen: Observation) -> dict[str, Task]:
    return {task.ref: task for array in seen.arrays for task in array.tasks}


def _long_lived(array: Array, left: Array | None, now_s: float) -> int:
    """Workers of the last look that are over now and had worked for a while."""
    still = {task.ref for task in left.tasks} | {ref for ref, _ in left.restarts_of} if left else set()
    return sum(task.ref not in still and now_s - task.start_s >= EARLY_S for task in array.tasks)
