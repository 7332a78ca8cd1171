"""What a cluster looks like to the controller of cleaning: GPUs by use, our arrays, nodes to leave.

Owns the mark by which our arrays are known, and the counting.  Pure: records and the time come in.
Owns no decision (`fleet`) and no call to Slurm (`cluster`).  Called by `cluster`, and by `status` for
a cluster that nobody controls.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slackwater_slurm.core import GpuCount, Job, Node, NodeState, Partition, Reservation

MARK = re.compile(r"slackwater:clean:(?P<job>[a-z0-9-]{1,40}):(?P<gpu_type>[A-Za-z0-9_.-]*)")

# A slurmd that was started again while tasks left its node refuses them when they come back: it still sees their end.
# Slurm drains the node with this reason and holds the tasks.
TWICE = "Duplicate jobid"


class Use(StrEnum):
    """What a GPU is used for.  Whatever is not our cleaning and holds a GPU is training."""

    TRAINING = "training"
    CLEANING = "cleaning"
    IDLE = "idle"
    UNAVAILABLE = "unavailable"  # nobody's, on a node that takes no jobs


def mark(job: str, gpu_type: str) -> str:
    """The comment of an array of ours; gpu_type "" = any."""
    return f"slackwater:clean:{job}:{gpu_type}"


def is_marked(job: Job) -> bool:
    """Has the mark, whoever's it is."""
    return MARK.fullmatch(job.comment) is not None


@dataclass(frozen=True, slots=True)
class Task:
    """One of our workers that holds GPUs."""

    ref: str
    array_id: int
    task_id: int
    node: str
    gpus: GpuCount
    is_running: bool  # False: on its way out, nothing to signal
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Array:
    """One array of ours, as far as it is not over.

    displaced: tasks that ran, were sent back to the queue and wait; Slurm restarts them by itself.
    waiting: tasks that never ran.   throttle: None when unknown, 0 = no limit.
    paused: tasks among those two that are held (`scontrol hold`).
    stuck: refs of displaced tasks that Slurm itself holds, since a node refused to launch them.
    """

    array_id: int
    job: str
    gpu_type: str
    tasks: tuple[Task, ...] = ()
    displaced: int = 0
    waiting: int = 0
    paused: int = 0
    stuck: tuple[str, ...] = ()
    throttle: int | None = None
    reason: str = ""  # why the first of those that wait does
    restarts_of: tuple[tuple[str, int], ...] = ()  # (ref, restarts) of tasks that restarted at least once

    @property
    def held_workers(self) -> int:
        """Workers that hold GPUs."""
        return len(self.tasks)

    @property
    def restarts(self) -> int:
        return sum(count for _, count in self.restarts_of)

    @property
    def live(self) -> int:
        """Tasks that are not over."""
        return len(self.tasks) + self.displaced + self.waiting


@dataclass(frozen=True, slots=True)
class Observation:
    """A cluster at one moment.

    gpus: (node, type, use) to count, none of them 0.   idle: GPUs that a cleaning task could get now, by type.
    yielding: nodes that our tasks must leave, each with the reason.
    misjudged: nodes that Slurm drained for no fault of theirs.
    pending_gpus: (partition, reason) to GPUs that others wait for.
    """

    now_s: float
    nodes: tuple[Node, ...]
    gpus: tuple[tuple[tuple[str, str, Use], int], ...]
    idle: GpuCount
    arrays: tuple[Array, ...]
    yielding: tuple[tuple[str, str], ...]
    misjudged: tuple[str, ...] = ()
    pending_gpus: tuple[tuple[tuple[str, str], int], ...] = ()

    def count(self, use: Use) -> int:
        """GPUs of all types in this use."""
        return sum(number for (_, _, its_use), number in self.gpus if its_use is use)

    def gpus_of(self, gpu_type: str, use: Use) -> int:
        """GPUs of one type in this use."""
        return sum(number for (_, its_type, its_use), number in self.gpus if its_type == gpu_type and its_use is use)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(sorted({gpu_type for (_, gpu_type, _), _ in self.gpus}))


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose arrays are ours, and which nodes they may use.

    user, partition: None = any, for one that only looks.
    time_limit_s: of our tasks; Slurm starts none that would run into a reservation.  None = no limit.
    maintenance_lead_s: so long before a maintenance our tasks leave its nodes.
    """

    user: str | None
    partition: str | None
    time_limit_s: float | None = None
    maintenance_lead_s: float = 60.0


def owner(job: Job, scope: Scope) -> tuple[str, str] | None:
    """(cleaning job, GPU type) of an array of ours, None for everybody else's.

    A mark alone is not enough: a copied comment on another user's job, or in another partition, is not ours.
    """
    found = MARK.fullmatch(job.comment)
    if found is None or job.array_id is None:
        return None
    if job.user != (scope.user or job.user) or job.partition != (scope.partition or job.partition):
        return None
    return found["job"], found["gpu_type"]


def observe(
    nodes: Sequence[Node],
    jobs: Sequence[Job],
    reservations: Sequence[Reservation],
    partitions: Sequence[Partition],
    scope: Scope,
    now_s: float,
) -> Observation:
    """Count a cluster.  `now_s` is on Slurm's clock, seconds since the epoch."""
    arrays = _arrays(jobs, scope)
    ours = _gpus_of_ours(arrays)
    open_partitions = {one.name for one in partitions if one.is_up and one.name == (scope.partition or one.name)}
    shut = _shut_nodes(reservations, scope, now_s)
    gpus: dict[tuple[str, str, Use], int] = {}
    idle: Counter[str] = Counter()
    for node in nodes:
        uses = _uses(node, ours.get(node.name, GpuCount()))
        gpus |= {
            (node.name, kind, use): count for use, counts in uses.items() for kind, count in counts.items() if count
        }
        if open_partitions.intersection(node.partitions) and node.name not in shut:
            idle.update(uses[Use.IDLE])
    return Observation(
        now_s=now_s,
        nodes=tuple(nodes),
        gpus=tuple(sorted(gpus.items())),
        idle=GpuCount.of(idle),
        arrays=arrays,
        yielding=_yielding(nodes, reservations, scope, now_s),
        misjudged=tuple(
            node.name
            for node in nodes
            if node.state is NodeState.DRAINED
            and node.reason.startswith(TWICE)
            and open_partitions & {*node.partitions}
        ),
        pending_gpus=_pending(jobs, scope),
    )


