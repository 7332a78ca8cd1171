"""A client of `/v1/tts/live` in the application's own process, for tests.

Owns the client's side of the protocol's messages, and an engine for each connection.  Owns nothing that serves users.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import ormsgpack
from fastapi import FastAPI

from slackwater_inference.api.app import create_app
from slackwater_inference.api.services import Services
from slackwater_inference.api.testing import micro_services, running

SENTENCE = "A sentence that is long enough to be one part of the text, all by itself, as can be seen."

Headers = Iterable[tuple[bytes, bytes]]


class Denied(Exception):
    """The handshake was answered with an error."""

    def __init__(self, status: int, body: bytes, headers: dict[bytes, bytes]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = headers


class Socket:
    """A websocket client of an ASGI application, as a server passes it on.

    reads: False makes it a client that takes nothing from its connection after the handshake.
    """

    def __init__(self, app: FastAPI, headers: Headers = (), reads: bool = True) -> None:
        self.services: Services = app.state.services
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from_app: asyncio.Queue[Any] = asyncio.Queue()
        self._reads = reads
        scope = {
            "type": "websocket",
            "path": "/v1/tts/live",
            "headers": [(b"host", b"test"), *headers],
            "query_string": b"",
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }
        self.task = asyncio.ensure_future(app(scope, self._to_app.get, self._send))

    async def _send(self, message: Any) -> None:
        if not self._reads and message["type"] == "websocket.send":
            await asyncio.Event().wait()
        self._from_app.put_nowait(message)

    async def open(self) -> None:
        """Shake hands.  Raises Denied."""
        self._to_app.put_nowait({"type": "websocket.connect"})
        message = await self._from_app.get()
        if message["type"] != "websocket.accept":
            body = await self._from_app.get()
            raise Denied(message["status"], body["body"], dict(message["headers"]))

    def say(self, event: str, **fields: Any) -> None:
        """Send an event."""
        self.send(ormsgpack.packb({"event": event, **fields}))

    def start(self, **fields: Any) -> None:
        """Send `start` with a request for pcm, but for these fields of it."""
        self.say("start", request={"text": "", "format": "pcm", **fields})

    def send(self, data: bytes | str) -> None:
        """Send a message, binary or of text."""
        kind = "bytes" if isinstance(data, bytes) else "text"
        self._to_app.put_nowait({"type": "websocket.receive", kind: data})

    def vanish(self) -> None:
        """Be gone without a word."""
        self._to_app.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def hear(self) -> dict[str, Any]:
        """The next event."""
        message = await self._from_app.get()
        assert message["type"] == "websocket.send", message
        event: dict[str, Any] = ormsgpack.unpackb(message["bytes"])
        return event

    async def listen(self) -> tuple[bytes, dict[str, Any], int]:
        """Audio up to `finish`, that event, and the close code."""
        audio = b""
        while (event := await self.hear())["event"] == "audio":
            audio += event["audio"]
        closed = await self._from_app.get()
        await self.task
        return audio, event, closed["code"]


@asynccontextmanager
async def live(
    headers: Headers = (), reads: bool = True, services: Services | None = None, **made_of: Any
) -> AsyncIterator[Socket]:
    """An open socket on an engine of its own; ends within 20 s.  made_of: arguments of `micro_services`."""
    services = services or micro_services(**made_of)
    async with asyncio.timeout(20), running(services):
        socket = Socket(create_app(services), headers, reads)
        try:
            await socket.open()
            yield socket
        finally:
            socket.task.cancel()
            await asyncio.wait({socket.task})
