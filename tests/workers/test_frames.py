"""Frames survive what a kill or a bad disk does to them."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_workers.ledger import frames
from slackwater_workers.ledger.frames import Row, read_frames, write_frame

README = Path(__file__).parents[2] / "workers" / "README.md"

rows = st.dictionaries(
    st.text(max_size=8),
    st.one_of(st.text(max_size=20), st.integers(-(2**53), 2**53), st.booleans(), st.none()),
    max_size=4,
)
records = st.lists(st.tuples(rows, st.binary(max_size=64)), min_size=1, max_size=4)


def written(some: list[tuple[Row, bytes]]) -> bytes:
    out = io.BytesIO()
    for row, data in some:
        write_frame(lambda piece: out.write(piece) and None, row, io.BytesIO(data), len(data))
    return out.getvalue()


def read_back(content: bytes) -> list[tuple[Row, bytes]]:
    file = io.BytesIO(content)
    whole = [frame for frame in read_frames(file) if frame.is_whole]
    return [(frame.row, content[frame.data_offset : frame.data_offset + frame.data_bytes]) for frame in whole]


@given(records)
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read_back(some: list[tuple[Row, bytes]]) -> None:
    assert read_back(written(some)) == some


@given(records)
@settings(max_examples=15, deadline=None)
def test_a_cut_anywhere_leaves_exactly_the_frames_before_it(some: list[tuple[Row, bytes]]) -> None:
    content = written(some)
    ends = [len(written(some[: count + 1])) for count in range(len(some))]

    for cut in range(len(content)):
        assert read_back(content[:cut]) == some[: sum(end <= cut for end in ends)]


@given(records, st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_never_gives_a_wrong_record(some: list[tuple[Row, bytes]], data: st.DataObject) -> None:
    content = bytearray(written(some))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))

    found = read_back(bytes(content))

    assert len(found) < len(some)
    assert all(record in some for record in found)


def test_records_beside_a_damaged_body_are_still_read() -> None:
    content = bytearray(written([({"n": 1}, b"one"), ({"n": 2}, b"two"), ({"n": 3}, b"three")]))
    content[content.index(b"two")] ^= 0xFF

    found = list(read_frames(io.BytesIO(content)))

    assert [(frame.row, frame.is_whole) for frame in found] == [({"n": 1}, True), ({}, False), ({"n": 3}, True)]


def test_data_that_ends_early_is_refused_and_not_padded() -> None:
    with pytest.raises(ValueError, match="2 bytes short"):
        write_frame(lambda piece: None, {}, io.BytesIO(b"abc"), 5)


def test_the_readme_describes_the_frame_that_is_written() -> None:
    described = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", README.read_text(encoding="utf-8"), re.MULTILINE))

    content = written([({}, b"")])

    assert content[: int(described["magic"])] == frames.MAGIC
    fixed = ("magic", "row_len", "data_len", "head_crc", "body_crc")
    assert len(content) == sum(int(described[name]) for name in fixed) + len(b"{}")
