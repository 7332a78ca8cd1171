"""`slackwater engine plan`: the memory that a model will take, before anything is loaded.

Owns what the command line says and the table; `budget` owns the arithmetic.  Imports no torch.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slackwater_inference.budget import MAX_SLOTS, Budget, Dtype, Fit, budget, fit
from slackwater_inference.config import EngineConfig, ModelConfig, tiny
from slackwater_inference.folder import BadCheckpoint, inspect

if TYPE_CHECKING:
    from rich.table import Table

_GIB = 1024**3


def plan(
    model: Annotated[str, typer.Argument(help="`tiny`, or a checkpoint folder.", metavar="MODEL")],
    slots: Annotated[int, typer.Option(min=1, max=MAX_SLOTS, help="Requests that run at once.")] = 8,
    length: Annotated[
        int | None, typer.Option(min=64, help="Positions of the longest sequence; default: 4096 or the model's own.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of all weights and the cache; default: as the checkpoint has them.")
    ] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(min=0.1, help="Say what fits into so much memory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as JSON instead of a table.")] = False,
) -> None:
    """Print the memory budget of MODEL; reads headers only."""
    config, in_8_bits = _model(model)
    engine = EngineConfig(max_running_requests=slots, max_length=length)
    if dtype is not None:
        in_8_bits = {}
    dtype = config.weight_dtype if dtype is None else dtype
    try:
        planned = budget(config, engine, dtype, in_8_bits)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    fits = None
    if gpu_memory_gib is not None:
        fits = fit(config, engine, dtype, round(gpu_memory_gib * _GIB), in_8_bits)
    if as_json:
        typer.echo(json.dumps(_as_json(planned, fits), indent=2))
        return
    from rich.console import Console  # slow to import, and --json needs none

    console = Console()
    console.print(_table(planned))
    console.print(
        f"{_number(planned.num_parameters)} parameters, codec {_number(planned.num_codec_parameters)}; "
        f"{planned.kv_bytes_per_token:,} B of KV a token; ~ marks an estimate",
        highlight=False,
    )
    if in_8_bits:
        widened = f"--dtype {dtype} counts what a machine without their kernels takes, which widens them"
        console.print(f"Matrices in 8 bits stay so where kernels multiply them; {widened}", highlight=False)
    if fits is not None:
        console.print(_verdict(planned, fits), highlight=False)


def _model(name: str) -> tuple[ModelConfig, dict[str, int]]:
    """The model's config, and what its weights in 8 bits take."""
    if name == "tiny":
        return tiny(), {}
    try:
        found = inspect(Path(name))
        return found.config, found.bytes_in_8_bits()
    except BadCheckpoint as error:
        raise typer.BadParameter(str(error)) from error


def _as_json(planned: Budget, fits: Fit | None) -> dict[str, Any]:
    data = asdict(planned) | {"total_bytes": planned.total_bytes}
    if fits is not None:
        data["fit"] = asdict(fits)
    return data


def _table(planned: Budget) -> "Table":
    from rich.table import Table

    table = Table(title=f"{planned.model}, {planned.dtype}: {planned.slots} slots of {planned.length} positions")
    table.add_column("")
    table.add_column("size", justify="right")
    table.add_column("how")
    group = ""
    for item in planned.items:
        if item.group != group and group:
            table.add_section()
        group = item.group
        table.add_row(f"{item.group}: {item.name}", _size(item.size_bytes, item.is_estimate), item.note)
    table.add_section()
    table.add_row("total", _size(planned.total_bytes))
    return table


def _size(size_bytes: int, is_estimate: bool = False) -> str:
    unit, name = (_GIB, "GiB") if size_bytes >= _GIB else (1024**2, "MiB")
    return f"{'~' if is_estimate else ''}{size_bytes / unit:,.2f} {name}"


def _number(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _verdict(planned: Budget, fits: Fit) -> str:
    memory = f"{_size(fits.memory_bytes)}, of which {_size(fits.reserve_bytes)} stay free for the driver and libraries"
    if fits.slots == 0:
        return f"Does not fit: not even one slot of {planned.length} positions goes into {memory}."
    most = f"at least {MAX_SLOTS}" if fits.slots == MAX_SLOTS else str(fits.slots)
    holds = f"{most} slots of {planned.length} positions go into {memory}"
    return f"{'Fits' if fits.slots >= planned.slots else 'Does not fit'}: {holds}."
