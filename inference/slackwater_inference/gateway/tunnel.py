"""A websocket's way through the gateway: the handshake as an HTTP exchange, then bytes both ways, unread but for
where their frames begin.

Owns both connections of a session and how it ends.  Owns no slot and no choice: `app` gives it the replica.
`server` has uvicorn hand each upgrade to `TunnelProtocol`.

A session that did not end with the replica's close frame is never closed in order: its client gets a reset.
"""

import asyncio
import contextlib
import http
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11
import httpx
import uvicorn
from uvicorn.server import ServerState

from slackwater_inference.gateway.frames import Frame, FrameScanner
from slackwater_inference.gateway.routing import Outcome
from slackwater_inference.gateway.slots import Refusal
from slackwater_inference.gateway.upstream import (
    OURS,
    Died,
    Headers,
    TooSlow,
    Unreachable,
    end_to_end,
    error_text,
    request_id_of,
)

READ_BYTES = 64 * 2**10
MAX_DENIAL_BYTES = 64 * 2**10  # of a refused handshake's body, which is an error message
FLUSH_TIMEOUT_S = 10.0  # for the last bytes of a session that is over
SERVERS_FAULT = 1011  # close codes from here on say that the server could not go on (RFC 6455 section 7.4.1)

# Extensions are left out: audio does not get smaller by deflate, and frames stay readable here.
NOT_SENT_ON = OURS | {b"sec-websocket-extensions", b"x-request-id"}


class Client:
    """One client that asked for a websocket: its handshake, its connection, and what it was answered."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request_line, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        method, self.target, _ = request_line.split(b" ")
        self.method = method.decode("ascii")
        given = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
        self.request_id = request_id_of(given)
        self.headers: Headers = [*end_to_end(given, NOT_SENT_ON), (b"x-request-id", self.request_id)]
        self.reader = reader
        self.writer = writer
        self.status: int | None = None
        self.has_left = False

    def answer(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """Send the handshake's answer: 101, or a refusal after which the connection ends."""
        self.status = status
        kept = [(name, value) for name, value in headers if name != b"x-request-id"]
        kept.append((b"x-request-id", self.request_id))
        if status == 101:
            kept += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        else:
            kept.append((b"connection", b"close"))
        lines = [b"HTTP/1.1 %d %s" % (status, _phrase(status)), *(b"%s: %s" % header for header in kept), b"", body]
        self.writer.write(b"\r\n".join(lines))

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error of our own."""
        headers, body = refusal.answer()
        self.answer(refusal.status, headers, body)

    def abort(self) -> None:
        """Reset the connection."""
        reset(self.writer.transport)


class TunnelProtocol(asyncio.StreamReaderProtocol):
    """A client's connection from the moment in which uvicorn saw that it wants a websocket.

    serve: called once with the client, in a task that is cancelled when the client leaves before its 101.
    """

    def __init__(
        self,
        serve: Callable[[Client], Awaitable[None]],
        config: uvicorn.Config,  # noqa: ARG002 - uvicorn gives these three to every protocol
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002 - as above
    ) -> None:
        self._inbox = asyncio.StreamReader(READ_BYTES)
        super().__init__(self._inbox)
        self._serve = serve
        self._server_state = server_state
        self._connection: asyncio.Transport
        self._client: Client | None = None
        self._serving: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, so that a draining server waits for it."""
        assert isinstance(transport, asyncio.Transport)
        self._connection = transport
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # a closed list of uvicorn's own protocols
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """The handshake, written anew by uvicorn; then the session's bytes."""
        if self._client is None:
            loop = asyncio.get_running_loop()
            writer = asyncio.StreamWriter(self._connection, self, self._inbox, loop)
            self._client = Client(data, self._inbox, writer)
            self._serving = loop.create_task(self._run(self._client))
            self._server_state.tasks.add(self._serving)
            self._serving.add_done_callback(self._server_state.tasks.discard)
        elif self._client.status == 101:
            super().data_received(data)
        else:
            self._left()  # RFC 6455 section 4.1: nothing may come before the answer

    def eof_received(self) -> bool:
        """The client sends no more; before its 101 it has nothing to wait for."""
        self._left()
        super().eof_received()
        return True  # the other direction may go on

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._server_state.connections.discard(self)
        self._left()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """uvicorn's call when it begins to leave: a session is let go on to its end, or until it is cut."""

    def _left(self) -> None:
        if self._client is not None:
            self._client.has_left = True
            if self._client.status is None and self._serving is not None:
                self._serving.cancel()

    async def _run(self, client: Client) -> None:
        try:
            await self._serve(client)
        finally:
            client.writer.close()  # what is written still goes out, if the client takes it
            try:
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    await client.writer.wait_closed()
            except OSError:
                client.abort()


@dataclass(frozen=True, slots=True)
class Denial:
    """A replica's answer to a handshake that it does not take."""

    status: int
    headers: Headers
    body: bytes


