"""Reading a request's body: bounded, in any content type that the API takes.

Owns the size limit, the content types and forms.  Does not own what the fields mean (schemas, voices).
"""

from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser

from slackwater_inference.api.decode import decode_json, decode_msgpack
from slackwater_inference.api.errors import ApiError
from slackwater_inference.core import BadRequest

MAX_BODY_BYTES = 32 * 1024 * 1024
_MAX_FORM_FILES = 32  # 20 recordings and a cover, with room; what a route takes, it checks itself
_MAX_FORM_FIELDS = 256

JSON = "application/json"
MSGPACK = "application/msgpack"
MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"

# A form's fields: every value of each name, in order; a file is its bytes.
Form = dict[str, list[str | bytes]]


async def read_body(request: Request, *kinds: str) -> object:
    """The decoded body, of one of the content types `kinds`; a form becomes a `Form`.

    Raises BadRequest, ApiError 413, or ClientDisconnect if the client goes away meanwhile.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise BadRequest(f"Content-Type must be {' or '.join(kinds)}, got {kind[:80] or 'none'}")
    if kind in (MULTIPART, URLENCODED):
        return await _read_form(request, is_multipart=kind == MULTIPART)
    data = bytearray()
    async for part in _bounded(request):
        data += part
    return decode_json(bytes(data)) if kind == JSON else decode_msgpack(bytes(data))


async def client_gone(request: Request) -> None:
    """Return when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _bounded(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes, ended with ApiError 413 when it is, or says that it will be, too large."""
    too_large = ApiError(413, f"the body may have at most {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise too_large
    num_bytes = 0
    async for part in request.stream():
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
