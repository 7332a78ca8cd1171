"""SlurmCluster: looks at a cluster through a client, lets `fleet` decide, and carries the decision out.

Owns no decision and no loop (`service`).  Keeps nothing that matters: after a restart it finds its arrays by
their mark and goes on.  Blocks for as long as the client's commands do.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slackwater_operator.core import PermanentError
from slackwater_slurm import fleet, workers
from slackwater_slurm.changes import ChangeLog, Changes
from slackwater_slurm.client.base import SlurmClient
from slackwater_slurm.config import CleaningJob
from slackwater_slurm.core import Partition, SlurmRefused
from slackwater_slurm.fleet import Action, Cancel, Hold, Release, Requeue, Resume, SetThrottle, Submit, Wish
from slackwater_slurm.observation import Observation, Scope, observe

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 15.0, 600.0  # of a submission that Slurm refused: a quota may be free later
MEND_EVERY_S = 30.0  # a node that refuses again, or a user who may not resume nodes, is not asked at every look
MAX_ARRAY_SIZE = 1001  # Slurm's default


@dataclass(frozen=True, slots=True)
class Tick:
    """What one tick saw and did.  refused: job to Slurm's words about its newest submission."""

    seen: Observation
    changes: Changes
    actions: tuple[Action, ...]
    refused: Mapping[str, str]


@dataclass(slots=True)
class _Refusal:
    message: str
    delay_s: float
    retry_s: float


