"""The types that every part of the Slurm room speaks, and its errors.

Owns frozen values: what Slurm holds (`Node`, `Partition`, `Reservation`, `Job`), what it is asked for
(`Submission`), and counts of GPUs by type.  Owns no parsing and no I/O.  Imported by every other module
of the room.  Moments (`*_s` of jobs and reservations) are seconds since the epoch on Slurm's clock.

The errors are the operator's two kinds, so that its loop can hold them: try again, or give up.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from slackwater_operator.core import PermanentError, SlackwaterError, TemporaryError


class SlurmError(SlackwaterError):
    """Root of this room's errors."""


class SlurmUnavailable(SlurmError, TemporaryError):
    """The controller did not answer, or not in time, or did not accept our credential just now."""


class OutputCut(SlurmError, TemporaryError):
    """A command's output ends in the middle of a record, or a column is full to its width."""


class SlurmRefused(SlurmError, PermanentError):
    """Slurm understood and said no: an unknown partition, an impossible request, no permission."""


class SlurmMissing(SlurmError, PermanentError):
    """There is no Slurm to talk to here: no commands, no configuration, no library that fits."""


class UnknownShape(SlurmError, PermanentError):
    """Slurm answered in a form that this adapter does not know."""


@dataclass(frozen=True, slots=True, order=True)
class SlurmVersion:
    """A Slurm release; ordered."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> "SlurmVersion":
        """Read `slurm 24.11.5`, Debian's `slurm-wlm 22.05.8`, `25.05.0-0rc1`, pyslurm's `22.5.3`.

        Raises UnknownShape when there is no release number.
        """
        found = re.search(r"(?<![\d.])(\d{2})\.(\d{1,2})(?:\.(\d+))?", text)
        if found is None:
            raise UnknownShape(f"a Slurm release such as 22.05.8 was expected, got {text.strip()[:80]!r}")
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02d}.{self.patch}"


@dataclass(frozen=True, slots=True)
class GpuCount:
    """How many GPUs of which type: sorted (type, count), no zero counts.  Type "" = not stated."""

    by_type: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, int] | Iterable[tuple[str, int]]) -> "GpuCount":
        """Add up the counts of equal types.  Raises ValueError when a type's sum is negative."""
        sums: dict[str, int] = {}
        for gpu_type, count in counts.items() if isinstance(counts, Mapping) else counts:
            sums[gpu_type] = sums.get(gpu_type, 0) + count
        if negative := {gpu_type: count for gpu_type, count in sums.items() if count < 0}:
            raise ValueError(f"counts of GPUs must not be negative, got {negative}")
        return cls(tuple(sorted((gpu_type, count) for gpu_type, count in sums.items() if count)))

    @property
    def total(self) -> int:
        return sum(count for _, count in self.by_type)

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(gpu_type for gpu_type, _ in self.by_type)

    def get(self, gpu_type: str) -> int:
        return dict(self.by_type).get(gpu_type, 0)

    def times(self, factor: int) -> "GpuCount":
        return GpuCount.of((gpu_type, count * factor) for gpu_type, count in self.by_type)

    def __add__(self, other: "GpuCount") -> "GpuCount":
        return GpuCount.of((*self.by_type, *other.by_type))

    def __sub__(self, other: "GpuCount") -> "GpuCount":
        """Raises ValueError when more is taken of a type than there is."""
        return GpuCount.of((*self.by_type, *((gpu_type, -count) for gpu_type, count in other.by_type)))

    def __bool__(self) -> bool:
        return bool(self.by_type)

    def __str__(self) -> str:
        return ",".join(f"{gpu_type or 'gpu'}:{count}" for gpu_type, count in self.by_type) or "none"


class NodeState(StrEnum):
    """A node's state in the words of `sinfo`, suffixes and flags taken off."""

    IDLE = "idle"
    MIXED = "mixed"
    ALLOCATED = "allocated"
    COMPLETING = "completing"
    RESERVED = "reserved"
    MAINT = "maint"  # in a maintenance reservation
    DRAINING = "draining"  # takes nothing new, jobs still run
    DRAINED = "drained"
    DOWN = "down"
    OTHER = "other"  # failing, rebooting, future, powered down, invalid, …: see Node.state_text


