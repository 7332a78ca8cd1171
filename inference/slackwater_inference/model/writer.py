"""Writes a safetensors file in pieces, so that neither the file nor a large tensor is ever in memory whole.

Owns the format as a writer sees it: the header, the order of tensors, their places.  The same tensors give the same
bytes.  Called by `quantize`.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from slackwater_inference.model.headers import ITEM_BYTES
from slackwater_inference.model.shapes import Shape

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written.  dtype: as safetensors spells it, "BF16"."""

    name: str
    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorsFile:
    """A new file of its full size; its tensors are filled in, in any order and in pieces.

    Raises OSError at the start where the disk has no room for all of it.
    """

    def __init__(self, path: Path, entries: Iterable[Entry]) -> None:
        # The widest types first, as the library has them, so that every tensor lies at a multiple of its type.
        ordered = sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in ordered:
            span = [end, end := end + entry.size_bytes]
            header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        first = 8 + len(text)
        self._begin: dict[str, int] = {}
        for entry in ordered:
            self._begin[entry.name] = first
            first += entry.size_bytes
        self.size_bytes = first
        self._file = path.open("xb")
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.size_bytes)
            self._file.write(struct.pack("<Q", len(text)) + text)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, offset: int, data: bytes | bytearray) -> None:
        """Put `data` into a tensor, `offset` bytes behind its beginning."""
        self._file.seek(self._begin[name] + offset)
        self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; what was written whole is on the disk then."""
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
