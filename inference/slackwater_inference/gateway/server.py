"""The gateway's process: its listening socket, its life and its talk with the supervisor.

Owns start, drain and end, and the `ready`, `signals` and `leaving` events (contract in
operator/README.md).  Serves nothing itself; `cli` calls `run`.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pydantic
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from slackwater_inference.events import ParentLink
from slackwater_inference.gateway.app import Gateway
from slackwater_inference.gateway.routing import ReplicaSpec, Router
from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.tunnel import TunnelProtocol, reset
from slackwater_inference.gateway.upstream import Upstream

logger = logging.getLogger(__name__)

SIGNALS_EVERY_S = 1.0
BURST_EVERY_S = 0.1


class ReplicaMessage(pydantic.BaseModel):
    """A replica as a person or the supervisor writes it."""

    uid: str = pydantic.Field(min_length=1)
    url: pydantic.HttpUrl
    slots: int = pydantic.Field(ge=1)

    def spec(self) -> ReplicaSpec:
        """The checked value that the rest works with."""
        return ReplicaSpec(self.uid, str(self.url), self.slots)


class ReplicasMessage(pydantic.BaseModel):
    """The `set: replicas` message; fields that we do not know are ignored."""

    replicas: list[ReplicaMessage]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line gave.

    grace_s: for the requests that are here when SIGTERM comes.
    """

    max_queued: int
    grace_s: float
    limits: Limits
    replicas: tuple[ReplicaSpec, ...] = ()


class AbortableProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with `scope["state"]["abort"]()`: reset the connection.

    Returning in the middle of an answer would close it in order, and a client of HTTP/1.0, which has
    no chunks, would take that for the end of a whole answer.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "abort": self._abort}, _loop)

    def _abort(self) -> None:
        reset(self.transport)


class Server(uvicorn.Server):
    """uvicorn's server, with a call once it accepts, `leave` to end it, and no life of its own.

    ws: what uvicorn is to make of a connection that wants a websocket, in its own terms.

    uvicorn would raise a SIGTERM again after its drain, so that the process would not exit with 0,
    and would wake ten times a second to look whether it has to end.
    """

    def __init__(self, app: Any, on_ready: Callable[[], None] = lambda: None, ws: Any = "none") -> None:
        config = uvicorn.Config(
            app,
            http=AbortableProtocol,
            ws=ws,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,  # the replica's own goes through
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._leave = asyncio.Event()

    def leave(self) -> None:
        """Accept nothing more; `serve` returns when the running requests have ended."""
        self.should_exit = True
        self._leave.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._on_ready()

    async def main_loop(self) -> None:
        """Wait for `leave`."""
        await self._leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to whoever runs us."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.  Raises OSError when the address cannot be had."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=1024)
    # As the engine has it (lifecycle.listen): connections inherit it, and no chunk waits for the one before it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL under which a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(listener: socket.socket, settings: Settings, link: ParentLink) -> None:
    """Serve until SIGTERM or SIGINT and the end of what is in flight, or until the parent is gone."""
    asyncio.run(_serve(listener, settings, link))


async def _serve(listener: socket.socket, settings: Settings, link: ParentLink) -> None:
    loop = asyncio.get_running_loop()
    backlog = asyncio.Event()
    url = url_of(listener)
    async with Upstream() as upstream:
        gateway = Gateway(Router(settings.max_queued), upstream, settings.limits, on_backlog=backlog.set)
        gateway.set_replicas(list(settings.replicas))

        def on_ready() -> None:
            logger.info("ready url=%s", url)
            link.say("ready", url=url)

        server = Server(gateway, on_ready, ws=partial(TunnelProtocol, gateway.tunnel))

        def leave(signum: signal.Signals) -> None:
            if server.should_exit:
                return
            logger.info("leaving reason=%s in_flight=%d", signum.name, gateway.signals().in_flight)
            link.say("leaving", reason=signum.name)
            gateway.leave()
            server.leave()
            loop.call_later(settings.grace_s, gateway.cut)

        def on_set(message: dict[str, Any]) -> None:
            specs = parse_replicas(message)
            if specs is not None:
                loop.call_soon_threadsafe(gateway.set_replicas, specs)

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, leave, signum)
        # Nothing here is worth keeping without a parent: clients see a reset, as after a crash.
        link.listen(on_set, on_gone=lambda: os._exit(0))
        teller = asyncio.create_task(_tell_signals(gateway, link, backlog))
        try:
            await server.serve(sockets=[listener])
        finally:
            teller.cancel()


def parse_replicas(message: dict[str, Any]) -> list[ReplicaSpec] | None:
    """The replicas of a `set` message; None for another message, or a wrong one, which is logged:
    the last good set stays."""
    if message.get("set") != "replicas":
        return None
    try:
        parsed = ReplicasMessage.model_validate(message)
    except pydantic.ValidationError as error:
        logger.error("set replicas ignored: %s", "; ".join(f"{e['loc']}: {e['msg']}" for e in error.errors()))
        return None
    return [replica.spec() for replica in parsed.replicas]


async def _tell_signals(gateway: Gateway, link: ParentLink, backlog: asyncio.Event) -> None:
    """Say `signals` once a second, and early when requests begin to wait."""
    while True:
        backlog.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SIGNALS_EVERY_S - BURST_EVERY_S):
                await backlog.wait()
        # In a thread: a supervisor that stopped reading must not stop the streams.
        await asyncio.to_thread(link.say, "signals", **dataclasses.asdict(gateway.signals()))
        await asyncio.sleep(BURST_EVERY_S)
