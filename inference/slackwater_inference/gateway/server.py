"""The gateway's process: its listening sockets, its life and its talk with the supervisor.

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
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from slackwater_inference.events import ParentLink
from slackwater_inference.gateway.app import Gateway
from slackwater_inference.gateway.backlog import MIN_BETWEEN_S, Backlog
from slackwater_inference.gateway.control import Control
from slackwater_inference.gateway.membership import BadReplicas, Membership
from slackwater_inference.gateway.routing import ReplicaSpec, Router
from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.tunnel import TunnelProtocol, reset
from slackwater_inference.gateway.upstream import Upstream

logger = logging.getLogger(__name__)

SIGNALS_EVERY_S = 1.0


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


def run(listener: socket.socket, settings: Settings, link: ParentLink, control: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT and the end of what is in flight, or until the parent is gone.

    control: where an operator of a cluster may ask and tell; None = nobody may.
    """
    asyncio.run(_serve(listener, settings, link, control))


async def _serve(
    listener: socket.socket, settings: Settings, link: ParentLink, control_listener: socket.socket | None
) -> None:
    loop = asyncio.get_running_loop()
    backlog = Backlog()
    urls = {"url": url_of(listener)}
    if control_listener is not None:
        urls["control_url"] = url_of(control_listener)
    async with Upstream() as upstream:
        gateway = Gateway(Router(settings.max_queued), upstream, settings.limits, on_backlog=backlog.began)
        membership = Membership(gateway, settings.replicas)
        control = Control(gateway, membership, backlog)

        def on_ready() -> None:
            logger.info("ready %s", " ".join(f"{name}={url}" for name, url in urls.items()))
            link.say("ready", **urls)

        server = Server(gateway, on_ready, ws=partial(TunnelProtocol, gateway.tunnel))

        def leave(signum: signal.Signals) -> None:
            if server.should_exit:
                return
            logger.info("leaving reason=%s in_flight=%d", signum.name, gateway.signals().in_flight)
            link.say("leaving", reason=signum.name)
            gateway.leave()
            control.leave()
            server.leave()
            loop.call_later(settings.grace_s, gateway.cut)

        def on_set(message: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(_hear, membership, message)

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, leave, signum)
        # Nothing here is worth keeping without a parent: clients see a reset, as after a crash.
        link.listen(on_set, on_gone=lambda: os._exit(0))
        teller = asyncio.create_task(_tell_signals(gateway, link, backlog))
        try:
            # Until the last stream has ended an operator wants to know how many there are.
            async with _controlled(control, control_listener):
                await server.serve(sockets=[listener])
        finally:
            teller.cancel()


@contextlib.asynccontextmanager
async def _controlled(control: Control, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the control address, if there is one, as long as the block runs."""
    if listener is None:
        yield
        return
    accepts = asyncio.Event()
    server = Server(control, on_ready=accepts.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await accepts.wait()
    try:
        yield
    finally:
        control.end()
        server.leave()
        await serving


def _hear(membership: Membership, message: dict[str, Any]) -> None:
    """Take a `set` message of the supervisor.  A wrong one is logged, and the last good set stays."""
    if message.get("set") != "replicas":
        return
    try:
        membership.tell(message)
    except BadReplicas as error:
        logger.error("set replicas ignored: %s", error)


async def _tell_signals(gateway: Gateway, link: ParentLink, backlog: Backlog) -> None:
    """Say `signals` once a second, and early when requests begin to wait."""
    seen = backlog.count
    while True:
        await backlog.wait(seen, SIGNALS_EVERY_S - MIN_BETWEEN_S)
        seen = backlog.count
        # In a thread: a supervisor that stopped reading must not stop the streams.
        await asyncio.to_thread(link.say, "signals", **dataclasses.asdict(gateway.signals()))
        await asyncio.sleep(MIN_BETWEEN_S)