class Session:
    """A replica's end of a websocket whose handshake it took.  `headers` are of its 101."""

    def __init__(self, headers: Headers, early: bytes, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]):
        self.headers = headers
        self._early = early  # frames that came with the 101
        self._reader, self._writer = streams
        self._scanner = FrameScanner()
        self._close_code: int | None = None

    async def splice(self, client: Client, idle_timeout_s: float, on_audio: Callable[[float], None]) -> Outcome:
        """Pass bytes both ways until the session ends; no more is read than the other side takes.

        on_audio: called at the first audio with the seconds, since the 101, that the client took to ask for it.
        A session that passes no message for idle_timeout_s ends as one whose client left.
        """
        clock = asyncio.get_running_loop().time
        began_s = asked_s = clock()
        has_audio = False
        asked = FrameScanner()

        def from_client(data: bytes) -> None:
            nonlocal asked_s
            if any(frame.is_data for frame in asked.feed(data)):
                asked_s = clock()
                idle.reschedule(asked_s + idle_timeout_s)

        def from_replica(data: bytes) -> None:
            nonlocal has_audio
            for frame in self._scanner.feed(data):
                self._close_code = self._close_code or frame.close_code
                if frame.is_data:
                    idle.reschedule(clock() + idle_timeout_s)
                if not has_audio and _is_audio(frame):
                    has_audio = True
                    on_audio(asked_s - began_s)

        async def up() -> None:
            await _pump(client.reader, self._writer, from_client)
            if self._writer.can_write_eof():  # TLS cannot; there the replica only hears nothing more
                self._writer.write_eof()

        client.answer(101, self.headers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle_timeout_s) as idle:
                if self._early:
                    from_replica(self._early)
                    client.writer.write(self._early)
                await _both_ways(up(), _pump(self._reader, client.writer, from_replica))
        outcome = self._outcome(client, has_idled=idle.expired())
        if self._close_code is None:
            client.abort()
        return outcome

    def _outcome(self, client: Client, has_idled: bool) -> Outcome:
        if self._close_code is not None:
            return Outcome.FAILED if self._close_code >= SERVERS_FAULT else Outcome.DONE
        return Outcome.GONE if client.has_left or has_idled else Outcome.FAILED


@asynccontextmanager
async def knock(
    base_url: str, client: Client, connect_timeout_s: float, answer_timeout_s: float
) -> AsyncIterator[Session | Denial]:
    """Send the client's handshake to a replica; leaving the block ends the connection.

    Raises Unreachable, Died or TooSlow; the client has seen nothing then.
    """
    url = httpx.URL(base_url)
    try:
        async with asyncio.timeout(connect_timeout_s):
            port = url.port or (443 if url.scheme == "https" else 80)
            streams = await asyncio.open_connection(url.host, port, limit=READ_BYTES, ssl=url.scheme == "https" or None)
    except OSError as error:  # TimeoutError is one
        raise Unreachable(error_text(error)) from error
    try:
        try:
            async with asyncio.timeout(answer_timeout_s):
                answer = await _handshake(url.netloc, client, streams)
        except TimeoutError as error:
            raise TooSlow(error_text(error)) from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise Died(error_text(error)) from error
        yield answer
    finally:
        # A session that has ended needs no answer, and the replica must hear of one that broke at once.
        reset(streams[1].transport)


def reset(transport: asyncio.BaseTransport) -> None:
    """End a connection so that the far side cannot take what it has for all there is."""
    assert isinstance(transport, asyncio.Transport)
    with contextlib.suppress(OSError):  # it is closed already
        linger_none = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
    transport.abort()


async def _handshake(
    host: bytes, client: Client, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> Session | Denial:
    reader, writer = streams
    connection = h11.Connection(h11.CLIENT)
    hop: Headers = [(b"host", host), (b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
    request = h11.Request(method=client.method, target=client.target, headers=hop + client.headers)
    writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    denial, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.InformationalResponse) and event.status_code == 101:
            early, _ = connection.trailing_data
            return Session(end_to_end(event.headers.raw_items()), early, streams)
        elif isinstance(event, h11.Response):
            denial = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_DENIAL_BYTES:
                raise Died(f"a refusal of more than {MAX_DENIAL_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            assert denial is not None
            headers = end_to_end(denial.headers.raw_items(), frozenset({b"content-length"}))
            return Denial(denial.status_code, [*headers, (b"content-length", b"%d" % len(body))], body)
        elif isinstance(event, h11.ConnectionClosed):
            raise Died("the connection ended before the handshake's answer")


async def _both_ways(up: Awaitable[None], down: Awaitable[None]) -> None:
    """Run until the replica's direction has ended, or either has broken."""
    ups, downs = asyncio.ensure_future(up), asyncio.ensure_future(down)
    try:
        await asyncio.wait({ups, downs}, return_when=asyncio.FIRST_COMPLETED)
        if not downs.done() and ups.exception() is None:  # the client will send no more; it may still listen
            await asyncio.wait({downs})
    finally:
        for task in (ups, downs):
            task.cancel()
        await asyncio.wait({ups, downs})
    for task in (ups, downs):
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):
            raise error


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, on_data: Callable[[bytes], None]) -> None:
    """Pass bytes on until the source ends.  Raises OSError when one side breaks."""
    while data := await source.read(READ_BYTES):
        on_data(data)
        sink.write(data)
        await sink.drain()


def _is_audio(frame: Frame) -> bool:
    """Does a replica's frame begin the contract's audio event, `{"event": "audio", …}` in msgpack?"""
    return frame.is_data and b"\xa5event\xa5audio" in frame.head


def _phrase(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
