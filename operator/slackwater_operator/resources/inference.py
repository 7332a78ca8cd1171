"""InferenceDeployment: a speech service, the GPU types it may run on, and how it follows its traffic."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from slackwater_operator.resources.base import (
    LIST_SET,
    Count,
    Duration,
    Name,
    NamedResource,
    Part,
    Positive,
    PositiveDuration,
    Status,
    Url,
    list_map,
    rules,
    seconds,
    with_durations,
)
from slackwater_operator.resources.names import INFERENCE_DEPLOYMENT, KindNames
from slackwater_operator.resources.template import EngineTemplate, PodTemplate

Pools = Annotated[tuple[Name, ...], Field(min_length=1, max_length=16, json_schema_extra=LIST_SET)]


class Variant(Part):
    """How the service runs on one GPU type, in each of its pools that has it."""

    flavor: Name
    """A GPUFlavor."""

    slots_per_replica: Annotated[int, Field(strict=True, ge=1, le=4096)]
    """Requests that one replica decodes at once."""

    gpus: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """GPUs of one replica, all on one node."""

    preference: Annotated[int, Field(strict=True, ge=-1000, le=1000)] = 0
    """The highest is filled first."""


class Objective(Part):
    """What its callers are promised."""

    ttfa_p95: PositiveDuration | None = None
    """Time to first audio, 95th percentile; a guard, since it rises only after traffic did."""

    @property
    def ttfa_p95_s(self) -> float | None:
        """`ttfa_p95` in seconds."""
        return None if self.ttfa_p95 is None else seconds(self.ttfa_p95)


class ScaleDown(Part):
    """How slowly replicas are given up."""

    window: PositiveDuration = "120s"
    """Survivors must have been able to carry the most that was seen in it."""

    deadband: Annotated[int, Field(strict=True, ge=0, le=1000)] = 1
    """Surplus replicas that are tolerated."""

    @property
    def window_s(self) -> float:
        """`window` in seconds."""
        return seconds(self.window)


class Autoscaling(Part):
    """How the number of replicas follows the traffic."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": with_durations(
                    "duration(self.panicWindow) <= duration(self.stableWindow)", "self.panicWindow", "self.stableWindow"
                ),
                "message": "panicWindow must not be longer than stableWindow",
                "fieldPath": ".panicWindow",
            }
        )
    )

    burst_slots: Count = 0
    """Decode slots kept free beside the rise that was measured; they are never lent."""

    objective: Objective = Objective()
    scale_down: ScaleDown = ScaleDown()
    panic_window: PositiveDuration = "6s"
    """The mean over it answers a burst."""

    stable_window: PositiveDuration = "60s"
    """The mean over it carries through the gaps between requests."""

    stale_after: PositiveDuration = "5s"
    """Without a sample for so long nothing shrinks and nothing is evicted for this service."""

    @model_validator(mode="after")
    def _panics_within_the_stable_window(self) -> Self:
        if self.panic_window_s > self.stable_window_s:
            raise ValueError("panicWindow must not be longer than stableWindow")
        return self

    @property
    def panic_window_s(self) -> float:
        """`panic_window` in seconds."""
        return seconds(self.panic_window)

    @property
    def stable_window_s(self) -> float:
        """`stable_window` in seconds."""
        return seconds(self.stable_window)

    @property
    def stale_after_s(self) -> float:
        """`stale_after` in seconds."""
        return seconds(self.stale_after)


class Drain(Part):
    """How a replica leaves."""

    grace: Duration = "120s"
    """For its live streams; the longest is 95 s of audio.  A shorter terminationGracePeriodSeconds is raised to it."""

    @property
    def grace_s(self) -> float:
        """`grace` in seconds."""
        return seconds(self.grace)


class Gateway(Part):
    """Where requests come in and are counted."""

    control_url: Url | None = None
    """The control port of a gateway that somebody else runs; the operator runs one, if left out."""

    replicas: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Pods of the gateway that the operator runs."""

    max_queued: Annotated[int, Field(strict=True, ge=0, le=100_000)] = 256
    """Requests that may wait for a decode slot; the next is refused with 429 and Retry-After."""


class RevisionGate(Part):
    """What a new template must pass before it serves."""

    template: PodTemplate
    """A pod that ends 0 when the revision may serve; it runs once for each revision."""


class InferenceDeploymentSpec(Part):
    """A service, its bounds and its variants."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "self.minReplicas <= self.maxReplicas",
                "message": "maxReplicas must be at least minReplicas",
                "messageExpression": "'maxReplicas must be at least minReplicas: %d is less than %d'"
                ".format([self.maxReplicas, self.minReplicas])",
                "fieldPath": ".maxReplicas",
            }
        )
    )

    model: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the model, told to people and to metrics; the template says how it is loaded."""

    pools: Pools
    """CapacityPools to run in, the first preferred."""

    min_replicas: Count = 1
    """Kept whatever the traffic; `kubectl scale` sets it."""

    max_replicas: Positive
    """Never exceeded, whatever the traffic."""

    variants: Annotated[tuple[Variant, ...], Field(min_length=1, max_length=16, json_schema_extra=list_map("flavor"))]
    """GPU types that it may run on."""

    autoscaling: Autoscaling = Autoscaling()
    drain: Drain = Drain()
    gateway: Gateway = Gateway()
    revision_gate: RevisionGate | None = None
    template: EngineTemplate
    """The operator adds GPUs, node, priority, labels and port 8080."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.min_replicas > self.max_replicas:
            least, most = self.min_replicas, self.max_replicas
            raise ValueError(f"maxReplicas must be at least minReplicas: {most} is less than {least}")
        flavors = [variant.flavor for variant in self.variants]
        if len(flavors) != len(set(flavors)):
            raise ValueError("variants: each flavor may stand there once")
        if len(self.pools) != len(set(self.pools)):
            raise ValueError("pools: each name may stand there once")
        return self


class InferenceDeploymentStatus(Status):
    """How the service stands."""

    replicas: Count = 0
    ready_replicas: Count = 0
    desired_replicas: Count = 0
    selector: str | None = None
    """Labels of its pods, for `kubectl scale` and autoscalers that look at them."""

    mode: Literal["Stable", "Panic", "Hold"] | None = None
    """Hold: signals are stale."""

    serving_revision: str | None = None
    lead_time: str | None = None
    """Measured from decision to serving, the slowest variant's."""


class InferenceDeployment(NamedResource):
    """A speech service whose replicas follow its traffic."""

    names: ClassVar[KindNames] = INFERENCE_DEPLOYMENT
    spec: InferenceDeploymentSpec
    status: InferenceDeploymentStatus = InferenceDeploymentStatus()
