"""CleaningJob: elastic, preemptible data cleaning in every GPU second that nobody else wants."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from slackwater_operator.resources.base import (
    LIST_SET,
    AbsolutePath,
    Bool,
    Count,
    Moment,
    Name,
    NamedResource,
    ObjectName,
    Part,
    PositiveDuration,
    Seen,
    Status,
    Url,
    rules,
    seconds,
    with_durations,
)
from slackwater_operator.resources.inference import Pools
from slackwater_operator.resources.names import CLEANING_JOB, KindNames
from slackwater_operator.resources.template import WorkerTemplate

Placement = Literal["Kubernetes", "Slurm"]


class Ledger(Part):
    """The job's output and its progress: one folder that all workers share."""

    claim_name: ObjectName
    """A PersistentVolumeClaim that many nodes may write."""

    path: AbsolutePath = "/ledger"
    """Where it is mounted in workers and keeper."""


class Input(Part):
    """The recordings, mounted read-only."""

    claim_name: ObjectName
    """A PersistentVolumeClaim that many nodes may read."""

    path: AbsolutePath = "/input"
    """Where it is mounted in workers."""


class Checkpoint(Part):
    """How a worker makes its work durable when it must leave."""

    flush_timeout: PositiveDuration = "8s"
    """The longest that finishing the open record takes; the template's grace must be longer."""

    verify: Literal["None", "Sequence", "Digest"] = "Digest"
    """What is read back before a preemption counts as lossless: nothing, the unit's number, or its digest too."""

    @property
    def flush_timeout_s(self) -> float:
        """`flush_timeout` in seconds."""
        return seconds(self.flush_timeout)


class Keeper(Part):
    """Who reads the ledger for the operator."""

    url: Url | None = None
    """Of a keeper that somebody else runs; the operator runs one, if left out."""


class SlurmSide(Part):
    """The same job on a Slurm cluster: its workers read and write the same folders there."""

    input_path: AbsolutePath
    """The recordings, at the same path on every Slurm node."""

    ledger_path: AbsolutePath
    """The folder that `ledger` is in Kubernetes: one ledger for both."""

    settings: Annotated[
        dict[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=253)]], Field(max_length=32)
    ] = Field(default_factory=dict)
    """Settings of the steps, as `slackwater clean run --set` takes them; those of the template's workers."""


_SLURM_MESSAGE = "slurm is required with Slurm in placement: it says where input and ledger are there"
_GRACE_MESSAGE = "template.spec.terminationGracePeriodSeconds must be longer than checkpoint.flushTimeout"


