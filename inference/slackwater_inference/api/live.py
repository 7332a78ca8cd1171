"""`WS /v1/tts/live`: text in as it is written, audio out as it is made, both in msgpack.

Owns one connection's life: handshake, events, limits of time, and how it ends.  Does not own what a start asks
for (schemas) nor the speech (speech).  Pings are answered by the server's protocol on the event loop, which
nothing here holds up.
"""

import asyncio
import contextlib
import logging
from typing import Annotated, Literal

import ormsgpack
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from slackwater_inference.api.auth import Caller
from slackwater_inference.api.decode import decode_msgpack
from slackwater_inference.api.errors import CLIENT_CLOSED, ApiError, as_api_error, error_response, faults
from slackwater_inference.api.limits import admitted
from slackwater_inference.api.schemas import Text, parse_tts
from slackwater_inference.api.services import Services
from slackwater_inference.api.speech import Synthesis, synthesis
from slackwater_inference.core import BadRequest, Draining, EngineError, Stage

logger = logging.getLogger(__name__)

# Close codes of RFC 6455; from 1011 on it is the server that could not go on.
_CLOSE_OK, _CLOSE_POLICY = 1000, 1008
_CLOSE_CODES = {500: 1011, 503: 1012}
_MAX_WAITING_BYTES = 64 * 1024  # of messages besides their text, while a voice is encoded
_STAGE_EVERY_S = 0.25  # how often a connection looks whether the engine is leaving
_MAX_AUDIO_BYTES = 32 * 1024  # of one message: the official client's documented bound is 64 KiB


class _Start(BaseModel):
    event: Literal["start"]
    request: dict[str, object]


class _Text(BaseModel):
    event: Literal["text"]
    text: Text


class _Flush(BaseModel):
    event: Literal["flush"]


class _Stop(BaseModel):
    event: Literal["stop"]


_Event = _Start | _Text | _Flush | _Stop
_EVENT: TypeAdapter[_Event] = TypeAdapter(Annotated[_Event, Field(discriminator="event")])


def live_routes(services: Services) -> APIRouter:
    """The route, on `services`."""
    router = APIRouter()

    @router.websocket("/v1/tts/live")
    async def live(socket: WebSocket) -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                caller = await stack.enter_async_context(contextlib.asynccontextmanager(admitted)(socket))
                stage = services.engine.status().stage
                if stage is not Stage.READY:  # said now, so that a gateway can still ask another replica
                    raise Draining(f"the engine is {stage}; ask another replica")
            except (ApiError, EngineError) as error:
                await socket.send_denial_response(error_response(as_api_error(error)))
                return
            await socket.accept()
            socket.state.outcome = await _Session(services, socket, caller).run()

    return router


def _event(message: bytes) -> _Event:
    """Raises BadRequest for what is no event."""
    try:
        return _EVENT.validate_python(decode_msgpack(message))
    except ValidationError as error:
        raise BadRequest(faults(error.errors(include_url=False, include_input=False))) from error


