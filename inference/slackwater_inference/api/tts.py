"""`POST /v1/tts`: a text in, audio out as it is made.

Owns the route, the streamed answer and the rule that whatever ends an answer lets go of the engine's slot.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from slackwater_inference.api.auth import Caller
from slackwater_inference.api.body import JSON, MSGPACK, client_gone, read_body
from slackwater_inference.api.errors import declared
from slackwater_inference.api.limits import admitted
from slackwater_inference.api.schemas import TtsRequest, flat_schema, parse_tts
from slackwater_inference.api.services import Services
from slackwater_inference.api.speech import Piece, Synthesis, synthesis
from slackwater_inference.audio.output import MEDIA_TYPES
from slackwater_inference.core import BadRequest

logger = logging.getLogger(__name__)

SPEECH_ERRORS = declared(400, 401, 402, 403, 404, 408, 413, 429, 500, 503)
# A proxy that collects the answer before it passes it on would undo the streaming.
STREAM_HEADERS = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
ModelHeader = Annotated[
    str | None, Header(description="The public model name, which sets the price; an unknown one is s2.1-pro.")
]


def speech_body() -> dict[str, Any]:
    """What OpenAPI says of a speech request's body."""
    schema = flat_schema(TtsRequest)
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in (JSON, MSGPACK)}}}


def tts_routes(services: Services) -> APIRouter:
    """The route, on `services`."""
    router = APIRouter(tags=["Speech"])

    @router.post(
        "/v1/tts",
        summary="Speak a text",
        description="The audio comes in a chunked answer while it is made.  An error before the first byte is a "
        "status; after it the connection is cut, so an answer that ends properly is whole.",
        response_class=Response,
        responses={
            200: {
                "description": "Audio",
                "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA_TYPES.values()},
            },
            **SPEECH_ERRORS,
        },
        openapi_extra=speech_body(),
    )
    async def tts(
        request: Request, caller: Annotated[Caller, Depends(admitted)], model: ModelHeader = None
    ) -> Response:
        async with open_speech(services, request, caller, model) as speech:
            limit_s = services.settings.send_limit_s
            return SpeechResponse(speech, _audio(speech), speech.synthesis.media_type, limit_s)

    return router


class OpenSpeech:
    """A synthesis whose first audio is there."""

    def __init__(self, synthesis: Synthesis, first: list[Piece], rest: AsyncGenerator[Piece, None]) -> None:
        self.synthesis = synthesis
        self._first = first
        self._rest = rest
        self.is_answered = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """All of the audio."""
        for piece in self._first:
            yield piece
        async for piece in self._rest:
            yield piece


@contextlib.asynccontextmanager
async def open_speech(
    services: Services, request: Request, caller: Caller, model: str | None
) -> AsyncIterator[OpenSpeech]:
    """Read the body and wait for the first audio of its text, so that an error before it can still be a status.

    What is opened is closed again, unless a SpeechResponse took it over.
    """
    body = parse_tts(await read_body(request, JSON, MSGPACK))
    opened = await synthesis(services, caller, body, model)
    speech = None
    try:
        opened.speak(body.text)
        pieces = opened.pieces()
        first = await _first_audio(pieces, request)
        if not opened.parts:
            raise BadRequest("text has nothing in it to speak; send at least one word")
        if not first:
            raise BadRequest("the model has no sound for this text; send words")
        speech = OpenSpeech(opened, first, pieces)
        yield speech
    finally:
        if speech is None or not speech.is_answered:
            opened.close()


async def _first_audio(pieces: AsyncGenerator[Piece, None], request: Request) -> list[Piece]:
    """The pieces up to the first that holds bytes; none if none does.

    Raises ClientDisconnect if the client goes away before.
    """

    async def read() -> list[Piece]:
        read_pieces: list[Piece] = []
        async for piece in pieces:
            read_pieces.append(piece)
            if piece.data:
                return read_pieces
        return []

    first = asyncio.ensure_future(read())
    gone = asyncio.ensure_future(client_gone(request))
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise ClientDisconnect
        return first.result()
    finally:
        gone.cancel()
        if not first.done():
            first.cancel()
            await asyncio.wait({first})


class SpeechResponse(StreamingResponse):
    """Streams `content` and lets go of `speech` however that ends.

    An error after the first byte propagates, so the server cuts the connection: a listener must be able to tell
    a broken answer from a short one.  It is cut as well if the client reads nothing for `send_limit_s`.
    """

    def __init__(self, speech: OpenSpeech, content: AsyncIterator[bytes], media_type: str, send_limit_s: float) -> None:
        super().__init__(content, media_type=media_type, headers=STREAM_HEADERS)
        self._speech = speech
        self._send_limit_s = send_limit_s
        speech.is_answered = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_limit_s):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:  # the answer stays without its end, at which the server closes the connection
            logger.info("cutting an answer: its client read nothing for %g s", self._send_limit_s)
        finally:
            self._speech.synthesis.close()


async def _audio(speech: OpenSpeech) -> AsyncIterator[bytes]:
    async for piece in speech.pieces():
        if piece.data:
            yield piece.data
