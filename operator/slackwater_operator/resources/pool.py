"""CapacityPool: the GPUs of one data centre, and how they are lent and taken back."""

from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from slackwater_operator.resources.base import (
    MAX_ITEMS,
    Count,
    Duration,
    Fraction,
    Name,
    NamedResource,
    Part,
    PositiveDuration,
    Seen,
    Status,
    list_map,
    rules,
    seconds,
    with_durations,
)
from slackwater_operator.resources.flavor import NodeSelector
from slackwater_operator.resources.names import CAPACITY_POOL, KindNames


class PoolFlavor(Part):
    """A type of GPU of this pool."""

    name: Name
    """A GPUFlavor."""

    count: Count | None = None
    """At most so many GPUs are counted; all that are found, if left out."""


class PoolInference(Part):
    """What inference keeps."""

    reserved_gpus: Count = 0
    """Never lent to cleaning."""


class Lending(Part):
    """When an idle GPU goes to cleaning."""

    lend_after: Duration = "20s"
    """Idle for so long; GPUs that change hands more often than that cost more starts than they give work."""

    max_lent_fraction: Fraction = "1.0"
    """Of the pool's GPUs, at most this part is lent at once."""

    @property
    def lend_after_s(self) -> float:
        """`lend_after` in seconds."""
        return seconds(self.lend_after)


class PoolReclaim(Part):
    """How GPUs are taken back."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": with_durations(
                    "duration(self.retargetAfter) <= duration(self.deadline)", "self.retargetAfter", "self.deadline"
                ),
                "message": "retargetAfter must not be longer than deadline",
                "fieldPath": ".retargetAfter",
            }
        )
    )

    deadline: PositiveDuration = "15s"
    """A victim that is not gone by then is reported."""

    retarget_after: PositiveDuration = "8s"
    """A victim that is not gone by then no longer counts, and another one goes."""

    max_parallel: Annotated[int, Field(strict=True, ge=1, le=4096)] = 64
    """Victims that leave at once."""

    @model_validator(mode="after")
    def _retargets_before_the_deadline(self) -> Self:
        if self.retarget_after_s > self.deadline_s:
            raise ValueError("retargetAfter must not be longer than deadline")
        return self

    @property
    def deadline_s(self) -> float:
        """`deadline` in seconds."""
        return seconds(self.deadline)

    @property
    def retarget_after_s(self) -> float:
        """`retarget_after` in seconds."""
        return seconds(self.retarget_after)


class Queue(Part):
    """A share of what is lent."""

    name: Name
    """What cleaning jobs call it."""

    weight: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    """Idle GPUs go to the queues in this proportion."""

    max_gpus: Count | None = None
    """At most so many GPUs at once."""


class PoolSlurm(Part):
    """The Slurm cluster that shares this data centre; `slackwater slurm run` beside it takes the jobs placed there."""

    cluster: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9_.-]+$")]
    """Its ClusterName, by which it reports in the status of jobs."""

    partition: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9_.-]+$")] = "cleaning"
    """Where cleaning workers are submitted; training partitions preempt it."""


_RESERVED_RULE = (
    "!has(self.inference) || self.flavors.exists(f, !has(f.count)) || "
    "self.inference.reservedGPUs <= self.flavors.map(f, f.count).sum()"
)


class CapacityPoolSpec(Part):
    """Which GPUs are of this pool, and the terms on which they change hands."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": _RESERVED_RULE,
                "message": "inference.reservedGPUs must not exceed the sum of the flavors' counts",
                "fieldPath": ".inference.reservedGPUs",
            }
        )
    )

    node_selector: NodeSelector | None = None
    """Which nodes are of this data centre; all of them, if left out."""

    flavors: Annotated[tuple[PoolFlavor, ...], Field(min_length=1, max_length=16, json_schema_extra=list_map("name"))]
    """The types of GPU that this data centre has."""

    inference: PoolInference = PoolInference()
    lending: Lending = Lending()
    reclaim: PoolReclaim = PoolReclaim()
    queues: Annotated[tuple[Queue, ...], Field(max_length=MAX_ITEMS, json_schema_extra=list_map("name"))] = ()
    """Names that cleaning jobs may ask for; a job without one gets weight 1."""

    slurm: PoolSlurm | None = None

    @model_validator(mode="after")
    def _reserves_what_there_is(self) -> Self:
        counts = [flavor.count for flavor in self.flavors]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts) and self.inference.reserved_gpus > sum(known):
            raise ValueError("inference.reservedGPUs must not exceed the sum of the flavors' counts")
        for field in ("flavors", "queues"):
            listed = [one.name for one in getattr(self, field)]
            if len(listed) != len(set(listed)):
                raise ValueError(f"{field}: each name may stand there once")
        return self


class FlavorUsage(Seen):
    """Who holds the GPUs of one type."""

    flavor: str
    total: Count = 0
    inference: Count = 0
    training: Count = 0
    cleaning: Count = 0
    releasing: Count = 0
    idle: Count = 0
    broken: Count = 0


class CapacityPoolStatus(Status):
    """Who holds the pool's GPUs."""

    usage: Annotated[tuple[FlavorUsage, ...], Field(max_length=16, json_schema_extra=list_map("flavor"))] = ()
    total: Count = 0
    inference: Count = 0
    training: Count = 0
    cleaning: Count = 0
    idle: Count = 0


class CapacityPool(NamedResource):
    """The GPUs of one data centre: lending, reclaim, queues."""

    names: ClassVar[KindNames] = CAPACITY_POOL
    spec: CapacityPoolSpec
    status: CapacityPoolStatus = CapacityPoolStatus()
