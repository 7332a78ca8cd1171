"""Websockets through the gateway, before scripted replicas that are well: what passes, in which order."""

import asyncio
import json

import httpx_ws
import ormsgpack
import pytest
from wsproto.utilities import generate_accept_token

from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.testing import metric, rig, until
from slackwater_inference.testing.tunnel import (
    AUDIO,
    BINARY,
    CLOSE,
    FINISH,
    PING,
    Visit,
    ask,
    echo,
    frame,
    hold,
    live,
    masked,
    opened,
    refused,
)

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
