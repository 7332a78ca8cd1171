"""The bytes of a part file: framed records, appended one after the other.

Owns the frame layout (written down in workers/README.md).  Knows nothing of leases or trust.

    magic     4 bytes  "SWF1"
    row_len   4 bytes  unsigned, big-endian, as all numbers here
    data_len  8 bytes  unsigned
    head_crc  4 bytes  CRC-32 of the 16 bytes before it
    row       row_len bytes, one JSON object, UTF-8
    data      data_len bytes, may be none
    body_crc  4 bytes  CRC-32 of row and data
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"SWF1"
HEAD = struct.Struct(">4sIQ")
CRC = struct.Struct(">I")
HEAD_BYTES = HEAD.size + CRC.size
CHUNK_BYTES = 1 << 20
# A row is small; a longer one is a damaged head that happens to have a right checksum, or a mistake of ours.
MAX_ROW_BYTES = 64 << 20

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where one record lies in its part.  `is_whole` is False when its body is damaged."""

    offset: int
    size_bytes: int
    data_offset: int
    data_bytes: int
    row: Row
    is_whole: bool = True

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


def encode_row(row: Row) -> bytes:
    """A row's bytes: sorted keys, no spaces, ASCII, so that equal rows are equal bytes."""
    return json.dumps(row, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def write_frame(write: Callable[[bytes], None], row: Row, data: BinaryIO | None, data_bytes: int) -> int:
    """Give one frame's bytes to `write`, in pieces, and return how many they were.

    data: `data_bytes` bytes are read from its present position.  Raises ValueError when it holds fewer.
    """
    encoded = encode_row(row)
    if len(encoded) > MAX_ROW_BYTES:
        raise ValueError(f"a row may have {MAX_ROW_BYTES} bytes, got {len(encoded)}; put bulk into the data")
    head = HEAD.pack(MAGIC, len(encoded), data_bytes)
    write(head + CRC.pack(zlib.crc32(head)) + encoded)
    crc = zlib.crc32(encoded)
    left = data_bytes
    while left:
        piece = data.read(min(left, CHUNK_BYTES)) if data is not None else b""
        if not piece:
            raise ValueError(f"data ended {left} bytes short of the {data_bytes} announced")
        crc = zlib.crc32(piece, crc)
        write(piece)
        left -= len(piece)
    write(CRC.pack(crc))
    return HEAD_BYTES + len(encoded) + data_bytes + CRC.size


def read_frames(file: BinaryIO, end: int | None = None, *, start: int = 0, check_data: bool = True) -> Iterator[Frame]:
    """The frames of `file` from byte `start`, where one begins, up to byte `end`.

    Stops without a word at the first head that is torn or damaged, or at a frame that reaches beyond the
    end: that is what a kill leaves.  A damaged body behind a good head is yielded as not whole, with an empty
    row if the row is unreadable.  With `check_data` off only heads and rows are read, and bodies are believed.
    """
    size = file.seek(0, 2)
    end = size if end is None else min(end, size)
    offset = start
    while offset + HEAD_BYTES + CRC.size <= end:
        file.seek(offset)
        head = file.read(HEAD_BYTES)
        magic, row_len, data_len = HEAD.unpack(head[: HEAD.size])
        if magic != MAGIC or zlib.crc32(head[: HEAD.size]) != CRC.unpack(head[HEAD.size :])[0]:
            return
        size_bytes = HEAD_BYTES + row_len + data_len + CRC.size
        if row_len > MAX_ROW_BYTES or offset + size_bytes > end:
            return
        encoded = file.read(row_len)
        is_whole = not check_data or _body_is_whole(file, encoded, data_len)
        row = _decode_row(encoded) if is_whole else {}
        if row is None:
            is_whole, row = False, {}
        yield Frame(offset, size_bytes, offset + HEAD_BYTES + row_len, data_len, row, is_whole)
        offset += size_bytes


def _body_is_whole(file: BinaryIO, encoded: bytes, data_len: int) -> bool:
    crc = zlib.crc32(encoded)
    for piece in pieces(file, data_len):
        crc = zlib.crc32(piece, crc)
    return file.read(CRC.size) == CRC.pack(crc)


def _decode_row(encoded: bytes) -> Row | None:
    try:
        row = json.loads(encoded)
    except ValueError:  # both broken JSON and broken UTF-8
        return None
    return row if isinstance(row, dict) else None


def pieces(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """The next `size_bytes` bytes of `file` in bounded pieces; fewer when it ends before."""
    left = size_bytes
    while left:
        piece = file.read(min(left, CHUNK_BYTES))
        if not piece:
            return
        left -= len(piece)
        yield piece
