"""JSON merge patch and a plain server-side apply, for the pretended API server.

Apply treats lists as one value, but for lists of objects with a `type` (conditions), which are merged by it.
The real server knows each list's rule from its schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from slackwater_operator.kube.types import Object

Path = tuple[str, ...]
_GIVEN = ("apiVersion", "kind")  # part of every body, owned by nobody


def merge_patch(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return deepcopy(patch)
    merged = dict(deepcopy(old)) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def apply_patch(old: Object, before: Object, mine: Object, others: Sequence[Object]) -> Object:
    """old with all of mine, and without what `before` had of mine, unless others have it too."""
    new = deepcopy(old)
    kept = {path for body in (mine, *others) for path, _ in leaves(body)}
    for path, _ in leaves(before):
        if path not in kept:
            _remove(new, path)
    for path, value in leaves(mine):
        _set(new, path, deepcopy(value))
    return new


def conflicts(mine: Object, others: Mapping[tuple[str, str], Object]) -> list[tuple[str, str]]:
    """(field, manager) of the fields of mine that others have applied with another value."""
    wanted = dict(leaves(mine))
    return [
        (".".join(path), manager)
        for (manager, _), body in others.items()
        for path, value in leaves(body)
        if path in wanted and wanted[path] != value
    ]


def leaves(value: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The fields of a body; `[type=Ready]` is the step into an item of a list that is merged by type."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            if at or key not in _GIVEN:
                yield from leaves(item, (*at, key))
    elif _by_type(value):
        for item in value:
            yield (*at, f"[type={item['type']}]"), item
    elif at and at[:2] not in (("metadata", "name"), ("metadata", "namespace"), ("metadata", "resourceVersion")):
        yield at, value


def _by_type(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "type" in item for item in value)


def _set(obj: Any, path: Path, value: Any) -> None:
    *way, last = path
    at = obj
    for step, following in zip(way, path[1:], strict=True):
        empty: Any = [] if following.startswith("[type=") else {}
        if not isinstance(at.get(step), type(empty)):
            at[step] = empty
        at = at[step]
    if not last.startswith("[type="):
        at[last] = value
        return
    same = [index for index, item in enumerate(at) if item.get("type") == value["type"]]
    if same:
        at[same[0]] = value
    else:
        at.append(value)


def _remove(obj: Any, path: Path) -> None:
    *way, last = path
    for step in way:
        obj = obj.get(step) if isinstance(obj, dict) else None
    if isinstance(obj, list):
        obj[:] = [item for item in obj if f"[type={item.get('type')}]" != last]
    elif isinstance(obj, dict):
        obj.pop(last, None)
