"""Both ends of a websocket through the gateway, as raw connections on loopback, for tests.

Owns frames, a scripted replica that shakes hands, and a client of the gateway.  Owns nothing that serves users.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import h11
import httpx
import ormsgpack

from slackwater_inference.gateway.routing import ReplicaSpec
from slackwater_inference.gateway.testing import Rig
from slackwater_inference.gateway.tunnel import reset

BINARY, CLOSE, PING = 2, 8, 9  # opcodes
AUDIO = ormsgpack.packb({"event": "audio", "audio": b"x" * 100})
FINISH = ormsgpack.packb({"event": "finish", "reason": "stop"})


def frame(opcode: int, payload: bytes = b"") -> bytes:
    """An unmasked frame, as servers send them."""
    length = len(payload)
    return bytes([0x80 | opcode]) + (bytes([length]) if length < 126 else b"\x7e" + length.to_bytes(2, "big")) + payload


def masked(opcode: int, payload: bytes = b"") -> bytes:
    """A frame as clients send them, with the mask 0."""
    plain = frame(opcode, payload)
    header = len(plain) - len(payload)
    return bytes([plain[0], plain[1] | 0x80]) + plain[2:header] + b"\0\0\0\0" + payload


class Visit:
    """One connection at a scripted replica, or at the gateway: raw bytes in and out.

    head: the far side's request or answer, once it was read.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.head = b""

    async def accept(self, *frames: bytes) -> None:
        """Shake hands, and send these frames in the same breath."""
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Of: replica\r\n\r\n"
        await self.say(head, *frames)

    async def say(self, *data: bytes) -> None:
        """Send bytes."""
        self.writer.write(b"".join(data))
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the far side has ended the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(2**16):
                pass

    async def is_cut(self) -> bool:
        """Does the connection end with a reset, and not in order?"""
        try:
            while await self.reader.read(2**16):
                pass
        except ConnectionResetError:
            return True
        return False

    def die(self) -> None:
        """Reset the connection, as a killed process does."""
        reset(self.writer.transport)


Script = Callable[[Visit], Awaitable[None]]


class LiveReplica:
    """A raw server whose every connection is played by a script once the handshake's head is here."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.visits: list[Visit] = []
        self.num_open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        visit = Visit(reader, writer)
        visit.head = await reader.readuntil(b"\r\n\r\n")
        self.visits.append(visit)
        self.num_open += 1
        try:
            await self._script(visit)
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def live(script: Script, slots: int = 1) -> AsyncIterator[tuple[LiveReplica, ReplicaSpec]]:
    """Serve a scripted replica; yields it and what a gateway is told of it."""
    played = LiveReplica(script)
    server = await asyncio.start_server(played, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield played, ReplicaSpec(url, url, slots)
    finally:
        server.close()
        for visit in played.visits:
            visit.die()


async def echo(visit: Visit) -> None:
    """The script of a session that sends back what it gets."""
    await visit.accept()
    while data := await visit.reader.read(2**16):
        await visit.say(data)


async def hold(visit: Visit) -> None:
    """The script of a session that goes on until its client leaves."""
    await visit.accept(frame(BINARY, AUDIO))
    await visit.gone()


async def ask(made: Rig, *headers: str, target: str = "/v1/tts/live", method: str = "GET") -> Visit:
    """Send a websocket's handshake to the gateway."""
    streams = await asyncio.open_connection("127.0.0.1", httpx.URL(made.url).port)
    lines = [f"{method} {target} HTTP/1.1", "Host: h", "Upgrade: websocket", "Connection: keep-alive, Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AQIDBAUGBwgJCgsMDQ4PEC==", *headers, "", ""]
    visit = Visit(*streams)
    await visit.say("\r\n".join(lines).encode())
    return visit


async def opened(made: Rig, *headers: str) -> Visit:
    """A websocket that was taken."""
    visit = await ask(made, *headers)
    visit.head = await visit.reader.readuntil(b"\r\n\r\n")
    assert visit.head.startswith(b"HTTP/1.1 101 "), visit.head
    return visit


async def refused(visit: Visit) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the answer to one that was not."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    connection.receive_data(await visit.reader.read())
    head, body = connection.next_event(), connection.next_event()
    assert isinstance(head, h11.Response)
    visit.writer.close()
    return head.status_code, dict(head.headers), bytes(body.data) if isinstance(body, h11.Data) else b""
