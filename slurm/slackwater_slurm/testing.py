"""What tests of this room stand on: `OpenLedger`, and `FakeSlurm`, a small cluster in memory.

It is behind the client's protocol and schedules as Slurm does where that matters to the controller: a training
partition above a cleaning partition, preemption by requeue of the newest tasks, array throttles, holds, drains,
reservations.  It has no time of its own (`now_s` is moved by the test) and places a job on one node.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slackwater_slurm.core import (
    SCHEDULABLE,
    GpuCount,
    Job,
    Node,
    NodeState,
    Partition,
    Reservation,
    SlurmError,
    SlurmRefused,
    SlurmVersion,
    Submission,
)
from slackwater_slurm.ledger import LedgerWatch, Progress

CONFIG = {
    "ClusterName": "fake",
    "MaxArraySize": "1001",
    "PreemptMode": "REQUEUE",
    "PreemptType": "preempt/partition_prio",
}


class OpenLedger(LedgerWatch):
    """A ledger with open work that nobody has to be asked for."""

    def __init__(self, ledger: Path, every_s: float) -> None:
        super().__init__(ledger, every_s)
        self.progress, self.answers = Progress(items_total=100), 1

    def poll(self, now_s: float) -> None:
        """Nothing to ask."""


@dataclass
class FakeTask:
    """One job or array task."""

    job_id: int
    array_id: int | None
    task_id: int | None
    name: str
    user: str
    partition: str
    gpu_type: str
    gpus: int
    comment: str = ""
    node: str = ""
    restarts: int = 0
    held: bool = False
    stuck: bool = False
    reservation: str = ""
    submit_s: float = 0.0
    start_s: float | None = None

    @property
    def ref(self) -> str:
        return str(self.job_id) if self.array_id is None else f"{self.array_id}_{self.task_id}"


@dataclass
class FakeSlurm:
    """A cluster of `nodes`, name to (GPU type, GPUs), that satisfies `SlurmClient`.

    failing: raised by every call while set.   fail_in: method name to an error, raised once.
    after_submit: called once a submission is accepted, before its id is returned.
    calls: what was changed, as (method, arguments), for tests that count.
    """

    machines: dict[str, tuple[str, int]]
    user: str = "cleaner"
    now_s: float = 1_000_000.0
    partitions_list: list[Partition] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=lambda: dict(CONFIG))
    tasks: list[FakeTask] = field(default_factory=list)
    states: dict[str, NodeState] = field(default_factory=dict)
    node_reasons: dict[str, str] = field(default_factory=dict)
    throttles: dict[int, int] = field(default_factory=dict)
    reserved: dict[str, Reservation] = field(default_factory=dict)
    failing: SlurmError | None = None
    fail_in: dict[str, SlurmError] = field(default_factory=dict)
    calls: list[tuple[str, object]] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    after_submit: Callable[[], None] | None = None
    next_id: int = 1

    def __post_init__(self) -> None:
        names = tuple(sorted(self.machines))
        if not self.partitions_list:
            self.partitions_list = [
                Partition("cleaning", "UP", names, 1, "REQUEUE"),
                Partition("train", "UP", names, 100, "OFF"),
            ]

    # --- the client's protocol -----------------------------------------------------------------------

    def ping(self) -> None:
        self._may_fail("ping")

    def version(self) -> SlurmVersion:
        self._may_fail("version")
        return SlurmVersion(24, 11, 5)

    def config(self) -> Mapping[str, str]:
        self._may_fail("config")
        return dict(self.settings)

    def partitions(self) -> tuple[Partition, ...]:
        self._may_fail("partitions")
        return tuple(self.partitions_list)

    def nodes(self) -> tuple[Node, ...]:
        self._may_fail("nodes")
        return tuple(self._node(name) for name in sorted(self.machines))

    def reservations(self) -> tuple[Reservation, ...]:
        self._may_fail("reservations")
        return tuple(self.reserved.values())

    def jobs(self, *, detail: bool = False) -> tuple[Job, ...]:
        self._may_fail("jobs")
        waiting: dict[int, list[FakeTask]] = {}
        records = []
        for task in self.tasks:
            if task.array_id is not None and not task.node and task.restarts == 0:
                waiting.setdefault(task.array_id, []).append(task)
            else:
                records.append(self._record(task, is_exact=detail))
        for array_id, group in waiting.items():
            records.append(self._record(group[0], array_id=array_id, num_tasks=len(group)))
        return tuple(
            sorted(records, key=lambda job: (job.array_id or job.job_id, -1 if job.task_id is None else job.task_id))
        )

    def submit(self, submission: Submission) -> int:
        self._may_fail("submit")
        if submission.partition not in {partition.name for partition in self.partitions_list}:
            raise SlurmRefused("sbatch: invalid partition specified: " + str(submission.partition))
        self.calls.append(("submit", submission.name))
        self.submissions.append(submission)
        array_id = self.next_id
        for task_id in range(submission.num_tasks or 1):
            self.tasks.append(
                FakeTask(
                    job_id=self.next_id,
                    array_id=array_id if submission.num_tasks else None,
                    task_id=task_id if submission.num_tasks else None,
                    name=submission.name,
                    user=self.user,
                    partition=submission.partition or "",
                    gpu_type=submission.gpu_type,
                    gpus=submission.gpus or 0,
                    comment=submission.comment or "",
                    held=submission.hold,
                    submit_s=self.now_s,
                )
            )
            self.next_id += 1
        self.throttles[array_id] = submission.max_running or 0
        self.schedule()
        if self.after_submit is not None:
            self.after_submit()
        return array_id

    def set_throttle(self, array_id: int, max_running: int) -> None:
        self._may_fail("set_throttle")
        if max_running < 1:
            raise ValueError(f"max_running must be 1 or more, got {max_running}")
        self.calls.append(("set_throttle", (array_id, max_running)))
        self.throttles[array_id] = max_running
        self.schedule()

    def hold(self, refs: Sequence[str]) -> None:
        self._may_fail("hold")
        self.calls.append(("hold", tuple(refs)))
        for task in self._named(refs):
            task.held = task.held or not task.node

    def release(self, refs: Sequence[str]) -> None:
        self._may_fail("release")
        self.calls.append(("release", tuple(refs)))
        for task in self._named(refs):
            task.held = task.stuck = False
        self.schedule()

    def resume(self, nodes: Sequence[str]) -> None:
        self._may_fail("resume")
        self.calls.append(("resume", tuple(nodes)))
        for node in nodes:
            self.states[node] = NodeState.IDLE
            self.node_reasons.pop(node, None)
        self.schedule()

    def requeue(self, refs: Sequence[str]) -> None:
        self._may_fail("requeue")
        self.calls.append(("requeue", tuple(refs)))
        for task in self._named(refs):
            self._send_back(task)
        self.schedule()

    def cancel(self, refs: Sequence[str]) -> None:
        self._may_fail("cancel")
        self.calls.append(("cancel", tuple(refs)))
        for task in self._named(refs):
            self.tasks.remove(task)
        self.schedule()

    # --- what others do ------------------------------------------------------------------------------

    def train(self, gpus: int, gpu_type: str = "", *, user: str = "alice", comment: str = "") -> int:
        """Somebody submits training; cleaning is preempted for it at once."""
        job = FakeTask(self.next_id, None, None, "train", user, "train", gpu_type, gpus, comment, submit_s=self.now_s)
        self.next_id += 1
        self.tasks.append(job)
        self.schedule()
        return job.job_id

    def finish(self, ref: str | int) -> None:
        """A job or task ends by itself."""
        for task in self._named([str(ref)]):
            self.tasks.remove(task)
        self.schedule()

    def set_state(self, node: str, state: NodeState) -> None:
        """Drain, break or resume (IDLE) a node.  What runs on a node that goes down is sent back."""
        self.states[node] = state
        if state is NodeState.DOWN:
            for task in self.tasks:
                if task.node == node:
                    self._send_back(task)
        self.schedule()

    def lose_node_daemon(self, node: str) -> None:
        """What Slurm makes of a slurmd that is killed and started again while tasks leave its node."""
        self.states[node] = NodeState.DRAINED
        self.node_reasons[node] = "Duplicate jobid"
        for task in self.tasks:
            if task.node == node:
                self._send_back(task)
                task.stuck = True
        self.schedule()

    def reserve(self, name: str, nodes: tuple[str, ...], start_s: float, end_s: float, *flags: str) -> None:
        self.reserved[name] = Reservation(name, nodes, start_s, end_s, frozenset(flags), start_s <= self.now_s)
        self.schedule()

    def running(self, partition: str = "cleaning") -> list[FakeTask]:
        """What holds GPUs now."""
        return [task for task in self.tasks if task.node and task.partition == partition]

    def changes(self) -> list[str]:
        """Names of the changing calls so far, and forgets them."""
        names = [name for name, _ in self.calls]
        self.calls.clear()
        return names

    # --- the scheduler -------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start all that can be started: the higher partition first, then by age."""
        tier = {partition.name: partition.priority_tier for partition in self.partitions_list}
        for task in sorted(self.tasks, key=lambda task: (-tier.get(task.partition, 0), task.job_id)):
            if task.node or task.held or task.stuck or not self._under_throttle(task):
                continue
            node = self._place(task) or (self._make_room(task) if task.partition == "train" else "")
            if node:
                task.node, task.start_s = node, self.now_s

    def _under_throttle(self, task: FakeTask) -> bool:
        limit = self.throttles.get(task.array_id, 0) if task.array_id is not None else 0
        return limit == 0 or sum(1 for other in self.tasks if other.array_id == task.array_id and other.node) < limit

    def _place(self, task: FakeTask) -> str:
        return next((name for name in self._candidates(task) if self._free(name) >= task.gpus), "")

    def _make_room(self, task: FakeTask) -> str:
        for name in self._candidates(task):
            victims = [other for other in self.running() if other.node == name]
            missing = task.gpus - self._free(name)
            if sum(victim.gpus for victim in victims) < missing:
                continue
            while self._free(name) < task.gpus:
                self._send_back(victims.pop())
            return name
        return ""

    def _candidates(self, task: FakeTask) -> list[str]:
        shut = {
            node
            for reservation in self.reserved.values()
            if reservation.end_s > self.now_s
            for node in reservation.nodes
        }
        return [
            name
            for name, (gpu_type, _) in sorted(self.machines.items())
            if task.gpu_type in ("", gpu_type)
            and self.states.get(name, NodeState.IDLE) in SCHEDULABLE
            and (name not in shut or task.partition == "train")
        ]

    def _send_back(self, task: FakeTask) -> None:
        if task.node:
            task.node, task.start_s = "", None
            task.restarts += 1

    def _free(self, node: str) -> int:
        return self.machines[node][1] - sum(task.gpus for task in self.tasks if task.node == node)

    # --- records -------------------------------------------------------------------------------------

    def _named(self, refs: Sequence[str]) -> list[FakeTask]:
        return [task for task in self.tasks if task.ref in refs or str(task.array_id) in refs]

    def _may_fail(self, method: str) -> None:
        if self.failing is not None:
            raise self.failing
        if method in self.fail_in:
            raise self.fail_in.pop(method)

    def _node(self, name: str) -> Node:
        gpu_type, total = self.machines[name]
        used = total - self._free(name)
        state = self.states.get(name, NodeState.IDLE)
        if state is NodeState.DRAINING and not used:
            state = NodeState.DRAINED
        if state is NodeState.IDLE and used:
            state = NodeState.ALLOCATED if used == total else NodeState.MIXED
        return Node(
            name=name,
            state=state,
            state_text=state.value,
            gpus=GpuCount.of({gpu_type: total}),
            gpus_used=GpuCount.of({gpu_type: used}),
            partitions=tuple(p.name for p in self.partitions_list if name in p.nodes),
            reason=self.node_reasons.get(name, ""),
        )

    def _record(
        self, task: FakeTask, array_id: int | None = None, num_tasks: int = 1, *, is_exact: bool = False
    ) -> Job:
        is_group = array_id is not None
        reason = (
            ""
            if task.node
            else "launch_failed_requeued_held"
            if task.stuck
            else "JobHeldUser"
            if task.held
            else "Resources"
            if self._under_throttle(task)
            else "JobArrayTaskLimit"
        )
        return Job(
            job_id=array_id if array_id is not None else task.job_id,
            array_id=task.array_id,
            task_id=None if is_group else task.task_id,
            name=task.name,
            user=task.user,
            partition=task.partition,
            state="RUNNING" if task.node else "PENDING",
            reason=reason,
            gpus=GpuCount.of({self.machines[task.node][0] if task.node and is_exact else task.gpu_type: task.gpus}),
            nodes=(task.node,) if task.node else (),
            restarts=task.restarts,
            num_tasks=num_tasks,
            throttle=self.throttles.get(task.array_id) if task.array_id is not None else None,
            comment=task.comment,
            reservation=task.reservation,
            submit_s=task.submit_s,
            start_s=task.start_s,
        )
