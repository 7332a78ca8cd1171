"""What the five kinds have in common: metadata, durations, decimal strings, pod templates.

Owns the types of fields and the rules that the API server shares with us; owns no kind.  Spec fields are strict, as
the server is: no string is taken for a number.
"""

import re
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StrictBool
from pydantic.alias_generators import to_camel

from slackwater_operator.resources.names import KindNames

Json = dict[str, Any]

MAX_GPUS = 100_000
MAX_ITEMS = 64  # of a list in a spec; it also bounds what a CEL rule may cost
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = "^([0-9]{1,5}([.][0-9]{1,3})?(ms|s|m|h)){1,3}$"
_DURATION_MESSAGE = "must be a duration such as 8s, 250ms or 1m30s"
_DECIMAL = r"^[0-9]{1,6}(\.[0-9]{1,4})?$"
_FRACTION = r"^(0(\.[0-9]{1,4})?|1(\.0{1,4})?)$"
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_DNS_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class Rule(TypedDict, total=False):
    """One `x-kubernetes-validations` entry; beside each stands a validator that says the same here."""

    rule: str
    message: str
    messageExpression: str  # CEL too, with the numbers: by `format`, since no server bounds what joining texts may cost
    fieldPath: str
    reason: str


def rules(*given: Rule) -> dict[str, Any]:
    """CEL rules for `json_schema_extra`."""
    return {"x-kubernetes-validations": [dict(rule) for rule in given]}


def list_map(*keys: str) -> dict[str, Any]:
    """A list whose items have unique keys, so that several appliers can each own items."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


LIST_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
LIST_ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}


@lru_cache(1024)  # the same few, for each service and job in each tick
def seconds(duration: str) -> float:
    """A duration string in seconds."""
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", duration)
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def duration(length_s: float) -> str:
    """Seconds as a duration string, to the millisecond."""
    whole = round(max(0.0, length_s) * 1000)
    return f"{whole // 1000}s" if whole % 1000 == 0 else f"{whole / 1000:.3f}".rstrip("0") + "s"


def with_durations(rule: str, *fields: str) -> str:
    """A CEL rule that says nothing of fields that are no durations: their own rule does, and one message is enough."""
    return " || ".join([*(f"!{field}.matches('{_DURATION}')" for field in fields), rule])


def _must_be_a_duration(value: str) -> str:
    # Not `pattern`, whose message would be the expression itself, here and at the API server.
    if not re.fullmatch(_DURATION, value):
        raise ValueError(f"{_DURATION_MESSAGE}, got {value!r}")
    return value


def _longer_than_nothing(value: str) -> str:
    if seconds(value) <= 0:
        raise ValueError("must be longer than 0s")
    return value


_FORM: Rule = {"rule": f"self.matches('{_DURATION}')", "message": _DURATION_MESSAGE}
_POSITIVE: Rule = {
    "rule": with_durations("duration(self) > duration('0s')", "self"),
    "message": "must be longer than 0s",
}

Name = Annotated[str, Field(min_length=1, max_length=40, pattern=_DNS_LABEL)]
"""Name of one of our objects, short enough for a label's value and the names of what we make for it."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=_DNS_NAME)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_GPUS)]
Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)]
Number = Annotated[float, Field(strict=True, ge=0)]
Bool = StrictBool
Duration = Annotated[str, AfterValidator(_must_be_a_duration), Field(max_length=32, json_schema_extra=rules(_FORM))]
"""As Go writes it: 250ms, 20s, 1m30s."""

PositiveDuration = Annotated[
    Duration, AfterValidator(_longer_than_nothing), Field(json_schema_extra=rules(_FORM, _POSITIVE))
]
Decimal = Annotated[str, Field(max_length=11, pattern=_DECIMAL)]
Fraction = Annotated[str, Field(max_length=6, pattern=_FRACTION)]
Url = Annotated[str, Field(max_length=253, pattern=r"^https?://[^/ ]+(/[^ ]*)?$")]
AbsolutePath = Annotated[str, Field(max_length=253, pattern=r"^/")]
Moment = AwareDatetime


def field_name(attribute: str) -> str:
    """An attribute's name in the API: camelCase, with GPU and URL as the field writes them."""
    return re.sub(r"(?<=[a-z])(Gpu|Url)(?=s?$)", lambda found: found.group().upper(), to_camel(attribute))


class Part(BaseModel):
    """A part of a spec: unknown fields are errors, values are fixed once read."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        alias_generator=field_name,
        validate_by_name=True,
        validate_by_alias=True,
    )

    def dump(self) -> Json:
        """As it stands in the API server: camelCase, nothing that is not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Seen(Part):
    """A part of a status: fields of another version's operator are passed over."""

    model_config = ConfigDict(extra="ignore")


class OwnerReference(Seen):
    """Who made an object."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False


class Meta(Seen):
    """What we use of an object's metadata."""

    name: ObjectName
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: Moment | None = None
    deletion_timestamp: Moment | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def key(self) -> str:
        """`namespace/name`, or the name of a cluster-wide object."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class NamedMeta(Meta):
    """Metadata of a kind whose names become labels and parts of other names."""

    name: Name


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Seen):
    """One state of an object; a type that is not listed is Unknown."""

    type: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z]*$")]
    status: ConditionStatus
    reason: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z]*$")]
    """One of a closed set for each kind."""

    message: Annotated[str, Field(max_length=4096)] = ""
    last_transition_time: Moment
    observed_generation: Annotated[int, Field(ge=0)] = 0


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=list_map("type"))]


class Status(Seen):
    """What every status has."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this status speaks of."""

    conditions: Conditions = ()

    def condition(self, type_: str) -> Condition | None:
        """The condition of that type."""
        return next((one for one in self.conditions if one.type == type_), None)


class Resource(Part):
    """An object of one of our kinds."""

    model_config = ConfigDict(extra="ignore")  # apiVersion and kind are checked by `parse`

    names: ClassVar[KindNames]
    metadata: Meta

    @property
    def key(self) -> str:
        """`namespace/name`, or the name of a cluster-wide object."""
        return self.metadata.key


class NamedResource(Resource):
    """An object whose name becomes a label's value and a part of other names."""

    metadata: NamedMeta
