"""Reading a request's body: bounded, in any content type that the API takes.

Owns the size limits, of one body and of all, the content types and forms.  Does not own what the fields mean
(schemas, voices).
"""

import asyncio
from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slackwater_inference.api.decode import decode_json, decode_msgpack
from slackwater_inference.api.errors import ApiError
from slackwater_inference.core import BadRequest

MAX_BODY_BYTES = 32 * 1024 * 1024
_MAX_FORM_FILES = 32  # 20 recordings and a cover, with room; what a route takes, it checks itself
_MAX_FORM_FIELDS = 256
_LARGE_BYTES = 1024 * 1024  # takes some 5 ms to decode

JSON = "application/json"
MSGPACK = "application/msgpack"
MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"

# A form's fields: every value of each name, in order; a file is its bytes.
Form = dict[str, list[str | bytes]]


async def read_body(request: Request, *kinds: str) -> object:
    """The decoded body, of one of the content types `kinds`; a form becomes a `Form`.

    Raises BadRequest, ApiError 408, 413 or 429, or ClientDisconnect if the client goes away meanwhile.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise BadRequest(f"Content-Type must be {' or '.join(kinds)}, got {kind[:80] or 'none'}")
    if kind in (MULTIPART, URLENCODED):
        return await _read_form(request, is_multipart=kind == MULTIPART)
    data = bytearray()
    async for part in _bounded(request):
        data += part
    decode = decode_json if kind == JSON else decode_msgpack
    # In a thread, a large one holds the event loop up for a moment here and there, and not for all of its time.
    return await asyncio.to_thread(decode, bytes(data)) if len(data) > _LARGE_BYTES else decode(bytes(data))


class HeldBodies:
    """ASGI middleware that keeps the bodies of all open requests together within `max_bytes`.

    Reading what is over it raises ApiError 429.  Websockets do not count: what they hold, they hold shortly.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count its body until it is answered."""
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if size and self._num_bytes + size > self._max_bytes:
                raise ApiError(429, "too many large requests are open; try again soon", {"Retry-After": "1"})
            num_bytes += size
            self._num_bytes += size
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._num_bytes -= num_bytes


async def client_gone(request: Request) -> None:
    """Return when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _bounded(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes, ended with ApiError 413 when it is, or says that it will be, too large, or with 408."""
    too_large = ApiError(413, f"the body may have at most {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise too_large
    num_bytes = 0
    parts = request.stream()
    limit_s = request.app.state.services.settings.body_limit_s
    while True:
        try:
            async with asyncio.timeout(limit_s):
                part = await anext(parts, None)
        except TimeoutError as error:
            raise ApiError(408, f"nothing of the body came for {limit_s:g} s") from error
        if part is None:
            return
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise too_large
        yield part


async def _read_form(request: Request, *, is_multipart: bool) -> Form:
    parser: MultiPartParser | FormParser
    if is_multipart:
        parser = MultiPartParser(
            request.headers,
            _bounded(request),
            max_files=_MAX_FORM_FILES,
            max_fields=_MAX_FORM_FIELDS,
            max_part_size=MAX_BODY_BYTES,
        )
    else:
        parser = FormParser(request.headers, _bounded(request))
    try:
        data = await parser.parse()
    except (MultiPartException, UnicodeError, ValueError) as error:  # both parsers' own errors are ValueErrors
        raise BadRequest(f"the body is not a valid form: {str(error)[:200]}") from error
    form: Form = {}
    try:
        for name, value in data.multi_items():
            form.setdefault(name, []).append(await value.read() if isinstance(value, UploadFile) else value)
    finally:
        await data.close()
    return form
