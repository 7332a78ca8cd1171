"""Websockets through the gateway, before scripted replicas: order, refusals, retries, deaths, back-pressure."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import h11
import httpx
import httpx_ws
import ormsgpack
import pytest

from slackwater_inference.gateway.routing import ReplicaSpec
from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.testing import Rig, metric, replica, rig, say_hello, until, unused_url
from slackwater_inference.gateway.tunnel import reset

BINARY, CLOSE, PING = 2, 8, 9
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
    """One connection at a scripted replica, or at the gateway: raw bytes in and out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.head = b""

    async def accept(self, *frames: bytes) -> None:
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Of: replica\r\n\r\n"
        await self.say(head, *frames)

    async def say(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the far side has ended the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(2**16):
                pass

    def die(self) -> None:
        reset(self.writer.transport)


Script = Callable[[Visit], Awaitable[None]]


class LiveReplica:
    """A raw server whose every connection is played by a script once the handshake's head is here."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.visits: list[Visit] = []
        self.num_open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
    played = LiveReplica(script)
    server = await asyncio.start_server(played, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield played, ReplicaSpec(url, url, slots)
    finally:
        server.close()
        for visit in played.visits:
            visit.die()


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
    """The answer of one that was not."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    connection.receive_data(await visit.reader.read())
    head, body = connection.next_event(), connection.next_event()
    assert isinstance(head, h11.Response)
    visit.writer.close()
    return head.status_code, dict(head.headers), bytes(body.data) if isinstance(body, h11.Data) else b""


async def echo(visit: Visit) -> None:
    await visit.accept()
    while data := await visit.reader.read(2**16):
        await visit.say(data)


async def hold(visit: Visit) -> None:
    """The script of a session that goes on until its client leaves."""
    await visit.accept(frame(BINARY, AUDIO))
    await visit.gone()


async def is_cut(visit: Visit) -> bool:
    """Does the connection end with a reset, and not in order?"""
    try:
        while await visit.reader.read(2**16):
            pass
    except ConnectionResetError:
        return True
    return False


# Through


async def test_handshake_and_bytes_pass_both_ways() -> None:
    async with live(echo) as (played, spec), rig(spec) as made:
        client = await opened(made, "Authorization: Bearer k", "model: s2-pro", "X-Request-Id: r1", "TE: gzip")
        await client.say(masked(BINARY, b"one"))
        first = await client.reader.readexactly(9)
        await client.say(masked(PING))

        assert first == masked(BINARY, b"one")
        assert await client.reader.readexactly(6) == masked(PING)
        sent_on = played.visits[0].head.lower()
        assert sent_on.startswith(b"get /v1/tts/live http/1.1\r\n")
        for line in (b"authorization: bearer k", b"model: s2-pro", b"x-request-id: r1", b"upgrade: websocket"):
            assert b"\r\n" + line + b"\r\n" in sent_on
        assert sent_on.count(b"\r\nhost:") == sent_on.count(b"\r\nconnection:") == 1
        assert b"\r\nte:" not in sent_on
        assert b"\r\nx-of: replica\r\n" in client.head.lower()
        assert b"\r\nx-request-id: r1\r\n" in client.head
        client.die()


async def test_frames_that_come_with_the_handshakes_answer_are_not_lost() -> None:
    async def eager(visit: Visit) -> None:
        await visit.accept(frame(BINARY, b"early"))
        await visit.gone()

    async with live(eager) as (_, spec), rig(spec) as made:
        client = await opened(made)

        assert await client.reader.readexactly(7) == frame(BINARY, b"early")
        client.die()


async def test_a_client_library_and_a_session_that_ends_in_order() -> None:
    async def script(visit: Visit) -> None:
        key = next(line for line in visit.head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
        from wsproto.utilities import generate_accept_token

        accept = generate_accept_token(key.split(b": ")[1])
        head = (
            b"HTTP/1.1 101 OK\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n" % accept
        )
        await visit.say(head)
        await visit.reader.read(1)
        await visit.say(frame(BINARY, AUDIO), frame(BINARY, FINISH), frame(CLOSE, b"\x03\xe8"))

    async with live(script) as (_, spec), rig(spec) as made:
        async with httpx_ws.aconnect_ws(f"{made.url}/v1/tts/live", made.client) as session:
            await session.send_bytes(b"start")
            events = [ormsgpack.unpackb(await session.receive_bytes()) for _ in range(2)]
            with pytest.raises(httpx_ws.WebSocketDisconnect) as ended:
                await session.receive_bytes()

        assert [event["event"] for event in events] == ["audio", "finish"]
        assert ended.value.code == 1000
        await until(lambda: made.gateway.signals().in_flight == 0)
        signals = made.gateway.signals()
        assert (signals.arrivals_total, signals.failed_total) == (1, 0)
        assert await metric(made, 'edge_requests_total{code="101"}') == 1
        assert await metric(made, "edge_broken_streams_total") == 0


async def test_deflate_is_not_negotiated_since_audio_does_not_get_smaller() -> None:
    async with live(hold) as (played, spec), rig(spec) as made:
        client = await opened(made, "Sec-WebSocket-Extensions: permessage-deflate")

        assert b"permessage-deflate" not in played.visits[0].head
        client.die()


# Slots and order


async def test_a_session_holds_its_slot_and_requests_of_both_kinds_wait_in_one_queue() -> None:
    async with live(hold) as (played, spec), rig(spec) as made:
        first = await opened(made)
        waiting = await ask(made)
        await until(lambda: made.gateway.signals().queued == 1)
        behind = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: made.gateway.signals().queued == 2)
        assert len(played.visits) == 1

        first.die()
        await waiting.reader.readuntil(b"\r\n\r\n")

        assert made.gateway.signals().queued == 1
        assert played.num_open == 1
        waiting.die()
        behind.cancel()


async def test_a_full_queue_is_a_plain_429_with_the_time_to_come_back() -> None:
    async with live(hold) as (_, spec), rig(spec, max_queued=0) as made:
        client = await opened(made)

        status, headers, body = await refused(await ask(made, "X-Request-Id: r7"))

        assert (status, headers[b"x-request-id"]) == (429, b"r7")
        assert int(headers[b"retry-after"]) >= 1
        assert json.loads(body) == {"status": 429, "message": "all slots are busy and the queue is full"}
        assert await metric(made, 'edge_rejected_total{reason="queue_full"}') == 1
        client.die()


async def test_without_a_replica_a_session_is_refused_in_time() -> None:
    async with rig(limits=Limits(queue_timeout_s=0.05)) as made:
        status, headers, body = await refused(await ask(made))

    assert (status, headers[b"retry-after"]) == (503, b"5")
    assert json.loads(body) == {"status": 503, "message": "no replica was ready within 0.05 s"}


@pytest.mark.parametrize(
    ("target", "method"), [pytest.param("/metrics", "GET", id="path"), pytest.param("/v1/tts", "POST", id="method")]
)
async def test_other_upgrades_stay_inside(target: str, method: str) -> None:
    async with live(hold) as (played, spec), rig(spec) as made:
        status, _, body = await refused(await ask(made, target=target, method=method))

    assert (status, json.loads(body)["status"]) == (404, 404)
    assert played.visits == []


async def test_a_client_that_leaves_the_queue_is_never_sent_on() -> None:
    async with live(hold) as (played, spec), rig(spec) as made:
        first = await opened(made)
        waiting = [await ask(made) for _ in range(2)]
        await until(lambda: made.gateway.signals().queued == 2)

        waiting[0].die()
        waiting[1].writer.close()
        await until(lambda: made.gateway.signals().queued == 0)

        assert len(played.visits) == 1
        assert await metric(made, 'edge_client_aborts_total{phase="queued"}') == 2
        first.die()


# Refusals and deaths of replicas


async def test_a_replicas_refusal_is_passed_on_as_it_is() -> None:
    async def script(visit: Visit) -> None:
        body = b'{"status": 401, "message": "no"}'
        await visit.say(b"HTTP/1.1 401 Unauthorized\r\nX-More: 1\r\nTransfer-Encoding: chunked\r\n\r\n")
        await visit.say(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        await visit.gone()

    async with live(script) as (_, spec), rig(spec) as made:
        status, headers, body = await refused(await ask(made))

        assert (status, headers[b"x-more"], json.loads(body)) == (401, b"1", {"status": 401, "message": "no"})
        assert (made.gateway.signals().in_flight, made.gateway.signals().failed_total) == (0, 0)


@pytest.mark.parametrize("how", ["unreachable", "dies", "closes", "declines", "babbles"])
async def test_a_replica_that_fails_before_the_answer_costs_the_client_nothing(how: str) -> None:
    async def bad(visit: Visit) -> None:
        if how == "dies":
            visit.die()
        elif how == "declines":
            await visit.say(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            await visit.gone()
        elif how == "babbles":
            await visit.say(b"\x00\x01nonsense\r\n\r\n")

    async with live(bad) as (_, one), live(hold) as (played, two):
        first = ReplicaSpec("dead", unused_url(), 1) if how == "unreachable" else one
        async with rig(first, two) as made:
            client = await opened(made)

            assert len(played.visits) == 1
            reason = {"unreachable": "unreachable", "declines": "declined"}.get(how, "died")
            assert await metric(made, f'edge_retries_total{{reason="{reason}"}}') == 1
            client.die()


@pytest.mark.parametrize("how", ["resets", "closes in order"])
async def test_a_replica_that_dies_in_a_session_is_a_reset_at_the_client(how: str) -> None:
    async def dying(visit: Visit) -> None:
        await visit.accept(frame(BINARY, AUDIO))
        await visit.reader.read(1)
        if how == "resets":
            visit.die()

    async with live(dying) as (played, spec), live(hold) as (other, spare), rig(spec, spare) as made:
        client = await opened(made)
        await client.reader.readexactly(len(frame(BINARY, AUDIO)))
        await client.say(masked(BINARY, b"go"))

        assert await is_cut(client)
        await until(lambda: made.gateway.signals().in_flight == 0)
        assert (len(played.visits), len(other.visits)) == (1, 0), "nothing may be tried again after the 101"
        assert made.gateway.signals().failed_total == 1
        assert await metric(made, "edge_broken_streams_total") == 1


async def test_a_close_frame_that_says_server_error_counts_as_failed() -> None:
    async def failing(visit: Visit) -> None:
        await visit.accept(frame(CLOSE, b"\x03\xf3"))

    async with live(failing) as (_, spec), rig(spec) as made:
        client = await opened(made)

        assert await client.reader.read() == frame(CLOSE, b"\x03\xf3"), "it still ends in order"
        await until(lambda: made.gateway.signals().failed_total == 1)


# Clients that leave, sleep or read slowly


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_client_that_vanishes_ends_the_replicas_work_and_frees_the_slot(how: str) -> None:
    async with live(hold) as (played, spec), rig(spec) as made:
        client = await opened(made)
        if how == "reset":
            client.die()
        else:
            client.writer.close()

        await until(lambda: made.gateway.signals().in_flight == 0 and played.num_open == 0)

        assert made.gateway.signals().failed_total == 0
        assert await metric(made, 'edge_client_aborts_total{phase="streaming"}') == 1


async def test_a_client_that_only_stops_sending_still_hears_the_rest() -> None:
    async def script(visit: Visit) -> None:
        await visit.accept()
        assert await visit.reader.read() == masked(BINARY, b"last")
        await visit.say(frame(BINARY, FINISH), frame(CLOSE, b"\x03\xe8"))

    async with live(script) as (_, spec), rig(spec) as made:
        client = await opened(made)
        await client.say(masked(BINARY, b"last"))
        client.writer.write_eof()

        assert await client.reader.read() == frame(BINARY, FINISH) + frame(CLOSE, b"\x03\xe8")
        await until(lambda: made.gateway.signals().in_flight == 0)
        assert made.gateway.signals().failed_total == 0


async def test_pings_do_not_keep_a_forgotten_session() -> None:
    async with live(hold) as (_, spec), rig(spec, limits=Limits(idle_timeout_s=0.3)) as made:
        client = await opened(made)
        cut = asyncio.create_task(is_cut(client))
        with contextlib.suppress(ConnectionError):
            while not cut.done():
                await client.say(masked(PING))
                await asyncio.sleep(0.02)

        assert await cut
        await until(lambda: made.gateway.signals().in_flight == 0)
        assert made.gateway.signals().failed_total == 0


async def test_no_more_is_read_from_a_replica_than_its_client_takes() -> None:
    sent = 0

    async def pouring(visit: Visit) -> None:
        nonlocal sent
        await visit.accept()
        visit.writer.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(ConnectionError):
            while True:
                await visit.say(frame(BINARY, b"x" * 60_000))
                sent += 60_000

    async with live(pouring) as (_, spec), rig(spec) as made:
        client = await opened(made)
        client.writer.transport.pause_reading()
        before = -1
        while sent != before:  # until the buffers of both kernels are full, some MB
            before = sent
            await asyncio.sleep(0.1)
        stuck = sent

        client.writer.transport.resume_reading()
        await client.reader.readexactly(stuck)
        assert sent > stuck - 2**20
        assert stuck < 64 * 2**20
        client.die()


# First audio, leaving


async def test_first_audio_counts_from_the_text_that_asked_for_it() -> None:
    async def script(visit: Visit) -> None:
        await visit.accept(frame(BINARY, ormsgpack.packb({"event": "other"})))
        await visit.reader.read(1)
        await visit.say(frame(BINARY, AUDIO))
        await visit.gone()

    async with live(script) as (_, spec), rig(spec) as made:
        client = await opened(made)
        await asyncio.sleep(0.3)  # a person who types
        assert made.gateway.signals().first_audio_p95_s is None

        await client.say(masked(BINARY, b"text"))
        await until(lambda: made.gateway.signals().first_audio_p95_s is not None)

        waited_s = made.gateway.signals().first_audio_p95_s
        assert waited_s is not None
        assert waited_s < 0.25
        assert await metric(made, "edge_ttfb_seconds_count") == 1
        client.die()


async def test_cutting_resets_sessions_as_it_does_streams() -> None:
    async with live(hold) as (_, spec), rig(spec) as made:
        client = await opened(made)

        made.gateway.leave()
        made.gateway.cut()

        assert await is_cut(client)
        await until(lambda: made.gateway.signals().in_flight == 0)


# Beside websockets


async def test_a_post_that_may_have_been_done_is_not_sent_again() -> None:
    async def dying(call):  # type: ignore[no-untyped-def]
        await call.die()

    async with replica(dying) as (first, one), replica(say_hello) as (second, two), rig(one, two) as made:
        made_twice = await made.client.post("/model", content=b"voice")
        looked = await made.client.get("/model")

    assert made_twice.status_code == 502
    assert (looked.status_code, looked.content) == (200, b"hello"), "a look may be repeated"
    assert (len(first.calls), len(second.calls)) == (2, 1)


async def test_a_whole_recording_of_32_mib_passes() -> None:
    async with replica(say_hello) as (played, spec), rig(spec) as made:
        answer = await made.client.post("/model", content=b"x" * 32 * 2**20)

    assert answer.status_code == 200
    assert len(played.calls[0].body) == 32 * 2**20


def test_reset_of_a_closed_connection_is_no_error() -> None:
    class Closed(asyncio.Transport):
        aborted = False

        def get_extra_info(self, name: str, default: object = None) -> socket.socket:
            left, right = socket.socketpair()
            left.close(), right.close()
            return left

        def abort(self) -> None:
            self.aborted = True

    transport = Closed()

    reset(transport)

    assert transport.aborted
