import ormsgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.api.decode import MAX_MSGPACK_VALUES, _has_more_values, decode_json, decode_msgpack
from slackwater_inference.core import BadRequest

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=40,
)


def count(value):
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count(each) for each in value.values())
    return 1


@settings(max_examples=150, deadline=None)
@given(values)
def test_the_count_of_values_is_exact_for_whatever_msgpack_can_spell(value):
    data = ormsgpack.packb(value)

    assert not _has_more_values(data, count(value))
    assert _has_more_values(data, count(value) - 1)
    assert decode_msgpack(data) == value


@pytest.mark.parametrize("size", [15, 16, 255, 256, 65_535, 65_536])
def test_every_width_of_length_is_understood(size):
    for value in ("x" * size, b"x" * size, [0] * min(size, 5_000), {str(i): i for i in range(min(size, 300))}):
        assert decode_msgpack(ormsgpack.packb(value)) == value


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused_in_one_line(data):
    for decode in (decode_json, decode_msgpack):
        message = ""
        try:
            decode(data)
        except BadRequest as error:
            message = str(error)
        assert "\n" not in message


def test_as_many_values_as_are_allowed_are_decoded_and_one_more_is_not():
    assert len(decode_msgpack(ormsgpack.packb([None] * (MAX_MSGPACK_VALUES - 1)))) == MAX_MSGPACK_VALUES - 1
    with pytest.raises(BadRequest, match="values"):
        decode_msgpack(ormsgpack.packb([None] * MAX_MSGPACK_VALUES))


def test_32_mib_of_empty_lists_are_refused_before_they_are_built():
    with pytest.raises(BadRequest, match="values"):
        decode_msgpack(b"\xdd\x01\x00\x00\x00" + b"\x90" * 2**24)
    with pytest.raises(BadRequest, match="values"):
        decode_json(b"[" + b"[]," * 10**6 + b"[]]")


def test_a_long_text_with_many_commas_is_no_bomb():
    text = "a, " * 60_000

    assert decode_json(b'{"text": "' + text.encode() + b'"}') == {"text": text}