def _arrays(jobs: Sequence[Job], scope: Scope) -> tuple[Array, ...]:
    records: dict[int, list[Job]] = {}
    for job in jobs:
        if owner(job, scope) is not None:
            assert job.array_id is not None, "owner() refuses what is no array"
            records.setdefault(job.array_id, []).append(job)
    return tuple(_array(array_id, records[array_id], scope) for array_id in sorted(records))


def _array(array_id: int, records: list[Job], scope: Scope) -> Array:
    whose = owner(records[0], scope)
    assert whose is not None, "only our records come here"
    pending = [record for record in records if record.is_pending]
    displaced = [record for record in pending if record.restarts > 0]
    throttles = [record.throttle for record in pending if record.throttle is not None]
    return Array(
        array_id=array_id,
        job=whose[0],
        gpu_type=whose[1],
        tasks=tuple(_task(array_id, record) for record in records if record.holds_gpus),
        displaced=sum(record.num_tasks for record in displaced),
        waiting=sum(record.num_tasks for record in pending if record.restarts == 0),
        paused=sum(record.num_tasks for record in pending if record.is_held),
        stuck=tuple(record.ref for record in pending if record.is_stuck),
        throttle=throttles[0] if throttles else None,
        reason=pending[0].reason if pending else "",
        restarts_of=tuple((record.ref, record.restarts) for record in records if record.restarts),
    )


def _task(array_id: int, record: Job) -> Task:
    assert record.task_id is not None, "a task that holds GPUs has left the record of those that wait"
    return Task(
        ref=record.ref,
        array_id=array_id,
        task_id=record.task_id,
        node=record.nodes[0] if record.nodes else "",
        gpus=record.gpus,
        is_running=record.state == "RUNNING",
        start_s=record.start_s or 0.0,
    )


def _gpus_of_ours(arrays: Sequence[Array]) -> dict[str, GpuCount]:
    ours: dict[str, GpuCount] = {}
    for array in arrays:
        for task in array.tasks:
            ours[task.node] = ours.get(task.node, GpuCount()) + task.gpus
    return ours


def _uses(node: Node, ours: GpuCount) -> dict[Use, dict[str, int]]:
    """One node's GPUs by use and type.  Those of ours whose type Slurm did not say count for the first in use."""
    uses: dict[Use, dict[str, int]] = {use: {} for use in Use}
    untold = ours.get("") if "" not in node.gpus.types else 0
    for gpu_type, total in node.gpus.by_type:
        used = min(total, node.gpus_used.get(gpu_type))
        told = min(used, ours.get(gpu_type))
        cleaning = min(used, told + untold)
        untold -= cleaning - told
        uses[Use.CLEANING][gpu_type] = cleaning
        uses[Use.TRAINING][gpu_type] = used - cleaning
        uses[Use.IDLE if node.is_schedulable else Use.UNAVAILABLE][gpu_type] = total - used
    return uses


def _shut_nodes(reservations: Sequence[Reservation], scope: Scope, now_s: float) -> frozenset[str]:
    """Nodes on which Slurm would start none of our tasks, since it would run into a reservation."""
    until_s = None if scope.time_limit_s is None else now_s + scope.time_limit_s
    return frozenset(
        node
        for reservation in reservations
        if reservation.end_s > now_s and (until_s is None or reservation.start_s <= until_s)
        for node in reservation.nodes
    )


def _yielding(
    nodes: Sequence[Node], reservations: Sequence[Reservation], scope: Scope, now_s: float
) -> tuple[tuple[str, str], ...]:
    """Nodes to leave.

    Other people's reservations are no reason: they may cover a part of a node, and a task that is sent
    away would be started right there again.
    """
    reasons = {node.name: "drain" for node in nodes if node.state is NodeState.DRAINING}
    for reservation in reservations:
        due = reservation.start_s - scope.maintenance_lead_s <= now_s < reservation.end_s
        if reservation.is_maintenance and due:
            reasons.update(dict.fromkeys(reservation.nodes, "maintenance"))
    return tuple(sorted(reasons.items()))


def _is_misjudged(node: Node) -> bool:
    return node.state is NodeState.DRAINED and node.reason.startswith(TWICE)


def _pending(jobs: Sequence[Job], scope: Scope) -> tuple[tuple[tuple[str, str], int], ...]:
    """GPUs that others' jobs wait for."""
    waiting: Counter[tuple[str, str]] = Counter()
    for job in jobs:
        if job.is_pending and job.gpus and owner(job, scope) is None:
            waiting[job.partition, job.reason] += job.gpus.total * job.num_tasks
    return tuple(sorted(waiting.items()))
