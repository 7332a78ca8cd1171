"""What a cache keeps of an object, so that thousands of pods fit into memory.

`json.loads` makes new strings for the keys of every object; `lean` and `only` share them.
"""

from collections.abc import Callable
from sys import intern
from typing import Any

from slackwater_operator.kube.types import Object

Keep = Callable[[Object], Object]

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_IDENTITY = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.resourceVersion",
    "metadata.generation",
    "metadata.labels",
    "metadata.annotations",
    "metadata.creationTimestamp",
    "metadata.deletionTimestamp",
    "metadata.ownerReferences",
)
_SHORT = 64  # texts up to here repeat from pod to pod: label values, images, phases, node names


def lean(obj: Object) -> Object:
    """All of the object but its managed fields and kubectl's copy of it.  The object itself stays as it is."""
    shared: Object = _shared({key: value for key, value in obj.items() if key != "metadata"})
    metadata = _shared({key: value for key, value in obj.get("metadata", {}).items() if key != "managedFields"})
    (metadata.get("annotations") or {}).pop(_LAST_APPLIED, None)
    return {**shared, "metadata": metadata}


def only(*paths: str) -> Keep:
    """A `keep` that retains these dotted paths, the kind and what identifies and labels an object.

    A path goes through lists: `spec.containers.resources` keeps the resources of each container.
    """
    tree: dict[str, Any] = {}
    for path in ("apiVersion", "kind", *_IDENTITY, *paths):
        branch = tree
        for part in path.split("."):
            branch = branch.setdefault(intern(part), {})

    def keep(obj: Object) -> Object:
        kept: Object = _pick(obj, tree)
        (kept.get("metadata", {}).get("annotations") or {}).pop(_LAST_APPLIED, None)
        return kept

    return keep


def _pick(value: Any, tree: dict[str, Any]) -> Any:
    if not tree:
        return _shared(value)
    if isinstance(value, dict):
        return {key: _pick(value[key], below) for key, below in tree.items() if key in value}
    if isinstance(value, list):
        return [_pick(item, tree) for item in value]
    return value


def _shared(value: Any) -> Any:
    """The same value, with its keys and short texts stored once for all objects."""
    if isinstance(value, dict):
        return {intern(key): _shared(item) for key, item in value.items()}
    if isinstance(value, str):
        return intern(value) if len(value) <= _SHORT else value
    if isinstance(value, list):
        return [_shared(item) for item in value]
    return value
