"""Real servers on loopback for tests of the gateway: any application, a scripted replica, and a gateway before them.

Owns nothing that serves users.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from slackwater_inference.gateway.app import Gateway, Receive, Scope, Send
from slackwater_inference.gateway.backlog import Backlog
from slackwater_inference.gateway.control import Control
from slackwater_inference.gateway.membership import Membership
from slackwater_inference.gateway.routing import ReplicaSpec, Router
from slackwater_inference.gateway.server import Server, listen, url_of
from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.tunnel import TunnelProtocol
from slackwater_inference.gateway.upstream import Upstream


@asynccontextmanager
async def serving(app: Any, ws: Any = "none") -> AsyncIterator[str]:
    """Serve an ASGI application on a free port of this machine; yields its URL.  ws: as `Server` has it."""
    listener = listen("127.0.0.1", 0)
    accepts = asyncio.Event()
    server = Server(app, on_ready=accepts.set, ws=ws)
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


Script = Callable[[Call], Awaitable[None]]


class ScriptedReplica:
    """An ASGI application that answers each request with `script`, and counts."""

    def __init__(self, script: Script) -> None:
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


@dataclass
class Rig:
    """A running gateway, its client and what else a test looks at."""

    gateway: Gateway
    client: httpx.AsyncClient
    url: str
    backlogs: list[int]


async def say_hello(call: Call) -> None:
    """The script of a replica that is well."""
    await call.answer(200, b"hello", content_type="audio/wav")


def in_two_parts(release: asyncio.Event) -> Script:
    """The script of a replica that waits for `release` in the middle of its answer, `first second`."""

    async def script(call: Call) -> None:
        await call.start(200)
        await call.chunk(b"first ")
        await release.wait()
        await call.chunk(b"second")
        await call.end()

    return script


@asynccontextmanager
async def replica(script: Script, slots: int = 1) -> AsyncIterator[tuple[ScriptedReplica, ReplicaSpec]]:
    """Serve a scripted replica; yields it and what a gateway is told of it."""
    app = ScriptedReplica(script)
    async with serving(app) as url:
        yield app, ReplicaSpec(url, url, slots)


@asynccontextmanager
async def rig(
    *specs: ReplicaSpec, max_queued: int = 8, limits: Limits | None = None, backlog: Backlog | None = None
) -> AsyncIterator[Rig]:
    """Serve a gateway before these replicas."""
    backlogs: list[int] = []

    def on_backlog() -> None:
        backlogs.append(router.queued)
        if backlog is not None:
            backlog.began()

    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream())
        router = Router(max_queued)
        gateway = Gateway(router, upstream, limits or Limits(), on_backlog)
        gateway.set_replicas(list(specs))
        url = await stack.enter_async_context(serving(gateway, ws=partial(TunnelProtocol, gateway.tunnel)))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=20))
        yield Rig(gateway, client, url, backlogs)


@dataclass
class Controlled:
    """A running gateway with its control address."""

    made: Rig
    control: Control
    backlog: Backlog
    client: httpx.AsyncClient  # of the control address


@asynccontextmanager
async def controlled(*specs: ReplicaSpec, max_wait_s: float = 3600.0) -> AsyncIterator[Controlled]:
    """Serve a gateway that is told by its control address, too.  specs: what its command line gave."""
    backlog = Backlog()
    async with rig(*specs, backlog=backlog) as made:
        control = Control(made.gateway, Membership(made.gateway, specs), backlog, max_wait_s)
        async with (
            serving(control) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
        ):
            yield Controlled(made, control, backlog, client)


@asynccontextmanager
async def one_replica(
    script: Script, slots: int = 1, max_queued: int = 8, limits: Limits | None = None
) -> AsyncIterator[tuple[Rig, ScriptedReplica]]:
    """Serve a gateway before one scripted replica."""
    async with replica(script, slots) as (app, spec), rig(spec, max_queued=max_queued, limits=limits) as made:
        yield made, app


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; the test's own time limit ends a wrong one."""
    while not condition():
        await asyncio.sleep(0.005)


def unused_url() -> str:
    """An address of this machine that takes no connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def metric(made: Rig, line_start: str) -> float:
    """The sum of the gateway's metrics whose line starts so."""
    lines = (await made.client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))
