"""Renders the chart's templates without Helm.

Owns the part of Go templates that `chart` writes: if, range, pipelines of field, string and the functions quote,
default, toYaml, nindent and .Files.Get.  Anything else is refused.  For tests; Helm itself renders for people.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slackwater_manifests.kustomize import LOADER

ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)


def render(chart: Path, values: Mapping[str, Any], *, namespace: str) -> list[dict[str, Any]]:
    """Every object of the chart, in the order of its templates.  values: merged over the chart's own."""
    root = {
        "Values": _merged(yaml.safe_load((chart / "values.yaml").read_text()), values),
        "Chart": {"AppVersion": yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]},
        "Release": {"Namespace": namespace},
    }
    objects = []
    for template in sorted((chart / "templates").glob("*.yaml")):
        text = _Template(template.read_text(), chart, root).text()
        objects += [one for one in yaml.load_all(text, LOADER) if one]
    return objects


def _merged(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict) and isinstance(theirs, Mapping):
        return ours | {key: _merged(ours.get(key), value) for key, value in theirs.items()}
    return theirs


class _Template:
    """One template: its pieces in turn are text, an action, text, ..."""

    def __init__(self, source: str, chart: Path, root: dict[str, Any]) -> None:
        self._chart = chart
        self._root = root
        self._pieces: list[tuple[bool, str]] = []  # is it an action; what
        at = 0
        trim = False
        for found in ACTION.finditer(source):
            before = source[at : found.start()]
            before = before.lstrip() if trim else before
            self._pieces += [(False, before.rstrip() if found[1] else before), (True, found[2])]
            trim = bool(found[3])
            at = found.end()
        self._pieces.append((False, source[at:].lstrip() if trim else source[at:]))

    def text(self) -> str:
        """The whole of it."""
        out, at = self._block(0, self._root, is_on=True)
        if at != len(self._pieces):
            raise ValueError("an end without its if or range")
        return out

    def _block(self, at: int, dot: Any, *, is_on: bool) -> tuple[str, int]:
        """From piece `at` to the `end` of this block: what it gives, and the place after that."""
        out = ""
        while at < len(self._pieces):
            is_action, piece = self._pieces[at]
            at += 1
            word, _, rest = piece.partition(" ")
            if not is_action:
                out += piece if is_on else ""
            elif piece == "end":
                return out, at
            elif word == "if":
                inner, at = self._block(at, dot, is_on=is_on and bool(self._value(rest, dot)))
                out += inner
            elif word == "range":
                items = self._value(rest, dot) if is_on else []
                after = self._block(at, dot, is_on=False)[1]
                out += "".join(self._block(at, item, is_on=True)[0] for item in items)
                at = after
            elif is_on:
                value = self._value(piece, dot)
                out += value if isinstance(value, str) else json.dumps(value)
        return out, at

    def _value(self, pipeline: str, dot: Any) -> Any:
        value: Any = None
        for index, step in enumerate(re.split(r"\s*\|\s*", pipeline)):
            name, *arguments = re.findall(r'"[^"]*"|\S+', step)
            given = [self._operand(argument, dot) for argument in arguments]
            match name:
                case "quote":
                    value = json.dumps(value)
                case "default":
                    value = value or given[0]
                case "toYaml":
                    value = yaml.safe_dump(given[0], sort_keys=False).rstrip()
                case "nindent":
                    value = "\n" + "\n".join(" " * given[0] + line if line else "" for line in value.split("\n"))
                case ".Files.Get":
                    value = (self._chart / given[0]).read_text()
                case _ if index == 0 and not arguments:
                    value = self._operand(name, dot)
                case _:
                    raise ValueError(f"{step!r} is not understood here")
        return value

    def _operand(self, text: str, dot: Any) -> Any:
        if text.startswith('"'):
            return text[1:-1]
        if text.isdigit():
            return int(text)
        if text == ".":
            return dot
        if not re.fullmatch(r"\$?(\.\w+)+", text):
            raise ValueError(f"{text!r} is not understood here")
        value = self._root if text.startswith("$") else dot
        for field in text.lstrip("$").strip(".").split("."):
            value = value[field]
        return value
