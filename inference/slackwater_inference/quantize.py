"""An S2-Pro folder written anew with its layers' projections in 8 bits.

Owns which tensors become what, the new folder's files, and the report.  Does not own the arithmetic (the kernels'
references) nor what a folder must hold (`folder`).  Called by `slackwater engine quantize`.

The new folder has the old one's files: the same shards with the same names in them, each quantised weight with its
scales beside it, everything else as it was to the last bit.  It appears under its name whole or not at all, the same
folder gives the same bytes, and no more of it is in memory than some rows of one tensor.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from slackwater_inference.config.published import VERSION, Quantization, WeightFormat
from slackwater_inference.core import PermanentError
from slackwater_inference.folder import BadCheckpoint, CheckpointFolder, inspect
from slackwater_inference.model.eight_bit import Canonical, widened
from slackwater_inference.model.headers import INDEX, SINGLE, Headers, TensorHeader, read_folder
from slackwater_inference.model.scales import (
    CODES_DTYPE,
    SCALES_DTYPES,
    fits_groups,
    is_projection,
    scale_name,
    scale_shape,
)
from slackwater_inference.model.shapes import IGNORED_PREFIXES
from slackwater_inference.model.writer import Entry, TensorsFile
from slackwater_inference.new_folder import copy_file, new_folder, require_room
from slackwater_kernels import reference
from slackwater_kernels.core import GROUP, MxRule

REPORT = "quantization.json"
_RULE = MxRule.RCEIL
_PIECE_BYTES = 4 * 1024**2  # of a tensor at a time; in fp32 and fp64, to tell the error, some ten times as much
_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_CONFIG, _INDENT = "config.json", 2

Progress = Callable[[str, int, int], None]
"""What is being written, bytes read so far, bytes to read."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """One weight in 8 bits.

    relative_error: norm of the difference over norm of the weight.   max_error: the largest difference.
    """

    name: str
    shape: tuple[int, ...]
    before_bytes: int
    after_bytes: int  # with the scales
    relative_error: float
    max_error: float


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor that was copied, and why."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a model's tensors; also in the new folder, as quantization.json."""

    format: WeightFormat
    version: int
    quantized: tuple[Quantized, ...]
    kept: tuple[Kept, ...]
    before_bytes: int
    after_bytes: int


def quantize(
    model: Path, out: Path, form: WeightFormat = WeightFormat.BLOCKSCALE, progress: Progress = lambda *_: None
) -> Report:
    """Write `model`, a folder that `checkpoint.load` reads, to the new folder `out`.

    Raises BadCheckpoint for a folder that cannot be loaded, PermanentError where `out` exists or is being written,
    the disk has no room, a weight is not finite, or nothing can be quantised.  `out` is then not there.
    """
    found = inspect(model)
    if found.quantization is not None:
        raise PermanentError(
            f"{model} is in {found.quantization.format} already; quantise the folder that it came from"
        )
    headers, faults = read_folder(model)
    if faults:  # the folder changed since
        raise BadCheckpoint(model, faults)
    chosen = {name for name in headers if _reason(name, headers[name]) is None}
    if not chosen:
        reasons = sorted({str(_reason(name, header)) for name, header in headers.items() if is_projection(name)})
        raise PermanentError(f"no weight of {model} can be quantised: {'; '.join(reasons)}")
    try:
        return _write(found, headers, chosen, out, form, progress)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise PermanentError(
            f"{out} could not be written: {error.strerror or error}{where}; what was begun of it is removed"
        ) from error


def _reason(name: str, header: TensorHeader) -> str | None:
    """Why a tensor is copied, or None if it is quantised."""
    if name.startswith(IGNORED_PREFIXES):
        return "not read by the engine"
    if is_projection(name):
        return None if fits_groups(header.shape) else f"its rows are no multiple of {GROUP} values"
    if len(header.shape) < 2:
        return "a vector"
    if name.endswith("embeddings.weight"):
        return "a table: its rows are looked up"
    return "outside the layers: a head or a projection between the parts"


def _write(
    found: CheckpointFolder, headers: Headers, chosen: set[str], out: Path, form: WeightFormat, progress: Progress
) -> Report:
    shards: dict[Path, list[str]] = {}
    for name, header in headers.items():
        shards.setdefault(header.file, []).append(name)
    others = [
        path
        for path in sorted(found.path.iterdir())
        if path.is_file() and path not in shards and path.name not in (_CONFIG, INDEX, SINGLE, REPORT)
        if not path.name.startswith(".")
    ]
    planned = {file: list(_entries(names, headers, chosen, form)) for file, names in sorted(shards.items())}
    before = sum(header.size_bytes for header in headers.values())
    after = sum(entry.size_bytes for entries in planned.values() for entry in entries)
    with new_folder(out) as folder:
        require_room(folder, after + sum(path.stat().st_size for path in others), out)
        done = _Done(progress, before + sum(path.stat().st_size for path in others))
        quantized: list[Quantized] = []
        for file, entries in planned.items():
            with file.open("rb") as source, TensorsFile(folder / file.name, entries) as target:
                for name in sorted(shards[file]):
                    if name in chosen:
                        quantized.append(_quantize(name, headers[name], source, target, form, done))
                    else:
                        _copy(name, headers[name], source, target, done)
        for path in others:
            copy_file(path, folder / path.name)
            done.add(path.name, path.stat().st_size)
        report = Report(
            form, VERSION, tuple(sorted(quantized, key=lambda q: q.name)), _kept(headers, chosen), before, after
        )
        _write_json(folder / REPORT, asdict(report))
        _write_json(folder / _CONFIG, _config(found.path, form))
        if (found.path / INDEX).exists():
            _write_json(folder / INDEX, _index(planned, after))
    return report


