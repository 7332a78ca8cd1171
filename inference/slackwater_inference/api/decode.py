"""Bytes to values: JSON and msgpack, bounded before anything is built.

Owns the bound on the number of values: 32 MiB of empty lists would be two gigabytes of Python objects.  Does not
own the bound on bytes (body, the websocket's server).  Called by body and by the websocket.
"""

import json

import ormsgpack

from slackwater_inference.core import BadRequest

# A speech request with every field and 20 recordings has under a hundred values.  JSON's are counted by their
# punctuation, of which a long text may have plenty itself.
MAX_MSGPACK_VALUES = 10_000
MAX_JSON_PUNCTUATION = 400_000


def decode_json(data: bytes) -> object:
    """The value that `data` spells.  Raises BadRequest."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_PUNCTUATION:
        raise BadRequest(f"the body has over {MAX_JSON_PUNCTUATION} JSON values; send fewer")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested past the interpreter's depth
        raise BadRequest(f"the body is not valid JSON: {str(error)[:200]}") from error


def decode_msgpack(data: bytes) -> object:
    """The value that `data` spells.  Raises BadRequest."""
    try:
        if _has_more_values(data, MAX_MSGPACK_VALUES):
            raise BadRequest(f"the message has over {MAX_MSGPACK_VALUES} msgpack values; send fewer")
        return ormsgpack.unpackb(data)
    except (ValueError, IndexError, RecursionError) as error:  # IndexError: the count ran over the end
        raise BadRequest(f"the body is not valid msgpack: {str(error)[:200]}") from error


# By first byte.  Fixed payloads: nil, booleans, floats, unsigned and signed numbers, extensions with their type.
_FIXED = dict(
    zip(
        [0xC0, 0xC2, 0xC3, 0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8],
        [0, 0, 0, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17],
        strict=True,
    )
)
# Bytes of the length of bytes, extensions and texts.
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # one byte more, for the type
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # lists, maps: bytes of the count, values an entry


def _has_more_values(data: bytes, limit: int) -> bool:
    """True if msgpack `data` announces more than `limit` values; looks at no more than `limit` of them."""
    at, seen, announced = 0, 0, 1
    while seen < announced <= limit:
        first = data[at]
        at += 1
        seen += 1
        if first < 0x80 or first >= 0xE0:  # a small number
            continue
        if first < 0x90:
            announced += 2 * (first & 0x0F)
        elif first < 0xA0:
            announced += first & 0x0F
        elif first < 0xC0:
            at += first & 0x1F
        elif first in _SIZED:
            width = _SIZED[first]
            at += width + int.from_bytes(data[at : at + width]) + (first in _EXTENSIONS)
        elif first in _COUNTED:
            width, per_entry = _COUNTED[first]
            announced += per_entry * int.from_bytes(data[at : at + width])
            at += width
        elif first in _FIXED:
            at += _FIXED[first]
        else:
            raise ValueError("byte 0xc1 starts no value")
    return announced > limit
