"""From what the API server sends to a typed value, or one line that names the field."""

from typing import Any, TypeVar

from pydantic import ValidationError

from slackwater_operator.core import PermanentError
from slackwater_operator.resources.base import Resource
from slackwater_operator.resources.names import API_VERSION

K = TypeVar("K", bound=Resource)

_MAX_SHOWN_CHARS = 60  # of a value that is wrong


def parse(kind: type[K], obj: dict[str, Any]) -> K:
    """The object as a value.   Raises PermanentError naming object and field."""
    metadata = obj.get("metadata") or {}
    place = "/".join(filter(None, (metadata.get("namespace"), metadata.get("name"))))
    subject = f"{kind.names.kind} {place or 'without a name'}"
    for field, wanted in (("apiVersion", API_VERSION), ("kind", kind.names.kind)):
        # Items of a list come without both.
        if obj.get(field, wanted) != wanted:
            raise PermanentError(f"{subject}: {field}: must be {wanted}, got {obj[field]!r}")
    try:
        return kind.model_validate(obj)
    except ValidationError as error:
        raise PermanentError(f"{subject}: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """The first problem in one line, with its field, what came and how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        said = "unknown field"
    elif first["type"] == "missing":
        said = "is required"
    elif first["type"] == "value_error":
        said = str(first["msg"]).removeprefix("Value error, ")
    else:
        said = f"{first['msg'][0].lower()}{first['msg'][1:]}, got {_shown(first['input'])}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{field}: {said}{more}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
