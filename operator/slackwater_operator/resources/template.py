"""Pod templates inside our kinds: what a person writes, and what is ours to add.

Owns the few fields of a pod spec that we read or refuse; all others pass to the API server as they are, since a copy
of its own schema would make our kinds too large for clients and old with its next release.
"""

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from slackwater_operator.resources.base import MAX_ITEMS, Json, Part, Rule, list_map, rules
from slackwater_operator.resources.names import ENGINE_CONTAINER, GROUP, WORKER_CONTAINER

DEFAULT_GRACE_S = 30  # Kubernetes' own
MAX_GRACE_S = 86_400
OURS = ("nodeName", "schedulerName", "priorityClassName", "restartPolicy")
"""Fields of a pod spec that we set ourselves."""

_NO_GPU = "!self.exists(name, name.contains('gpu') || name.startsWith('nvidia.com/'))"
_GPU_MESSAGE = "GPUs are given by the operator: leave them out of resources"

Amounts = Annotated[
    dict[str, str | Annotated[int, Field(strict=True)]],
    Field(max_length=16, json_schema_extra=rules({"rule": _NO_GPU, "message": _GPU_MESSAGE})),
]


class Open(Part):
    """A part of a pod: fields that are not named here are kept as they came."""

    model_config = ConfigDict(extra="allow")


class Resources(Open):
    """What a container needs beside GPUs."""

    limits: Amounts | None = None
    requests: Amounts | None = None

    @model_validator(mode="after")
    def _leaves_gpus_to_us(self) -> Self:
        for field in ("limits", "requests"):
            if any("gpu" in name or name.startswith("nvidia.com/") for name in getattr(self, field) or ()):
                raise ValueError(f"{field}: {_GPU_MESSAGE}")
        return self


class Container(Open):
    """A container; all its other fields are the API server's to judge."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    image: Annotated[str, Field(min_length=1, max_length=512)]
    resources: Resources | None = None


Containers = Annotated[tuple[Container, ...], Field(max_length=16, json_schema_extra=list_map("name"))]


_NAMES_RULE = "!has(self.initContainers) || !self.initContainers.exists(i, self.containers.exists(c, c.name == i.name))"
_NAMES_MESSAGE = "names must differ from those of containers"


class PodSpec(Open):
    """A pod's spec without what the operator sets: node, scheduler, priority, restart policy and GPUs."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(
                Rule(rule=f"!has(self.{field})", message=f"{field} is set by the operator", fieldPath=f".{field}")
                for field in OURS
            ),
            Rule(rule=_NAMES_RULE, message=_NAMES_MESSAGE, fieldPath=".initContainers"),
        )
    )

    containers: Annotated[Containers, Field(min_length=1)]
    init_containers: Containers = ()
    termination_grace_period_seconds: Annotated[int, Field(strict=True, ge=1, le=MAX_GRACE_S)] = DEFAULT_GRACE_S
    node_name: str | None = None
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    restart_policy: str | None = None

    @model_validator(mode="after")
    def _leaves_to_us_what_is_ours(self) -> Self:
        for name, field in type(self).model_fields.items():
            if field.alias in OURS and getattr(self, name) is not None:
                raise ValueError(f"{field.alias}: it is set by the operator")
        main = [one.name for one in self.containers]
        first = [one.name for one in self.init_containers]
        for which, listed in (("containers", main), ("initContainers", first)):
            if len(listed) != len(set(listed)):
                raise ValueError(f"{which}: each name may stand there once")
        if set(main) & set(first):
            raise ValueError(f"initContainers: {_NAMES_MESSAGE}")
        return self


_OURS_MESSAGE = f"names that begin with {GROUP}/ are the operator's own"
_NOT_OURS: dict[str, Any] = rules(
    {"rule": f"!self.exists(name, name.startsWith('{GROUP}/'))", "message": _OURS_MESSAGE}
)


class PodMeta(Part):
    """Labels and annotations that the pods get beside ours."""

    labels: dict[str, str] = Field(default_factory=dict, max_length=MAX_ITEMS, json_schema_extra=_NOT_OURS)
    """Labels of the pods."""

    annotations: dict[str, str] = Field(default_factory=dict, max_length=MAX_ITEMS, json_schema_extra=_NOT_OURS)
    """Annotations of the pods."""

    @model_validator(mode="after")
    def _leaves_our_names_to_us(self) -> Self:
        for field in ("labels", "annotations"):
            if any(name.startswith(f"{GROUP}/") for name in getattr(self, field)):
                raise ValueError(f"{field}: {_OURS_MESSAGE}")
        return self


class PodTemplate(Part):
    """What a pod is made from."""

    metadata: PodMeta = PodMeta()
    spec: PodSpec

    @property
    def grace_s(self) -> float:
        """How long a pod may take to leave."""
        return float(self.spec.termination_grace_period_seconds)

    @property
    def pod_spec(self) -> Json:
        """The spec as a new dict, for the pod to be made from."""
        return self.spec.dump()


def _needs(container: str) -> dict[str, Any]:
    return rules(
        {
            "rule": f"self.spec.containers.exists(c, c.name == '{container}')",
            "message": f"a container named {container} is required",
            "fieldPath": ".spec.containers",
        }
    )


def _check(template: PodTemplate, container: str) -> None:
    if all(one.name != container for one in template.spec.containers):
        raise ValueError(f"spec.containers: a container named {container} is required")


class EngineTemplate(PodTemplate):
    """Pods of a service's replicas; the container `engine` serves on port 8080."""

    model_config = ConfigDict(json_schema_extra=_needs(ENGINE_CONTAINER))

    @model_validator(mode="after")
    def _has_an_engine(self) -> Self:
        _check(self, ENGINE_CONTAINER)
        return self


class WorkerTemplate(PodTemplate):
    """Pods of a job's workers; the container `worker` ends 0 when done, 75 when preempted with its work durable."""

    model_config = ConfigDict(json_schema_extra=_needs(WORKER_CONTAINER))

    @model_validator(mode="after")
    def _has_a_worker(self) -> Self:
        _check(self, WORKER_CONTAINER)
        return self
