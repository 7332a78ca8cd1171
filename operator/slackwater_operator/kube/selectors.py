"""Label and field selectors in the text form of the API, judged here.

The server judges them for lists and watches; a cache must judge them itself for the objects that it is
told about by hand.  Supports all of the label grammar and `=`, `==`, `!=` of field selectors.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_SET = re.compile(r"^(?P<key>\S+)\s+(?P<verb>in|notin)\s*\((?P<values>[^)]*)\)$")
_EQUAL = re.compile(r"^(?P<key>[^!=\s]+)\s*(?P<verb>!=|==|=)\s*(?P<value>\S*)$")

Lookup = Callable[[str], str | None]


def matches(obj: Mapping[str, Any], labels: str = "", fields: str = "") -> bool:
    """Does the object match both selectors?  Raises ValueError for one that is malformed."""
    if labels:
        own = obj.get("metadata", {}).get("labels") or {}
        if not all(_holds(term, own.get) for term in _terms(labels)):
            return False
    return not fields or all(_holds(term, lambda path: _field(obj, path)) for term in _terms(fields))


def equals(labels: Mapping[str, str]) -> str:
    """The selector of objects that carry all of these labels."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


@lru_cache(maxsize=256)
def _terms(selector: str) -> tuple[tuple[str, str, frozenset[str]], ...]:
    """(key, verb, values) for each term; commas inside parentheses do not part terms."""
    return tuple(_term(text.strip()) for text in re.split(r",(?![^(]*\))", selector) if text.strip())


def _term(text: str) -> tuple[str, str, frozenset[str]]:
    if found := _SET.match(text):
        values = frozenset(value.strip() for value in found["values"].split(","))
        return found["key"], found["verb"], values
    if found := _EQUAL.match(text):
        return found["key"], "notin" if found["verb"] == "!=" else "in", frozenset({found["value"]})
    if re.fullmatch(r"![^!=\s]+", text):
        return text[1:], "absent", frozenset()
    if re.fullmatch(r"[^!=\s]+", text):
        return text, "present", frozenset()
    raise ValueError(f"{text!r} is no selector term")


def _holds(term: tuple[str, str, frozenset[str]], lookup: Lookup) -> bool:
    key, verb, values = term
    value = lookup(key)
    match verb:
        case "in":
            return value in values
        case "notin":
            return value not in values
        case "present":
            return value is not None
        case _:
            return value is None


def _field(obj: Mapping[str, Any], path: str) -> str | None:
    """A field as selectors compare it: absent and empty are the same."""
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
