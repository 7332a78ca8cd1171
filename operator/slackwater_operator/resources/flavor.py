"""GPUFlavor: what one type of GPU is, where it is found and what it costs."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from slackwater_operator.resources.base import (
    LIST_ATOMIC,
    Count,
    Decimal,
    NamedResource,
    Part,
    Status,
    rules,
)
from slackwater_operator.resources.names import DEFAULT_GPU_RESOURCE, GPU_FLAVOR, KindNames

LabelName = Annotated[str, Field(max_length=317)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
NodeSelector = Annotated[dict[LabelName, LabelValue], Field(min_length=1, max_length=16)]
"""Labels that a node must have, all of them."""

_KEY_RULE = "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''"


class Toleration(Part):
    """A taint of these nodes that our pods accept, as in a pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {"rule": _KEY_RULE, "message": "value must be empty when operator is Exists", "fieldPath": ".value"},
        )
    )

    key: Annotated[str, Field(max_length=317)] | None = None
    """The taint's key; any, if left out with operator Exists."""

    operator: Literal["Exists", "Equal"] | None = None
    """Equal, if left out."""

    value: Annotated[str, Field(max_length=63)] | None = None
    """The taint's value."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; any, if left out."""

    toleration_seconds: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] | None = None
    """How long NoExecute is put up with; for ever, if left out."""

    @model_validator(mode="after")
    def _exists_has_no_value(self) -> Self:
        if self.operator == "Exists" and self.value:
            raise ValueError("value must be empty when operator is Exists")
        return self


class GPUFlavorSpec(Part):
    """Where GPUs of this type are found, and what is known of them."""

    node_selector: NodeSelector
    """Nodes with GPUs of this type: all of these labels."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16, json_schema_extra=LIST_ATOMIC)] = ()
    """Taints of these nodes that our pods accept."""

    resource_name: Annotated[
        str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9._-]+$")
    ] = DEFAULT_GPU_RESOURCE
    """What the device plugin calls a GPU."""

    memory: Annotated[str, Field(max_length=12, pattern=r"^[1-9][0-9]{0,6}(Mi|Gi|Ti)$")] | None = None
    """Of one GPU, such as 141Gi; told to people, placement goes by flavor."""

    hourly_cost: Decimal | None = None
    """Of one GPU, in any one currency; accounting only."""

    slurm_gres: Annotated[str, Field(max_length=63, pattern=r"^gpu(:[A-Za-z0-9_.-]+)?$")] | None = None
    """What Slurm calls this type, such as gpu:h200."""


class GPUFlavorStatus(Status):
    """What was found."""

    nodes: Count = 0
    gpus: Count = 0


class GPUFlavor(NamedResource):
    """A type of GPU: how its nodes are found and what it costs."""

    names: ClassVar[KindNames] = GPU_FLAVOR
    spec: GPUFlavorSpec
    status: GPUFlavorStatus = GPUFlavorStatus()
