"""What the safetensors files of a folder hold, by their headers and index alone.

Owns reading names, shapes and types, and holding index and shards against each other; reads no tensor.  Called by
`folder`, before anything is loaded.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from slackwater_inference.model.shapes import Shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own bound; a larger length is no header


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor in a file.  dtype: as safetensors spells it, "BF16".   begin: its first byte's place in the file."""

    file: Path
    dtype: str
    shape: Shape
    begin: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, and in memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Headers = dict[str, TensorHeader]


def read_folder(folder: Path) -> tuple[Headers, list[str]]:
    """The tensors of a folder's weights, and one line for each fault; with a fault, the tensors may be incomplete."""
    if (folder / INDEX).exists():
        return _read_shards(folder)
    if (folder / SINGLE).exists():
        return _read_file(folder / SINGLE)
    return {}, [f"{SINGLE} or {INDEX} must be there; weights in another format must be converted to safetensors"]


def _read_shards(folder: Path) -> tuple[Headers, list[str]]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{INDEX} cannot be read: {error}"]
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, [f"{INDEX} must have a weight_map of tensor names to files"]
    headers: Headers = {}
    faults: list[str] = []
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        if Path(shard).name != shard:
            faults.append(f"{INDEX} names {shard}, which is no file of this folder")
            continue
        if not (folder / shard).exists():
            faults.append(f"{shard} is in {INDEX} but not in the folder")
            continue
        found, shard_faults = _read_file(folder / shard)
        faults += shard_faults
        promised = {name for name, file in weight_map.items() if file == shard}
        if not shard_faults:
            faults += [f"{name} is not in {shard}, where {INDEX} has it" for name in sorted(promised - found.keys())]
        for name, header in found.items():
            if name not in weight_map:
                faults.append(f"{name} is in {shard} but not in {INDEX}")
            elif name in headers:
                faults.append(f"{name} is in {headers[name].file.name} and in {shard}; it must be in one")
            headers.setdefault(name, header)
    return headers, faults


def _read_file(path: Path) -> tuple[Headers, list[str]]:
    """The tensors of one file: eight bytes of length, a JSON header, then the data."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            num_header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER_BYTES + 1
            if num_header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
                return {}, [f"{path.name} has no safetensors header in its {size_bytes} bytes; was the copy cut off?"]
            entries = json.loads(file.read(num_header_bytes), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{path.name} cannot be read: {error}"]
    if not isinstance(entries, dict):
        return {}, [f"{path.name} must have a header that maps names to tensors, got {type(entries).__name__}"]
    entries.pop("__metadata__", None)
    headers: Headers = {}
    spans: list[tuple[int, int]] = []
    for name, entry in entries.items():
        try:
            begin, stop = entry["data_offsets"]
            header = TensorHeader(path, entry["dtype"], tuple(entry["shape"]), 8 + num_header_bytes + begin)
            is_whole = all(isinstance(number, int) and number >= 0 for number in (*header.shape, begin))
            is_sound = is_whole and stop - begin == header.size_bytes
        except (KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            return {}, [f"{path.name} has an entry that is no tensor, {name}: {entry}"]
        headers[name] = header
        spans.append((begin, stop))
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            return {}, [f"{path.name} must hold its tensors one behind the other; some overlap or leave gaps"]
        end = stop
    if 8 + num_header_bytes + end != size_bytes:
        return {}, [f"{path.name} must be {8 + num_header_bytes + end} bytes, got {size_bytes}; was the copy cut off?"]
    return headers, []


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys are all different: JSON would keep the last of two tensors of one name."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is in the header twice")
    return values
