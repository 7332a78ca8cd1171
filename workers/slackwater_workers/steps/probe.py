"""What a file's header claims, read without a decoder.

Owns the few facts that decoders keep to themselves: how long a WAV says it is, whether an Ogg file ends where
it should, whether it holds several streams.  A claim is a hint for marks, never a size to allocate.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_TAIL_BYTES = 128 << 10  # an Ogg page has at most 65,307 bytes, so the last page begins in here
_STREAMED = (0, 0xFFFFFFFF)  # what recorders write that do not know the size yet


@dataclass(frozen=True, slots=True)
class Claim:
    """`data_bytes`: what a WAV header promises, None when it promises nothing."""

    data_bytes: int | None = None
    data_bytes_present: int = 0
    is_torn: bool = False  # an Ogg file that ends inside a page
    is_chained: bool = False  # several Ogg streams one after the other

    @property
    def is_cut(self) -> bool:
        """Whether the file is shorter than it says."""
        short = self.data_bytes is not None and self.data_bytes_present < self.data_bytes
        return short or self.is_torn


def probe(path: Path) -> Claim:
    """Read the claim of a WAV or Ogg file; an empty claim for any other.  Raises OSError."""
    with path.open("rb") as file:
        start = file.read(12)
        size = file.seek(0, 2)
        if start[:4] == b"RIFF" and start[8:12] == b"WAVE":
            return _wav_claim(file, size)
        if start[:4] == b"OggS":
            return _ogg_claim(file, size)
    return Claim()


def _wav_claim(file: BinaryIO, size: int) -> Claim:
    offset = 12
    while offset + 8 <= size:
        file.seek(offset)
        kind, length = struct.unpack("<4sI", file.read(8))
        if kind == b"data":
            present = size - offset - 8
            return Claim(None if length in _STREAMED else length, present)
        offset += 8 + length + length % 2
    return Claim()


def _ogg_claim(file: BinaryIO, size: int) -> Claim:
    file.seek(0)
    first_serial = file.read(18)[14:18]
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    at = tail.rfind(b"OggS")
    if at < 0 or len(tail) < at + 27:
        return Claim(is_torn=True)
    segments = tail[at + 26]
    body = sum(tail[at + 27 : at + 27 + segments])
    is_whole = len(tail) >= at + 27 + segments + body
    # Some encoders never set the end mark on the last page, so only a torn page is a sign of a cut.
    return Claim(is_torn=not is_whole, is_chained=tail[at + 14 : at + 18] != first_serial)