def _entries(names: list[str], headers: Headers, chosen: set[str], form: WeightFormat) -> Iterator[Entry]:
    for name in names:
        header = headers[name]
        if name in chosen:
            yield Entry(name, CODES_DTYPE, header.shape)
            yield Entry(scale_name(name), SCALES_DTYPES[form], scale_shape(form, header.shape))
        else:
            yield Entry(name, header.dtype, header.shape)


def _kept(headers: Headers, chosen: set[str]) -> tuple[Kept, ...]:
    return tuple(
        Kept(name, header.shape, header.dtype, header.size_bytes, str(_reason(name, header)))
        for name, header in sorted(headers.items())
        if name not in chosen
    )


class _Done:
    """How far the work is."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress, self._total_bytes, self._bytes = progress, total_bytes, 0

    def add(self, name: str, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._progress(name, self._bytes, self._total_bytes)


def _copy(name: str, header: TensorHeader, source: BinaryIO, target: TensorsFile, done: _Done) -> None:
    for offset in range(0, header.size_bytes, _PIECE_BYTES):
        data = _read(name, header, source, offset, min(_PIECE_BYTES, header.size_bytes - offset))
        target.write(name, offset, data)
        done.add(name, len(data))


def _quantize(
    name: str, header: TensorHeader, source: BinaryIO, target: TensorsFile, form: WeightFormat, done: _Done
) -> Quantized:
    """Blocks of 128 rows have scales of their own, so some of them at a time give what the whole would."""
    n, k = header.shape
    row_bytes = header.size_bytes // n
    num_rows = max(1, _PIECE_BYTES // (GROUP * row_bytes)) * GROUP
    scale_offset, error_squares, squares, max_error = 0, 0.0, 0.0, 0.0
    for start in range(0, n, num_rows):
        data = _read(name, header, source, start * row_bytes, min(num_rows, n - start) * row_bytes)
        rows = torch.frombuffer(data, dtype=_TYPES[header.dtype]).view(-1, k)
        if not rows.isfinite().all():
            row, column = (~rows.isfinite()).nonzero()[0].tolist()
            raise PermanentError(
                f"{name} is {rows[row, column].item()} at [{start + row}, {column}]; such a model only makes noise"
            )
        small = _small(rows, form)
        target.write(name, start * k, _bytes_of(small.codes))
        target.write(scale_name(name), scale_offset, _bytes_of(small.scales))
        scale_offset += small.scales.nbytes
        exact = rows.double()
        error = widened(small, torch.float32).double() - exact
        error_squares += error.square().sum().item()
        squares += exact.square().sum().item()
        max_error = max(max_error, error.abs().max().item())
        done.add(name, len(data))
    relative = math.sqrt(error_squares / squares) if squares else 0.0
    after = n * k + scale_offset
    return Quantized(name, header.shape, header.size_bytes, after, _rounded(relative), _rounded(max_error))


def _small(rows: Tensor, form: WeightFormat) -> Canonical:
    return reference.quantize_weight(rows) if form is WeightFormat.BLOCKSCALE else reference.quantize_mx(rows, _RULE)


def _rounded(value: float) -> float:
    """Six digits: sums may differ behind them with the number of threads, and the report must not."""
    return float(f"{value:.6g}")


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _read(name: str, header: TensorHeader, source: BinaryIO, offset: int, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    source.seek(header.begin + offset)
    if source.readinto(data) != size_bytes:  # type: ignore[attr-defined]  # every file object that `open` gives has it
        raise PermanentError(f"{header.file} ends inside {name}; was it changed meanwhile?")
    return data


def _config(model: Path, form: WeightFormat) -> dict[str, Any]:
    """config.json with what readers of the field look for, and behind it what we hold a folder to."""
    config: dict[str, Any] = json.loads((model / _CONFIG).read_text(encoding="utf-8"))
    ours: dict[str, Any] = {"format": form.value, "version": VERSION}
    if form is WeightFormat.MXFP8:
        theirs = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
        ours["rule"] = _RULE.value
    else:
        theirs = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}
    Quantization.model_validate(ours)
    return config | {"quantization_config": {"fmt": "e4m3", "activation_scheme": "dynamic"} | theirs | ours}


def _index(planned: dict[Path, list[Entry]], size_bytes: int) -> dict[str, Any]:
    names = {entry.name: file.name for file, entries in planned.items() for entry in entries}
    return {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(names.items()))}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=_INDENT, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