class CleaningJobSpec(Part):
    """A job's appetite, where it may run, and its workers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "self.minWorkers <= self.maxWorkers",
                "message": "maxWorkers must be at least minWorkers",
                "messageExpression": "'maxWorkers must be at least minWorkers: %d is less than %d'"
                ".format([self.maxWorkers, self.minWorkers])",
                "fieldPath": ".maxWorkers",
            },
            {
                # Whole seconds are enough: the grace is whole.
                "rule": with_durations(
                    "duration(self.checkpoint.flushTimeout).getSeconds() "
                    "< self.template.spec.terminationGracePeriodSeconds",
                    "self.checkpoint.flushTimeout",
                ),
                "message": _GRACE_MESSAGE,
                "messageExpression": f"'{_GRACE_MESSAGE}, got %d s'"
                ".format([self.template.spec.terminationGracePeriodSeconds])",
                "fieldPath": ".template.spec.terminationGracePeriodSeconds",
            },
            {
                "rule": "has(self.ledger) || has(self.keeper.url) || self.checkpoint.verify == 'None'",
                "message": "checkpoint.verify needs a ledger or keeper.url to read from; without them it must be None",
                "fieldPath": ".checkpoint.verify",
            },
            {
                # Workers that run would go on with the old one, and nothing that they did would be found in the new.
                "rule": "has(self.ledger) == has(oldSelf.ledger) && "
                "(!has(self.ledger) || self.ledger == oldSelf.ledger)",
                "message": "ledger is immutable: it holds the job's progress",
                "fieldPath": ".ledger",
            },
            {
                "rule": "!('Slurm' in self.placement) || has(self.slurm)",
                "message": _SLURM_MESSAGE,
                "fieldPath": ".placement",
            },
        )
    )

    pools: Pools
    """CapacityPools to run in, the first preferred."""

    queue: Name | None = None
    """A queue of these pools; without one the job has weight 1."""

    flavors: Annotated[tuple[Name, ...], Field(min_length=1, max_length=16, json_schema_extra=LIST_SET)]
    """GPUFlavors to run on, the first preferred."""

    min_workers: Count = 0
    """Never preempted, once they run."""

    max_workers: Count
    """`kubectl scale` sets it."""

    placement: Annotated[tuple[Placement, ...], Field(min_length=1, max_length=2, json_schema_extra=LIST_SET)] = (
        "Kubernetes",
    )
    """Where workers may run."""

    gpus_per_worker: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """GPUs of one worker, all on one node."""

    ledger: Ledger | None = None
    input: Input | None = None
    checkpoint: Checkpoint = Checkpoint()
    restart_policy: Literal["Requeue", "Hold", "Stop"] = "Requeue"
    """After a preemption: start again when a GPU is idle, wait for a person (`suspend` and back), or end the job."""

    suspend: Bool = False
    """No new workers, and the running ones leave with their work durable."""

    keeper: Keeper = Keeper()
    slurm: SlurmSide | None = None
    """Read by `slackwater slurm run` beside a pool's Slurm; `maxWorkers` holds for both sides together."""

    template: WorkerTemplate
    """The operator adds GPUs, node, priority and labels."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_workers > self.max_workers:
            least, most = self.min_workers, self.max_workers
            raise ValueError(f"maxWorkers must be at least minWorkers: {most} is less than {least}")
        if self.checkpoint.flush_timeout_s >= self.template.grace_s:
            raise ValueError(f"{_GRACE_MESSAGE}, got {self.template.grace_s:g} s")
        if self.checkpoint.verify != "None" and self.ledger is None and self.keeper.url is None:
            raise ValueError(
                "checkpoint.verify needs a ledger or keeper.url to read from; without them it must be None"
            )
        if "Slurm" in self.placement and self.slurm is None:
            raise ValueError(_SLURM_MESSAGE)
        for field in ("pools", "flavors", "placement"):
            listed = getattr(self, field)
            if len(listed) != len(set(listed)):
                raise ValueError(f"{field}: each name may stand there once")
        return self


class Workers(Seen):
    """The job's workers."""

    running: Count = 0
    starting: Count = 0
    leaving: Count = 0
    pending: Count = 0


class SlurmWorkers(Seen):
    """The job's workers on Slurm, as the controller there says."""

    cluster: Annotated[str, Field(max_length=63)] = ""
    running: Count = 0
    waiting: Count = 0
    message: Annotated[str, Field(max_length=1024)] = ""


class Items(Seen):
    """The job's recordings, as its ledger says."""

    total: Annotated[int, Field(ge=0)] = 0
    done: Annotated[int, Field(ge=0)] = 0
    quarantined: Annotated[int, Field(ge=0)] = 0
    open: Annotated[int, Field(ge=0)] = 0


class CleaningJobStatus(Status):
    """How far the job is."""

    workers: Workers = Workers()
    slurm: SlurmWorkers | None = None
    items: Items = Items()
    lost: Annotated[int, Field(ge=0)] = 0
    """Workers whose newest durable record the keeper did not find in the ledger; anything but 0 is a fault."""

    unverified: Annotated[int, Field(ge=0)] = 0
    """Workers whose newest durable record nobody could look for."""

    last_durable_time: Moment | None = None
    gpu_seconds: Annotated[float, Field(ge=0)] = 0
    replicas: Count = 0
    """All workers that hold a GPU, for `kubectl scale`."""

    selector: str | None = None


class CleaningJob(NamedResource):
    """A data set to clean with GPUs that are idle; workers leave the moment that they are wanted."""

    names: ClassVar[KindNames] = CLEANING_JOB
    spec: CleaningJobSpec
    status: CleaningJobStatus = CleaningJobStatus()
