"""Where frames begin, in whatever pieces their bytes come."""

import random

import pytest

from slackwater_inference.gateway.frames import HEAD_BYTES, FrameScanner


def frame(opcode: int, payload: bytes, mask: bytes = b"") -> bytes:
    length = len(payload)
    mark = bytes([length]) if length < 126 else b"\x7e" + length.to_bytes(2, "big") if length < 2**16 else b"\x7f"
    mark += length.to_bytes(8, "big") if length >= 2**16 else b""
    if mask:
        mark = bytes([mark[0] | 0x80]) + mark[1:]
        payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes([0x80 | opcode]) + mark + mask + payload


@pytest.mark.parametrize("seed", range(8))
def test_finds_every_frame_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    sent = [(rng.choice([0, 1, 2, 8, 9, 10]), rng.randbytes(rng.choice([0, 1, 15, 16, 17, 125, 126, 300, 70_000])))]
    sent += [(2, rng.randbytes(size)) for size in (0, 125, 126, 65_535, 65_536)]
    data = b"".join(frame(opcode, payload) for opcode, payload in sent)

    scanner, found, at = FrameScanner(), [], 0
    while at < len(data):
        size = rng.choice([1, 2, 3, 7, 1000, 100_000])
        found += scanner.feed(data[at : at + size])
        at += size

    assert [(f.opcode, f.head) for f in found] == [(opcode, payload[:HEAD_BYTES]) for opcode, payload in sent]


def test_a_masked_frame_is_as_long_as_it_says() -> None:
    scanner = FrameScanner()

    found = scanner.feed(
        frame(2, b"x" * 500, mask=b"abcd") + frame(9, b"", mask=b"abcd") + frame(1, b"y", mask=b"abcd")
    )

    assert [(f.opcode, f.is_data) for f in found] == [(2, True), (9, False), (1, True)]


@pytest.mark.parametrize(
    ("opcode", "payload", "code"),
    [
        pytest.param(8, b"\x03\xe8bye", 1000, id="with a code"),
        pytest.param(8, b"", 1005, id="without one"),
        pytest.param(2, b"\x03\xe8", None, id="no close frame"),
    ],
)
def test_reads_a_close_frames_code(opcode: int, payload: bytes, code: int | None) -> None:
    (found,) = FrameScanner().feed(frame(opcode, payload))

    assert found.close_code == code