SCHEDULABLE = frozenset(
    {NodeState.IDLE, NodeState.MIXED, NodeState.ALLOCATED, NodeState.COMPLETING, NodeState.RESERVED}
)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine as the controller sees it.

    gpus_used: allocated to jobs, also to jobs that are completing.
    gpu_indexes_used: sorted (type, indexes) of the GPUs in use; () when Slurm did not say.
    reason: why it was drained or set down, in the words of who did it.
    """

    name: str
    state: NodeState
    state_text: str  # as Slurm wrote it, for people
    gpus: GpuCount
    gpus_used: GpuCount
    partitions: tuple[str, ...] = ()
    responding: bool = True
    gpu_indexes_used: tuple[tuple[str, tuple[int, ...]], ...] = ()
    reason: str = ""

    @property
    def is_schedulable(self) -> bool:
        """Could a job be placed here once GPUs are free?  A reservation may still forbid it."""
        return self.responding and self.state in SCHEDULABLE


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition; `preempt_mode` is the effective one, the cluster's when it sets none."""

    name: str
    state: str  # UP, DOWN, DRAIN, INACTIVE
    nodes: tuple[str, ...]
    priority_tier: int
    preempt_mode: str  # OFF, CANCEL, REQUEUE, SUSPEND, …
    grace_time_s: int = 0
    over_subscribe: str = "NO"
    max_time_s: int | None = None  # None = no limit
    is_default: bool = False

    @property
    def is_up(self) -> bool:
        return self.state == "UP"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes set aside for a time.  `users` "" and `accounts` "" mean nobody in particular."""

    name: str
    nodes: tuple[str, ...]
    start_s: float
    end_s: float
    flags: frozenset[str] = frozenset()
    is_active: bool = False
    users: str = ""
    accounts: str = ""
    partition: str = ""

    @property
    def is_maintenance(self) -> bool:
        return "MAINT" in self.flags


# Job states that are over; everything else may still run or hold GPUs.
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True, slots=True)
class Job:
    """A job, one task of an array, or the record of all tasks of an array that still wait.

    gpus: of the whole record's one task: what it holds when that is known, else what it asks for
    (type "" when it asks for any).
    gpu_indexes: sorted (node, indexes) that it holds; None when it was not asked for or Slurm did not say.
    """

    job_id: int  # Slurm's number of this record; tasks of an array have their own
    array_id: int | None  # the array's job id, None outside an array
    task_id: int | None  # None outside an array and for the record of the waiting tasks
    name: str
    user: str
    partition: str  # of a waiting job possibly several, separated by commas
    state: str  # PENDING, RUNNING, COMPLETING, REQUEUED, …
    reason: str  # why it waits; "" when it does not
    gpus: GpuCount
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    num_tasks: int = 1  # more than 1: waiting tasks of an array in one record
    throttle: int | None = None  # of the array, when the record tells; 0 = no limit
    comment: str = ""
    reservation: str = ""
    submit_s: float | None = None
    start_s: float | None = None  # began, or is expected to begin
    gpu_indexes: tuple[tuple[str, tuple[int, ...]], ...] | None = None

    @property
    def ref(self) -> str:
        """How commands name it: `12`, `12_3`; for the record of waiting tasks the whole array."""
        if self.array_id is None:
            return str(self.job_id)
        return str(self.array_id) if self.task_id is None else f"{self.array_id}_{self.task_id}"

    @property
    def is_pending(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def is_held(self) -> bool:
        """A person or we keep it from starting (`scontrol hold`, `requeuehold`)."""
        return self.is_pending and self.reason in ("JobHeldUser", "JobHeldAdmin")

    @property
    def is_stuck(self) -> bool:
        """Slurm keeps it from starting, since a node refused to launch it (slurmctld's `requeue` of such a job)."""
        return self.is_pending and re.split("[ _]", self.reason.lower()) == ["launch", "failed", "requeued", "held"]

    @property
    def holds_gpus(self) -> bool:
        return not self.is_pending and self.state not in ENDED


@dataclass(frozen=True, slots=True)
class Submission:
    """A batch job to submit.  What is None is left to the script's #SBATCH lines and the partition.

    script: the whole text, its first line `#!…`.
    num_tasks: an array of so many tasks, 0 … num_tasks - 1; None = no array.
    max_running: the array's throttle; None = no limit.
    """

    name: str
    script: str
    partition: str | None = None
    gpus: int | None = None  # a node
    gpu_type: str = ""
    num_nodes: int | None = None
    num_tasks: int | None = None
    max_running: int | None = None
    comment: str | None = None
    reservation: str | None = None
    output: str | None = None  # a path, Slurm's patterns (%A, %a, %j) allowed
    work_dir: str | None = None
    time_limit: str | None = None  # as sbatch writes it: minutes, or days-hours:minutes:seconds
    requeue: bool | None = None
    append_output: bool = False
    hold: bool = False
    options: tuple[str, ...] = ()  # further sbatch options, `--key=value` each

    def __post_init__(self) -> None:
        """Refuses what Slurm would accept and never run, or run without a GPU."""
        if not self.script.startswith("#!"):
            raise ValueError(f"script must begin with #!, got {self.script[:40]!r}")
        if not self.name or self.name != self.name.strip() or not self.name.isprintable():
            raise ValueError(f"name must be printable and not empty, got {self.name!r}")
        if self.gpu_type and self.gpus is None:
            raise ValueError(f"gpu_type {self.gpu_type!r} needs a number of gpus")
        for field in ("gpus", "num_nodes", "num_tasks", "max_running"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be 1 or more, got {value}")
        if self.max_running is not None and self.num_tasks is None:
            raise ValueError("max_running limits an array; give num_tasks too")
