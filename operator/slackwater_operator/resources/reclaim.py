"""Reclaim: the record of one take-back of GPUs, written by the operator; people make only dry runs."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from slackwater_operator.core import Reason
from slackwater_operator.resources.base import (
    Bool,
    Count,
    Decimal,
    Duration,
    Moment,
    Name,
    Number,
    ObjectName,
    Part,
    Positive,
    PositiveDuration,
    Resource,
    Rule,
    Seen,
    Status,
    list_map,
    rules,
    seconds,
)
from slackwater_operator.resources.names import RECLAIM, KindNames

Phase = Literal["Planned", "Signalled", "Freed", "Serving", "Cancelled", "Failed", "Answered"]
Outcome = Literal["Leaving", "Checkpointed", "Unverified", "Lost", "Timeout"]

MAX_VICTIMS = 1024
Key = Annotated[
    str,
    Field(min_length=1, max_length=317, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
]
"""`namespace/name`."""


class ForRef(Part):
    """Who waits for the GPUs, or who gives them back."""

    kind: Literal["InferenceDeployment", "CleaningJob", "Pod", "Node"]
    """What it is; a Pod for training."""

    name: ObjectName
    """In the namespace of the Reclaim."""


class PlannedVictim(Part):
    """A pod that is asked to leave."""

    pod: Key
    """`namespace/name`."""

    job: Key
    """Its owner, `namespace/name`."""

    node: ObjectName
    """Where it runs."""

    uid: Annotated[str, Field(min_length=1, max_length=63)]
    """Of the pod, so that no other of its name is deleted."""

    gpus: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """GPUs that it gives back."""

    estimated_lost_s: Annotated[Number, Field(alias="estimatedLostSeconds")] = 0.0
    """GPU-seconds of work that were not durable when it was chosen."""


_REAL = ("pool", "flavor", "gpus", "reason", "deadline", "victims")


class ReclaimSpec(Part):
    """What was decided, written once: a new leader finishes it from here."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {"rule": "self == oldSelf", "message": "spec is immutable"},
            *(
                Rule(
                    rule=f"self.dryRun || has(self.{field})",
                    message=f"{field} is required unless dryRun is true",
                    fieldPath=f".{field}",
                )
                for field in _REAL
            ),
            {
                "rule": "!self.dryRun || !has(self.victims)",
                "message": "victims are what a dry run answers; leave them out",
                "fieldPath": ".victims",
            },
            {
                "rule": "!self.dryRun || has(self.multiplier) != has(self.gpus)",
                "message": "a dry run asks for either multiplier or gpus",
                "fieldPath": ".multiplier",
            },
            {
                "rule": "!self.dryRun || self.forRef.kind == 'InferenceDeployment'",
                "message": "a dry run asks for an InferenceDeployment",
                "fieldPath": ".forRef.kind",
            },
            {
                "rule": "self.dryRun || !has(self.multiplier)",
                "message": "multiplier is for dry runs",
                "fieldPath": ".multiplier",
            },
        )
    )

    for_ref: ForRef
    pool: Name | None = None
    """Where the GPUs are."""

    flavor: Name | None = None
    """Their type."""

    gpus: Positive | None = None
    """How many are wanted."""

    reason: Reason | None = None
    """Why."""

    deadline: PositiveDuration | None = None
    """A victim that is not gone by then is reported."""

    victims: (
        Annotated[
            tuple[PlannedVictim, ...], Field(min_length=1, max_length=MAX_VICTIMS, json_schema_extra=list_map("pod"))
        ]
        | None
    ) = None
    """Who leaves; all of them stand here before the first one is told."""

    dry_run: Bool = False
    """Answer in status what would happen, and do nothing."""

    multiplier: Decimal | None = None
    """Dry run: so many times the traffic of now."""

    @model_validator(mode="after")
    def _is_a_plan_or_a_question(self) -> Self:
        if self.dry_run:
            if self.victims is not None:
                raise ValueError("victims are what a dry run answers; leave them out")
            if (self.multiplier is None) == (self.gpus is None):
                raise ValueError("a dry run asks for either multiplier or gpus")
            if self.for_ref.kind != "InferenceDeployment":
                raise ValueError("forRef.kind: a dry run asks for an InferenceDeployment")
        else:
            missing = next((field for field in _REAL if getattr(self, field) is None), None)
            if missing:
                raise ValueError(f"{missing} is required unless dryRun is true")
            if self.multiplier is not None:
                raise ValueError("multiplier is for dry runs")
        pods = [victim.pod for victim in self.victims or ()]
        if len(pods) != len(set(pods)):
            raise ValueError("victims: each pod may stand there once")
        return self

    @property
    def deadline_s(self) -> float:
        """`deadline` in seconds; 0 in a dry run without one."""
        return seconds(self.deadline or "0s")


class Victim(Seen):
    """What became of a victim."""

    pod: Key
    outcome: Outcome = "Leaving"
    durable_unit: Annotated[int, Field(ge=0)] | None = None
    """Its last durable unit."""

    digest: str | None = None
    """Of that unit, SHA-256."""

    verified: bool | None = None
    """Read back from the ledger; not set: nobody could be asked."""

    freed_at: Moment | None = None
    lost_s: Annotated[float, Field(ge=0, alias="lostSeconds")] = 0.0


class Timings(Seen):
    """When each step was done."""

    spike_at: Moment | None = None
    decided_at: Moment | None = None
    freed_at: Moment | None = None
    serving_at: Moment | None = None


class StoppedWorker(Seen):
    """A worker that would stop."""

    pod: Key
    job: str | None = None
    node: str | None = None
    flavor: str | None = None
    gpus: Count = 1
    when: Duration
    """From the rise of the traffic on."""

    lost_s: Annotated[float, Field(ge=0, alias="lostSeconds")] = 0.0


class Answer(Seen):
    """What a dry run found."""

    workers: Annotated[tuple[StoppedWorker, ...], Field(max_length=MAX_VICTIMS, json_schema_extra=list_map("pod"))] = ()
    unmet: Count = 0
    """Replicas that could not be had at all."""


class ReclaimStatus(Status):
    """How the take-back went."""

    phase: Phase | None = None
    """Answered and Failed end a dry run."""

    victims: Annotated[tuple[Victim, ...], Field(max_length=MAX_VICTIMS, json_schema_extra=list_map("pod"))] = ()
    timings: Timings = Timings()
    answer: Answer | None = None
    """Of a dry run."""

    took: str | None = None
    """From decision to the last GPU free."""

    lost_s: Annotated[float, Field(ge=0, alias="lostSeconds")] = 0.0
    """All victims together."""


class Reclaim(Resource):
    """One take-back of GPUs with its victims, outcomes and timings; people may only ask, with dryRun."""

    names: ClassVar[KindNames] = RECLAIM
    spec: ReclaimSpec
    status: ReclaimStatus = ReclaimStatus()
