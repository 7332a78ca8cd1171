"""CustomResourceDefinitions, written from the models.

Owns the translation of a pydantic schema into the structural OpenAPI v3 schema that an API server takes, and what a
kind shows in a terminal.  Called by `make crds`; the files stand in `manifests/crd`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slackwater_operator.resources.base import Json, Resource
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.inference import InferenceDeployment
from slackwater_operator.resources.names import CATEGORY, GROUP, VERSION
from slackwater_operator.resources.pool import CapacityPool
from slackwater_operator.resources.reclaim import Reclaim

KINDS: tuple[type[Resource], ...] = (GPUFlavor, CapacityPool, InferenceDeployment, CleaningJob, Reclaim)

_KEPT = (
    "type",
    "format",
    "description",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
"""What both kinds of schema say in the same words."""


@dataclass(frozen=True, slots=True)
class Column:
    """What `kubectl get` prints."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False  # only with `-o wide`

    def entry(self) -> Json:
        """As the CustomResourceDefinition has it."""
        return {
            "name": self.name,
            "type": self.type,
            "jsonPath": self.path,
            **({"priority": 1} if self.wide else {}),
        }


@dataclass(frozen=True, slots=True)
class Scale:
    """What `kubectl scale` reads and writes."""

    wanted: str
    present: str = ".status.replicas"
    selector: str = ".status.selector"


_AGE = Column("Age", ".metadata.creationTimestamp", "date")


def _number(name: str, path: str) -> Column:
    return Column(name, path, "integer")


def _why(condition: str) -> str:
    return f'.status.conditions[?(@.type=="{condition}")].reason'


COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "GPUFlavor": (
        _number("Nodes", ".status.nodes"),
        _number("GPUs", ".status.gpus"),
        Column("Memory", ".spec.memory"),
        Column("Cost", ".spec.hourlyCost"),
        Column("Resource", ".spec.resourceName", wide=True),
        Column("Slurm", ".spec.slurmGres", wide=True),
        _AGE,
    ),
    "CapacityPool": (
        _number("GPUs", ".status.total"),
        _number("Inference", ".status.inference"),
        _number("Training", ".status.training"),
        _number("Cleaning", ".status.cleaning"),
        _number("Idle", ".status.idle"),
        Column("Why", _why("Ready"), wide=True),
        _AGE,
    ),
    "InferenceDeployment": (
        _number("Desired", ".status.desiredReplicas"),
        _number("Ready", ".status.readyReplicas"),
        Column("Mode", ".status.mode"),
        Column("Why", _why("Ready")),
        Column("Lead", ".status.leadTime", wide=True),
        Column("Revision", ".status.servingRevision", wide=True),
        _AGE,
    ),
    "CleaningJob": (
        _number("Workers", ".status.workers.running"),
        _number("Max", ".spec.maxWorkers"),
        _number("Done", ".status.items.done"),
        _number("Items", ".status.items.total"),
        _number("Lost", ".status.lost"),
        Column("Why", _why("Progressing"), wide=True),
        Column("GPU-Seconds", ".status.gpuSeconds", "number", wide=True),
        _AGE,
    ),
    "Reclaim": (
        Column("For", ".spec.forRef.name"),
        _number("GPUs", ".spec.gpus"),
        Column("Phase", ".status.phase"),
        Column("Took", ".status.took"),
        Column("Lost-S", ".status.lostSeconds", "number"),
        Column("Pool", ".spec.pool", wide=True),
        Column("Flavor", ".spec.flavor", wide=True),
        Column("Reason", ".spec.reason", wide=True),
        _AGE,
    ),
}

SCALES: Mapping[str, Scale] = {
    # Traffic decides how many replicas there are; a person decides how many there are at least.
    "InferenceDeployment": Scale(".spec.minReplicas"),
    # Idle GPUs decide how many workers there are; a person decides how many there are at most.
    "CleaningJob": Scale(".spec.maxWorkers"),
}


