"""`slackwater engine quantize`: a checkpoint folder with its layers in FP8.

Owns the command line, the progress line and the summary; `slackwater_inference.quantize` does the work.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from slackwater_inference.config.published import WeightFormat
from slackwater_inference.core import PermanentError

if TYPE_CHECKING:
    from slackwater_inference.quantize import Progress, Report

_QUIET_S = 2.0  # what is done sooner says nothing on the way
_LINE_S = 10.0  # between two lines where nobody looks at a terminal
_TERMINATED = 128 + signal.SIGTERM


class Format(StrEnum):
    """`blockscale` is what Hopper's kernels multiply; `mxfp8` is Blackwell's own form."""

    BLOCKSCALE = "blockscale"
    MXFP8 = "mxfp8"


_FORMATS = {Format.BLOCKSCALE: WeightFormat.BLOCKSCALE, Format.MXFP8: WeightFormat.MXFP8}


def quantize(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.", metavar="MODEL")],
    out: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.", metavar="OUT")],
    form: Annotated[
        Format, typer.Option("--format", help="blockscale: a scale per 128 x 128; mxfp8: one per 32 values.")
    ] = Format.BLOCKSCALE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write MODEL to the new folder OUT with the layers' weights in FP8; the rest is copied bit for bit."""
    from slackwater_inference.quantize import REPORT, quantize  # imports torch

    with _left_at_sigterm():
        try:
            with _shown_progress() as progress:
                report = quantize(model, out, _FORMATS[form], progress)
        except PermanentError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    for line in _summary(report):
        typer.echo(line)
    typer.echo(f"Each tensor's error is in {out / REPORT}.")


def _summary(report: "Report") -> Iterator[str]:
    """A line for each kind of weight and for each reason, then the sizes."""
    kinds: dict[str, list[tuple[float, str]]] = {}
    for weight in report.quantized:
        kind = ".".join(weight.name.split(".")[-3:-1])
        kinds.setdefault(kind, []).append((weight.relative_error, weight.name))
    for kind, errors in sorted(kinds.items()):
        worst, name = max(errors)
        mean = sum(error for error, _ in errors) / len(errors)
        yield f"{kind}: {len(errors)} in {report.format}, relative error {mean:.2%}, largest {worst:.2%} ({name})"
    reasons: dict[tuple[str, str], list[int]] = {}
    for kept in report.kept:
        reasons.setdefault((kept.dtype, kept.reason), []).append(kept.size_bytes)
    for (dtype, reason), sizes in sorted(reasons.items()):
        yield f"left in {dtype}: {len(sizes)} tensors, {_gb(sum(sizes))} ({reason})"
    yield f"Weights: {_gb(report.before_bytes)} before, {_gb(report.after_bytes)} now."


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.2f} MB"


@contextmanager
def _shown_progress() -> Iterator["Progress"]:
    """A line on stderr that says how far it is: rewritten on a terminal, a new one now and then elsewhere."""
    began_s, last_s = time.monotonic(), time.monotonic()
    is_terminal, is_shown = sys.stderr.isatty(), False

    def show(name: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s, is_shown
        now_s = time.monotonic()
        if now_s - began_s < _QUIET_S or now_s - last_s < (0.2 if is_terminal else _LINE_S):
            return
        last_s, is_shown = now_s, True
        left_s = (now_s - began_s) * (total_bytes - done_bytes) / max(done_bytes, 1)
        line = f"{done_bytes / total_bytes:.0%} of {_gb(total_bytes)}, about {left_s:.0f} s left: {name}"
        typer.echo(f"\r{line:.118}\033[K" if is_terminal else line, err=True, nl=not is_terminal)

    try:
        yield show
    finally:
        if is_terminal and is_shown:
            typer.echo("\r\033[K", err=True, nl=False)


@contextmanager
def _left_at_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the process as an exception does: what was begun is removed."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
