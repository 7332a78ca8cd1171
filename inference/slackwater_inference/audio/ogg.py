"""Opus packets into Ogg pages, without waiting for a page to fill.

Owns the page layout (RFC 3533) and the two header pages of Opus (RFC 7845).  Owned here since FFmpeg's muxer holds a
whole page back, which delays the first sound by more than the first chunk is long.  Called by container.py.
"""

import struct
from collections.abc import Sequence

_FIRST, _LAST = 0x02, 0x04  # flags of a page
_PACKET_SAMPLES = 960  # 20 ms at 48 kHz
_MAX_SEGMENTS = 255
_SERIAL = 1  # one stream in each file, so that any number does
_VENDOR = b"slackwater"


class OggWriter:
    """Pages of one Opus stream.

    opus_head: the identification header that the encoder wrote; its pre-skip starts the clock.
    """

    def __init__(self, opus_head: bytes) -> None:
        self._pre_skip = int.from_bytes(opus_head[10:12], "little")
        self._sequence = 0
        self._num_packets = 0
        tags = b"OpusTags" + struct.pack("<I", len(_VENDOR)) + _VENDOR + struct.pack("<I", 0)
        self._headers = self._raw_page([opus_head], 0, _FIRST) + self._raw_page([tags], 0, 0)

    def page(self, packets: Sequence[bytes]) -> bytes:
        """`packets` as one page, or as several if they are very many; none = nothing but headers not out yet."""
        headers, self._headers = self._headers, b""
        pages = [headers]
        for group in _groups(packets):
            self._num_packets += len(group)
            pages.append(self._raw_page(group, self._num_packets * _PACKET_SAMPLES, 0))
        return b"".join(pages)

    def last_page(self, packets: Sequence[bytes], num_samples: int) -> bytes:
        """The end of the stream, `num_samples` long at 48 kHz; the decoder drops what the last packet has more."""
        groups = _groups(packets) or [[]]
        earlier = self.page([packet for group in groups[:-1] for packet in group])
        return earlier + self._raw_page(groups[-1], self._pre_skip + num_samples, _LAST)

    def _raw_page(self, packets: Sequence[bytes], granule: int, flags: int) -> bytes:
        lacing = b"".join(b"\xff" * (len(packet) // 255) + bytes([len(packet) % 255]) for packet in packets)
        head = struct.pack("<4sBBqII", b"OggS", 0, flags, granule, _SERIAL, self._sequence)
        tail = bytes([len(lacing)]) + lacing + b"".join(packets)
        self._sequence += 1
        checksum = _crc(head + b"\0\0\0\0" + tail)
        return head + struct.pack("<I", checksum) + tail


def _groups(packets: Sequence[bytes]) -> list[list[bytes]]:
    """Packets page by page: a page holds at most 255 segments of at most 255 bytes."""
    groups: list[list[bytes]] = []
    segments = _MAX_SEGMENTS
    for packet in packets:
        needed = len(packet) // 255 + 1
        if segments + needed > _MAX_SEGMENTS:
            groups.append([])
            segments = 0
        groups[-1].append(packet)
        segments += needed
    return groups


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte << 24
        for _ in range(8):
            value = (value << 1) ^ (0x04C11DB7 if value & 0x80000000 else 0)
        table.append(value & 0xFFFFFFFF)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _crc(data: bytes) -> int:
    """Ogg's checksum: CRC-32 without reflection, zero start, zero end; zlib's is another."""
    value = 0
    for byte in data:
        value = ((value << 8) & 0xFFFFFFFF) ^ _CRC_TABLE[(value >> 24) ^ byte]
    return value
