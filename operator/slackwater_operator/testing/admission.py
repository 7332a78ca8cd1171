"""Judges objects by a CustomResourceDefinition as an API server does, without one.

In its order: unknown fields (strict field validation), defaults, the schema, unique items, then the CEL rules.  It is a
fast first judge; tests/controlplane asks a real API server the same questions.
"""

import copy
from collections.abc import Iterator
from typing import Any

import cel
import jsonschema_rs

Schema = dict[str, Any]
_OPEN = "x-kubernetes-preserve-unknown-fields"


class Admission:
    """One kind's door."""

    def __init__(self, definition: dict[str, Any]) -> None:
        [version] = definition["spec"]["versions"]
        self._schema: Schema = version["schema"]["openAPIV3Schema"]
        self._validator = jsonschema_rs.Draft4Validator(_plain(self._schema), validate_formats=True)

    def admitted(self, obj: dict[str, Any]) -> dict[str, Any]:
        """The object as it would be stored: with its defaults."""
        stored = copy.deepcopy(obj)
        _fill(self._schema, stored)
        return stored

    def refusals(self, obj: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
        """Everything that is wrong, each with its field; empty if the object is taken."""
        if unknown := [f"unknown field {path}" for path in _unknown(self._schema, obj, "")]:
            return unknown
        stored = self.admitted(obj)
        wrong = [
            f"{'.'.join(map(str, error.instance_path))}: {error.message}"
            for error in self._validator.iter_errors(stored)
        ]
        wrong += _repeated(self._schema, stored, "")
        # The API server, too, does not ask its rules about an object that does not fit the schema.
        return wrong or broken(self._schema, stored, old and self.admitted(old), "")


def _plain(schema: Schema) -> Schema:
    """The schema in the words of JSON Schema alone."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if "properties" in kept:
        kept["properties"] = {name: _plain(one) for name, one in kept["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in kept:
            kept[key] = _plain(kept[key])
    return kept


def _fill(schema: Schema, value: Any) -> None:
    if isinstance(value, dict):
        for name, one in schema.get("properties", {}).items():
            if name not in value and "default" in one:
                value[name] = copy.deepcopy(one["default"])
            if name in value:
                _fill(one, value[name])
    elif isinstance(value, list):
        for item in value:
            _fill(schema.get("items", {}), item)


def _unknown(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name, one in value.items():
            at = f"{path}.{name}".lstrip(".")
            if name in known:
                if at != "metadata":  # the server's own type
                    yield from _unknown(known[name], one, at)
            elif "additionalProperties" not in schema and not schema.get(_OPEN):
                yield at
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _unknown(schema.get("items", {}), item, f"{path}[{number}]")


def _repeated(schema: Schema, value: Any, path: str) -> list[str]:
    if isinstance(value, dict):
        return [
            found
            for name, one in value.items()
            for found in _repeated(schema.get("properties", {}).get(name, {}), one, f"{path}.{name}".lstrip("."))
        ]
    if not isinstance(value, list):
        return []
    kind = schema.get("x-kubernetes-list-type")
    keys = schema.get("x-kubernetes-list-map-keys", [])
    seen = [[item.get(key) for key in keys] if kind == "map" and isinstance(item, dict) else item for item in value]
    found = [f"{path}: Duplicate value" for at, one in enumerate(seen) if kind in ("map", "set") and one in seen[:at]]
    return found + [
        deeper
        for number, item in enumerate(value)
        for deeper in _repeated(schema.get("items", {}), item, f"{path}[{number}]")
    ]


def broken(schema: Schema, value: Any, old: Any, path: str) -> list[str]:
    """The rules that a value breaks, here and further down."""
    found = list[str]()
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue  # a rule about changes does not look at what is new
        if not _holds(rule["rule"], value, old):
            said = _evaluated(rule.get("messageExpression", "''"), value, old) or rule["message"]
            found.append(f"{path}{rule.get('fieldPath', '')}: {said}")
    if isinstance(value, dict):
        for name, one in schema.get("properties", {}).items():
            if name in value:
                before = old.get(name) if isinstance(old, dict) else None
                found += broken(one, value[name], before, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            found += broken(schema.get("items", {}), item, None, f"{path}[{number}]")
    return found


def _holds(rule: str, value: Any, old: Any) -> bool:
    return _evaluated(rule, value, old) is True


def _evaluated(expression: str, value: Any, old: Any) -> Any:
    """None for one that cannot be evaluated."""
    context = cel.Context({"self": value, "oldSelf": old})
    context.add_function("sum", sum)  # functions of the API server's own
    context.add_function("format", lambda text, values: text % tuple(values))
    try:
        return cel.evaluate(expression, context)
    except (KeyError, RuntimeError):  # a field that is not there; a duration that is none
        return None