class _Session:
    """One accepted connection."""

    def __init__(self, services: Services, socket: WebSocket, caller: Caller) -> None:
        self._services = services
        self._settings = services.settings
        self._socket = socket
        self._caller = caller
        self._speech: Synthesis | None = None
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()  # that came and were not looked at
        self._num_message_bytes = 0  # of these; `_receive` bounds it
        self._planning = asyncio.Lock()  # one text after the other, and none behind the end
        self._has_stopped = False  # the client said stop
        self._is_leaving = False  # the server takes no more text
        self._idle: asyncio.Timeout | None = None

    async def run(self) -> int:
        """Serve until the end, send `finish` and close; returns the outcome as an HTTP status."""
        try:
            await self._serve()
            await self._finish({"event": "finish", "reason": "stop"}, _CLOSE_OK)
            return 200
        except WebSocketDisconnect:
            return CLIENT_CLOSED  # there is nobody to tell
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                logger.exception("a websocket failed")
            finish: dict[str, object] = {"event": "finish", "reason": "error", "message": told.message}
            with contextlib.suppress(WebSocketDisconnect):
                await self._finish(finish, _CLOSE_CODES.get(told.status, _CLOSE_POLICY))
            return told.status
        finally:
            if self._speech is not None:
                self._speech.close()

    async def _serve(self) -> None:
        """Returns when everything that was said before `stop` is sent; raises whatever else ends the session."""
        settings = self._settings
        life = idle = None
        try:
            async with (
                asyncio.timeout(settings.connection_limit_s) as life,
                asyncio.timeout(settings.idle_limit_s) as idle,
            ):
                self._idle = idle
                await self._converse()
        except TimeoutError as error:
            if life is not None and life.expired():
                message = f"a connection may last {settings.connection_limit_s:g} s; open another"
            elif idle is not None and idle.expired():
                message = f"nothing was said for {settings.idle_limit_s:g} s; open another connection"
            else:
                raise
            raise ApiError(408, message) from error

    async def _converse(self) -> None:
        body = parse_tts({"text": "", **(await self._start_event()).request})
        text = body.text
        model = self._socket.headers.get("model")
        try:
            async with asyncio.TaskGroup() as group:
                # Before the voice is there, which may take seconds: a client that leaves or pings is heard meanwhile.
                others = [group.create_task(self._receive())]
                self._speech = speech = await synthesis(self._services, self._caller, body, model, is_live=True)
                del body  # a connection may last an hour, and the recordings in it be 32 MiB
                others += [group.create_task(self._listen(speech, text)), group.create_task(self._leave(speech))]
                await self._send_audio(speech)
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as errors:
            # Two of them only if the client went away; then nobody is told which.
            gone = errors.subgroup(WebSocketDisconnect)
            raise (gone or errors).exceptions[0] from errors
        if not self._has_stopped:
            raise Draining("the server is leaving and has said what it was given; open another connection")

    async def _start_event(self) -> _Start:
        limit_s = self._settings.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                event = _event(await self._message())
        except TimeoutError as error:
            raise ApiError(408, f"no start event came within {limit_s:g} s") from error
        if not isinstance(event, _Start):
            raise BadRequest(f"the first event must be start, got {event.event}")
        return event

    async def _receive(self) -> None:
        """Take events for as long as the connection lasts, also behind `stop`, so that its end is noticed at once."""
        while True:
            message = await self._message()
            self._num_message_bytes += len(message)
            if self._num_message_bytes > self._settings.max_text_bytes + _MAX_WAITING_BYTES:
                raise BadRequest(f"{self._num_message_bytes} bytes of events wait; send text at the pace of the audio")
            self._messages.put_nowait(message)

    async def _listen(self, speech: Synthesis, first_text: str) -> None:
        """Do what the events say."""
        if first_text:
            await self._say(speech, first_text)
        while True:
            message = await self._messages.get()
            self._num_message_bytes -= len(message)
            event = _event(message)
            match event:
                case _Start():
                    raise BadRequest("start may come once only")
                case _Stop():
                    self._has_stopped = True
                    await self._end(speech)
                case _ if self._has_stopped:
                    raise BadRequest(f"{event.event} came after stop; open another connection for it")
                case _Text():
                    await self._say(speech, event.text)
                case _Flush():
                    async with self._planning:
                        if not self._is_leaving:
                            await speech.flush()

    async def _say(self, speech: Synthesis, text: str) -> None:
        num_bytes = speech.num_waiting_bytes + len(text.encode())
        if num_bytes > self._settings.max_text_bytes:
            raise BadRequest(
                f"{num_bytes} bytes of text wait to be spoken, at most {self._settings.max_text_bytes} may; "
                "send text at the pace of the audio"
            )
        async with self._planning:
            if not self._is_leaving:
                await speech.feed(text)

    async def _end(self, speech: Synthesis) -> None:
        async with self._planning:
            await speech.end()

    async def _leave(self, speech: Synthesis) -> None:
        """Once the server leaves, speak what is left and take no more text."""
        while self._services.engine.status().stage is not Stage.DRAINING:
            await asyncio.sleep(_STAGE_EVERY_S)
        self._is_leaving = True
        await self._end(speech)

    async def _send_audio(self, speech: Synthesis) -> None:
        async for piece in speech.pieces():
            for start in range(0, len(piece.data), _MAX_AUDIO_BYTES):
                await self._send({"event": "audio", "audio": piece.data[start : start + _MAX_AUDIO_BYTES]})
                self._touch()

    async def _message(self) -> bytes:
        """The next message.  Raises BadRequest for one of text, WebSocketDisconnect at the end."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        self._touch()
        data: bytes | None = message.get("bytes")
        if data is None:
            raise BadRequest("a message must be binary msgpack, got text")
        return data

    async def _send(self, event: dict[str, object]) -> None:
        # The server's own buffer is small: a send waits for a client that does not read, and so does the engine.
        try:
            async with asyncio.timeout(self._settings.send_limit_s):
                await self._socket.send_bytes(ormsgpack.packb(event))
        except TimeoutError as error:
            raise WebSocketDisconnect(1006, "the client reads nothing") from error

    async def _finish(self, event: dict[str, object], code: int) -> None:
        await self._send(event)
        await self._socket.close(code)

    def _touch(self) -> None:
        """Something was said or heard."""
        if self._idle is not None and not self._idle.expired():
            self._idle.reschedule(asyncio.get_running_loop().time() + self._settings.idle_limit_s)
