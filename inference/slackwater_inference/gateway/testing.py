"""Real servers on loopback for tests of the gateway: any application, and a scripted replica.

Owns nothing that serves users.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from slackwater_inference.gateway.app import Receive, Scope, Send
from slackwater_inference.gateway.server import Server, listen, url_of


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a free port of this machine; yields its URL."""
    listener = listen("127.0.0.1", 0)
    accepts = asyncio.Event()
    server = Server(app, on_ready=accepts.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await accepts.wait()
    try:
        yield url_of(listener)
    finally:
        server.force_exit = True  # a test that failed leaves requests that never end
        server.leave()
        await task


class Call:
    """One request at a scripted replica, and the means to answer it badly."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.target: bytes = scope["raw_path"] + b"?" + scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.body = b""

    async def read(self) -> None:
        """Take the whole request."""
        more = True
        while more:
            message = await self._receive()
            self.body += message["body"]
            more = message["more_body"]

    async def start(self, status: int = 200, **headers: str) -> None:
        """Send status and headers; `_` in a name stands for `-`."""
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def chunk(self, data: bytes) -> None:
        """Send body bytes."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the answer in order."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(self, status: int, data: bytes, **headers: str) -> None:
        """Send a whole answer."""
        await self.start(status, **headers)
        await self.chunk(data)
        await self.end()

    async def gone(self) -> None:
        """Wait until the caller's connection ends."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def die(self) -> None:
        """Reset the connection, as a killed process does."""
        self._scope["state"]["abort"]()
        await asyncio.sleep(0)


class ScriptedReplica:
    """An ASGI application that answers each request with `script`, and counts."""

    def __init__(self, script: Callable[[Call], Awaitable[None]]) -> None:
        self._script = script
        self.calls: list[Call] = []
        self.in_flight = 0
        self.max_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        call = Call(scope, receive, send)
        await call.read()
        self.calls.append(call)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await self._script(call)
        finally:
            self.in_flight -= 1
