"""Where websocket frames begin in a stream of bytes that passes through (RFC 6455 section 5.2).

Owns nothing of a message but its kind and its first bytes; decodes and checks nothing.  Pure.  `tunnel`
feeds it each direction.
"""

from dataclasses import dataclass

HEAD_BYTES = 16  # of the payload that are kept: enough for a close code, or for the event's name in msgpack

_CLOSE = 0x8
_LENGTH_BYTES = {126: 2, 127: 8}  # of the longer length field that these marks announce


@dataclass(frozen=True, slots=True)
class Frame:
    """The beginning of one frame.  head: the first HEAD_BYTES of its payload as they came, masked or not."""

    opcode: int
    head: bytes

    @property
    def is_data(self) -> bool:
        """True for text, binary and their continuations; False for close, ping and pong."""
        return self.opcode < _CLOSE

    @property
    def close_code(self) -> int | None:
        """The code of an unmasked close frame (1005 when it gives none); None for any other frame."""
        if self.opcode != _CLOSE:
            return None
        return int.from_bytes(self.head[:2], "big") if len(self.head) >= 2 else 1005


class FrameScanner:
    """Follows one direction of a connection, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._begun = bytearray()  # of the frame whose beginning is not whole yet
        self._to_skip = 0  # payload bytes of the current frame that are still to come

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes; returns the frames whose beginning is whole now."""
        frames = []
        at = 0
        while at < len(data):
            if self._to_skip:
                step = min(self._to_skip, len(data) - at)
                self._to_skip -= step
                at += step
                continue
            step = _num_wanted(self._begun) - len(self._begun)
            self._begun += data[at : at + step]
            at += step
            if len(self._begun) == _num_wanted(self._begun):
                frames.append(self._end_of_beginning())
        return frames

    def _end_of_beginning(self) -> Frame:
        payload_at, length = _payload(self._begun)
        frame = Frame(self._begun[0] & 0x0F, bytes(self._begun[payload_at:]))
        self._to_skip = length - len(frame.head)
        self._begun.clear()
        return frame


def _num_wanted(begun: bytearray) -> int:
    """How many bytes the beginning has, as far as its present bytes tell."""
    size = 2 + (_LENGTH_BYTES.get(begun[1] & 0x7F, 0) if len(begun) >= 2 else 0)
    if len(begun) < size:
        return size
    payload_at, length = _payload(begun)
    return payload_at + min(length, HEAD_BYTES)


def _payload(begun: bytearray) -> tuple[int, int]:
    """Offset and length of the payload.  Wants the length field whole."""
    short = begun[1] & 0x7F
    size = 2 + _LENGTH_BYTES.get(short, 0)
    length = int.from_bytes(begun[2:size], "big") if short in _LENGTH_BYTES else short
    is_masked = bool(begun[1] & 0x80)
    return size + 4 * is_masked, length