class SlurmCluster:
    """The arrays of `jobs` in one partition.  `open_jobs` of a tick says which of them have work.

    fence: called before each change; what it raises is raised by the change, which is not made then.
    """

    def __init__(
        self,
        client: SlurmClient,
        *,
        user: str,
        partition: str,
        jobs: Sequence[CleaningJob],
        maintenance_lead_s: float,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._fence = fence
        self._user = user
        self._partition = partition
        self._maintenance_lead_s = maintenance_lead_s
        self._gpus: Counter[str] = Counter()  # of the partition, by type
        self.use(jobs)
        self._max_array = MAX_ARRAY_SIZE
        self._log = ChangeLog()
        self._refusals: dict[str, _Refusal] = {}
        self._mended_s: dict[Release | Resume, float] = {}
        self.name = ""
        self.is_connected = False

    def use(self, jobs: Sequence[CleaningJob]) -> None:
        """These jobs from now on."""
        limits = [job.time_limit_s for job in jobs]
        longest_s = None if None in limits else max((limit for limit in limits if limit is not None), default=None)
        self._scope = Scope(self._user, self._partition, longest_s, self._maintenance_lead_s)
        self._jobs = {job.name: job for job in jobs}

    def connect(self) -> None:
        """Read what stays the same, and refuse what could not work or would stand in training's way.

        Raises SlurmUnavailable when Slurm does not answer, PermanentError with one line for the person.
        """
        settings = self._client.config()
        self.name = settings.get("ClusterName", "")
        self._max_array = _number(settings.get("MaxArraySize", ""), MAX_ARRAY_SIZE)
        partitions = self._client.partitions()
        partition = next((one for one in partitions if one.name == self._partition), None)
        if partition is None:
            there_are = ", ".join(one.name for one in partitions) or "none"
            raise PermanentError(
                f"partition {self._partition!r} is not on cluster {self.name!r}; there are: {there_are}"
            )
        self._gpus = Counter()
        for node in self._client.nodes():
            if partition.name in node.partitions:
                self._gpus.update(dict(node.gpus.by_type))
        if not self._gpus:
            raise PermanentError(f"no node of partition {partition.name!r} has GPUs; does gres.conf name them?")
        if problem := next(filter(None, map(self.unfit, self._jobs.values())), ""):
            raise PermanentError(problem)
        _check_preemption(partition, partitions)
        self.is_connected = True

    def unfit(self, job: CleaningJob) -> str:
        """Why a job could never run here, in one line; "" if it can.  Call it when connected."""
        has = ", ".join(f"{gpu_type or 'gpu'}:{count}" for gpu_type, count in sorted(self._gpus.items()))
        for gpu_type in job.gpu_types:
            if gpu_type not in self._gpus:
                where = f"no node of partition {self._partition!r}"
                return f"job {job.name}: {where} has GPUs of type {gpu_type!r}; it has {has}"
        return ""

    def look(self, now_s: float) -> Observation:
        """The cluster as it is.  now_s: seconds since the epoch.  Raises SlurmUnavailable or OutputCut."""
        return self._look(now_s)[0]

    def _look(self, now_s: float) -> tuple[Observation, Changes]:
        jobs = self._client.jobs(detail=True)
        seen = observe(
            self._client.nodes(), jobs, self._client.reservations(), self._client.partitions(), self._scope, now_s
        )
        return seen, self._log.compare(seen, jobs)

    def tick(self, now_s: float, open_jobs: Mapping[str, bool]) -> Tick:
        """Look, plan, apply.

        open_jobs: job to whether it has open work; a job that is missing is not known yet and left alone.
        Raises SlurmUnavailable or OutputCut when Slurm cannot be asked; what was done by then is seen by the next
        look.
        """
        seen, changes = self._look(now_s)
        wishes = [self.wish(name, is_open=is_open) for name, is_open in open_jobs.items() if name in self._jobs]
        done = []
        for action in fleet.plan(seen, wishes):
            if self._is_backing_off(action, now_s):
                continue
            try:
                self.apply(action)
            except SlurmRefused as error:
                self._note_refusal(action, str(error), now_s)
            else:
                logger.info("%s", describe(action))
                done.append(action)
        return Tick(seen, changes, tuple(done), {job: refusal.message for job, refusal in self._refusals.items()})

    def wish(self, name: str, *, is_open: bool) -> Wish:
        """What a job of ours wants, within the cluster's limits."""
        job = self._jobs[name]
        return Wish(
            job=name,
            min_workers=job.min_workers,
            max_workers=job.max_workers,
            gpu_types=job.gpu_types,
            array_tasks=min(job.array_tasks, self._max_array),
            is_open=is_open,
        )

    def apply(self, action: Action) -> None:
        """Carry out one action; its effect shows in a later look.  Raises what the fence and the client raise."""
        self._fence()
        match action:
            case SetThrottle(array_id, max_running):
                self._client.set_throttle(array_id, max_running)
            case Hold(array_id):
                self._client.hold([str(array_id)])
            case Cancel(array_id):
                self._client.cancel([str(array_id)])
                self._log.forget(array_id)
            case Requeue(refs):
                self._client.requeue(refs)
                self._log.send_away(refs)
            case Release(refs):
                self._client.release(refs)
            case Resume(node):
                self._client.resume([node])
            case Submit(job, gpu_type, num_tasks, max_running):
                spec = self._jobs[job]
                self._client.submit(workers.submission(spec, self._partition, gpu_type, num_tasks, max_running))
                self._refusals.pop(job, None)

    def _is_backing_off(self, action: Action, now_s: float) -> bool:
        """Refused submissions wait; so does mending anew what the last mending did not help."""
        if isinstance(action, Release | Resume):
            if now_s < self._mended_s.get(action, 0.0) + MEND_EVERY_S:
                return True
            self._mended_s = {one: at_s for one, at_s in self._mended_s.items() if now_s < at_s + MEND_EVERY_S}
            self._mended_s[action] = now_s
            return False
        refusal = self._refusals.get(action.job) if isinstance(action, Submit) else None
        return refusal is not None and now_s < refusal.retry_s

    def _note_refusal(self, action: Action, message: str, now_s: float) -> None:
        """A task may have ended since the look, so a refused change is only said; a submission is tried less often."""
        if not isinstance(action, Submit):
            logger.warning("%s not possible now: %s", describe(action), message)
            return
        last = self._refusals.get(action.job)
        delay_s = FIRST_RETRY_S if last is None else min(LONGEST_RETRY_S, 2 * last.delay_s)
        self._refusals[action.job] = _Refusal(message, delay_s, now_s + delay_s)
        if last is None or last.message != message:
            logger.warning("%s refused, to be tried again with back-off: %s", describe(action), message)


def _check_preemption(partition: Partition, partitions: Sequence[Partition]) -> None:
    """Refuse a partition in which cleaning would keep GPUs from training."""
    see = "`slackwater slurm check` says what to set"
    if partition.preempt_mode.split(",")[0] not in ("REQUEUE", "CANCEL"):
        raise PermanentError(
            f"partition {partition.name!r} must have PreemptMode=REQUEUE, or training could not take its GPUs back;"
            f" it has {partition.preempt_mode}; {see}"
        )
    if partition.preempt_mode.startswith("CANCEL"):
        logger.warning(
            "partition %s has PreemptMode=CANCEL: preempted workers do not come back by themselves; %s",
            partition.name,
            see,
        )
    above = [
        other
        for other in partitions
        if other.priority_tier > partition.priority_tier and set(other.nodes) & set(partition.nodes)
    ]
    if not above:
        raise PermanentError(
            f"no partition over the nodes of {partition.name!r} has a PriorityTier above its {partition.priority_tier},"
            f" so nothing could preempt cleaning; {see}"
        )


def describe(action: Action) -> str:
    """One line for the log."""
    match action:
        case SetThrottle(array_id, max_running):
            return f"throttle array={array_id} max_running={max_running}"
        case Hold(array_id):
            return f"hold array={array_id} reason=no longer wanted"
        case Cancel(array_id, reason):
            return f"cancel array={array_id} reason={reason}"
        case Requeue(refs, reason):
            return f"requeue tasks={','.join(refs)} reason={reason}"
        case Release(refs):
            return f"release tasks={','.join(refs)} reason=a node refused to launch them"
        case Resume(node):
            return f"resume node={node} reason=drained for tasks whose end it had not seen"
        case Submit(job, gpu_type, num_tasks, max_running):
            return f"submit job={job} gpu_type={gpu_type or 'any'} tasks={num_tasks} max_running={max_running}"


def _number(text: str, default: int) -> int:
    return int(text) if text.isdigit() else default
