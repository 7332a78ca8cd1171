"""What every YAML file of ours has in common: how it is read, and how an error in it is said.

Owns the rules of a section, the types that several files use, and the one line that names file and key.  Owns no
key of any file.  Called by the `config` of this room and of the Slurm room.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slackwater_operator.core import PermanentError

_MAX_SHOWN_CHARS = 60  # of a value that is wrong

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0)]
StepSettings = dict[str, str | int | float | bool]
"""Settings of the cleaning steps, as `slackwater clean run --set` takes them."""


class Section(BaseModel):
    """A part of a file: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


File = TypeVar("File", bound=Section)


def read(path: Path, model: type[File], sample: str) -> File:
    """Read and check a file; its paths are as they stand in it.

    sample: a file that shows every key.   Raises PermanentError with one line that names the file and the key.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PermanentError(f"cannot read the configuration {path}: {error}") from error
    except yaml.YAMLError as error:
        raise PermanentError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise PermanentError(f"{path} must hold a mapping of settings; see {sample}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise PermanentError(f"{path}: {explain(error, model)}") from error


def explain(error: ValidationError, model: type[Section]) -> str:
    """The first problem in one line, with its key, what came and how many more there are."""
    problems = error.errors()
    first = problems[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        names = known_keys(model, first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), names, n=1)
        said = f"unknown key; did you mean {close[0]!r}?" if close else f"unknown key; known are {', '.join(names)}"
    elif first["type"] == "missing":
        said = "is required"
    else:
        said = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":
            said = f"{said[0].lower()}{said[1:]}, got {_shown(first['input'])}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{key}: {said}{more}" if key else f"{said}{more}"


def known_keys(model: type[Section], place: tuple[int | str, ...]) -> list[str]:
    """The keys that the section at `place` in a file of `model` may have."""
    for part in place:
        if isinstance(part, str):
            model = _section_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _section_in(annotation: Any) -> type[Section] | None:
    """The section in an annotation such as `Inference | None` or `tuple[Cleaning, ...]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_in(inner))), None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