def structural(model: type[Resource]) -> Json:
    """The structural schema of a kind: no references, no alternatives, defaults and rules in place."""
    document = model.model_json_schema(by_alias=True)
    definitions = document.pop("$defs", {})
    whole = _schema(document, definitions)
    metadata = _schema(document["properties"]["metadata"], definitions)
    return {
        "type": "object",
        "description": whole["description"],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # An API server lets a kind narrow its names, and nothing else of metadata.
            "metadata": {"type": "object", "properties": {"name": metadata["properties"]["name"]}},
            "spec": whole["properties"]["spec"],
            "status": _without_defaults(whole["properties"]["status"]),
        },
    }


def crd(model: type[Resource]) -> Json:
    """The CustomResourceDefinition of a kind."""
    names = model.names
    scale = SCALES.get(names.kind)
    subresources: Json = {"status": {}}
    if scale is not None:
        subresources["scale"] = {
            "specReplicasPath": scale.wanted,
            "statusReplicasPath": scale.present,
            "labelSelectorPath": scale.selector,
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": names.crd},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if names.namespaced else "Cluster",
            "names": {
                "kind": names.kind,
                "listKind": f"{names.kind}List",
                "plural": names.plural,
                "singular": names.singular,
                "shortNames": [names.short],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [column.entry() for column in COLUMNS[names.kind]],
                    "subresources": subresources,
                    "schema": {"openAPIV3Schema": structural(model)},
                }
            ],
        },
    }


def _resolved(schema: Json, definitions: Json) -> Json:
    """A schema without a reference or an optional at its head; what stands beside them wins."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolved(_merged(target, beside), definitions)
    if "anyOf" in schema:
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        beside = {key: value for key, value in schema.items() if key != "anyOf"}
        if len(choices) == 1:
            return _resolved(_merged(choices[0], beside), definitions)
        if {choice.get("type") for choice in choices} == {"string", "integer"}:
            return {"x-kubernetes-int-or-string": True, **beside}
        raise ValueError(f"a structural schema has no alternatives: {choices}")
    return schema


def _merged(under: Json, over: Json) -> Json:
    """Both; their rules add up."""
    rules = "x-kubernetes-validations"
    both = [*under.get(rules, ()), *over.get(rules, ())]
    return under | over | ({rules: both} if both else {})


def _schema(given: Json, definitions: Json) -> Json:
    schema = _resolved(given, definitions)
    made: Json = {key: schema[key] for key in _KEPT if key in schema}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    if "description" in made:
        made["description"] = " ".join(made["description"].split())
    if schema.get("type") == "integer":
        made["format"] = "int32" if schema.get("maximum", 2**63) < 2**31 else "int64"
    if "items" in schema:
        made["items"] = _schema(schema["items"], definitions)
    if "properties" in schema:
        made["properties"] = {name: _schema(one, definitions) for name, one in schema["properties"].items()}
        if schema.get("required"):
            made["required"] = schema["required"]
    beyond = schema.get("additionalProperties")
    if isinstance(beyond, dict):
        made["additionalProperties"] = _schema(beyond, definitions)
    elif beyond is True and schema.get("type") == "object":
        made["x-kubernetes-preserve-unknown-fields"] = True
    made |= {key: value for key, value in schema.items() if key.startswith("x-kubernetes-")}
    if "properties" in made and schema.get("default") is not None:
        # Whole, since an API server asks the rules of an object's default before it fills in those of its fields.
        made["default"] = {name: one["default"] for name, one in made["properties"].items() if "default" in one}
    elif schema.get("default") not in (None, [], {}):
        made["default"] = schema["default"]
    return made


def _without_defaults(schema: Json) -> Json:
    """A status says what was seen; a server that fills in what was not would make it up."""
    bare = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in bare:
        bare["properties"] = {name: _without_defaults(one) for name, one in bare["properties"].items()}
    if "items" in bare:
        bare["items"] = _without_defaults(bare["items"])
    return bare


def documents() -> dict[str, Json]:
    """File name -> CustomResourceDefinition."""
    return {f"{model.names.plural}.yaml": crd(model) for model in KINDS}
