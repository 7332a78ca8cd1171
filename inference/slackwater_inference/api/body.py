"""Reading a request's body: bounded, JSON or msgpack.

Owns the size limit and the content types.  Does not own what the fields mean (schemas).
"""

import json

import ormsgpack
from fastapi import Request

from slackwater_inference.core import BadRequest

MAX_BODY_BYTES = 32 * 1024 * 1024


class BodyTooLarge(Exception):
    """The body is over MAX_BODY_BYTES."""


async def read_body(request: Request) -> object:
    """The decoded body.  Raises BadRequest, BodyTooLarge, or ClientDisconnect if the client goes away meanwhile."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "application/msgpack"):
        raise BadRequest(f"Content-Type must be application/json or application/msgpack, got {kind or 'none'}")
    data = await _read(request)
    try:
        return json.loads(data) if kind == "application/json" else ormsgpack.unpackb(data)
    except (ValueError, RecursionError) as error:  # both decoders' errors are ValueErrors
        raise BadRequest(f"the body is not valid {kind.removeprefix('application/')}: {error}") from error


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise BodyTooLarge
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise BodyTooLarge
    return bytes(data)


async def client_gone(request: Request) -> None:
    """Return when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
