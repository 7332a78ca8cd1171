"""The gateway before real replicas on loopback when they fail, clients leave or too many come."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from slackwater_inference.gateway.routing import ReplicaSpec
from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.testing import (
    Call,
    in_two_parts,
    metric,
    one_replica,
    replica,
    rig,
    say_hello,
    until,
    unused_url,
)

# Replicas that fail


async def test_a_replica_that_takes_no_connection_is_passed_over() -> None:
    dead = ReplicaSpec("dead", unused_url(), 4)
    async with replica(say_hello) as (app, alive), rig(dead, alive) as made:
        responses = [await made.client.post("/v1/tts") for _ in range(3)]

        assert [response.status_code for response in responses] == [200, 200, 200]
        assert len(app.calls) == 3
        assert await metric(made, 'edge_retries_total{reason="unreachable"}') == 1
        assert made.gateway.signals().failed_total == 0


@pytest.mark.parametrize("after_headers", [False, True])
async def test_a_replica_that_dies_before_its_first_byte_costs_the_client_nothing(after_headers: bool) -> None:
    async def dying(call: Call) -> None:
        if after_headers:
            await call.start(200)
        await call.die()

    async with replica(dying) as (first, one), replica(say_hello) as (second, two), rig(one, two) as made:
        response = await made.client.post("/v1/tts", content=b"text")

        assert (response.status_code, response.content) == (200, b"hello")
        assert [call.body for call in first.calls + second.calls] == [b"text", b"text"]


async def test_a_replica_that_declines_with_503_is_asked_once() -> None:
    async def draining(call: Call) -> None:
        await call.answer(503, b"draining", retry_after="1")

    async with replica(draining) as (first, one), replica(say_hello) as (_, two), rig(one, two) as made:
        response = await made.client.post("/v1/tts")

        assert (response.status_code, response.content) == (200, b"hello")
        assert len(first.calls) == 1


async def test_the_only_replicas_503_is_passed_on() -> None:
    async def full(call: Call) -> None:
        await call.answer(503, b'{"status": 503, "message": "full"}', retry_after="7")

    async with one_replica(full) as (made, app):
        response = await made.client.post("/v1/tts")

    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert len(app.calls) == 1


async def test_a_request_that_kills_every_replica_is_given_up_after_three() -> None:
    async def dying(call: Call) -> None:
        await call.die()

    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(replica(dying)) for _ in range(4)]
        made = await stack.enter_async_context(rig(*[spec for _, spec in pairs]))

        response = await made.client.post("/v1/tts")

        assert response.json() == {"status": 502, "message": "3 replicas died before they answered"}
        assert sum(len(app.calls) for app, _ in pairs) == 3
        assert made.gateway.signals().failed_total == 1


async def test_a_request_whose_replica_died_waits_for_the_next_one() -> None:
    async def dying(call: Call) -> None:
        await call.die()

    async with replica(dying) as (first, one), replica(say_hello) as (_, two), rig(one) as made:
        waiting = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: len(first.calls) == 1 and made.gateway.signals().queued == 1)

        made.gateway.set_replicas([two])

        assert (await waiting).content == b"hello"


async def test_a_stream_that_breaks_is_an_error_at_the_client() -> None:
    async def breaking(call: Call) -> None:
        await call.start(200, content_type="audio/wav")
        await call.chunk(b"x" * 1000)
        await call.die()

    async with one_replica(breaking) as (made, app):
        with pytest.raises(httpx.TransportError):
            await made.client.post("/v1/tts")

        assert len(app.calls) == 1, "nothing may be tried again after the first byte"
        assert made.gateway.signals().failed_total == 1
        assert await metric(made, "edge_broken_streams_total") == 1


async def test_a_stream_that_breaks_is_an_error_even_for_a_client_without_chunks() -> None:
    go_on = asyncio.Event()

    async def breaking(call: Call) -> None:
        await call.start(200)
        await call.chunk(b"half")
        await go_on.wait()
        await call.die()

    async with one_replica(breaking) as (made, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(made.url).port)
        writer.write(b"POST /v1/tts HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        assert (await reader.readuntil(b"half")).startswith(b"HTTP/1.1 200")
        go_on.set()

        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_a_post_that_may_have_been_done_is_not_sent_again() -> None:
    async def dying(call: Call) -> None:
        await call.die()

    async with replica(dying) as (first, one), replica(say_hello) as (second, two), rig(one, two) as made:
        made_twice = await made.client.post("/model", content=b"voice")
        looked = await made.client.get("/model")

    assert made_twice.status_code == 502
    assert (looked.status_code, looked.content) == (200, b"hello"), "a look may be repeated"
    assert (len(first.calls), len(second.calls)) == (2, 1)


# Replicas that leave


async def test_streams_on_a_replica_that_left_the_set_go_on_to_their_end() -> None:
    release = asyncio.Event()

    async with replica(in_two_parts(release)) as (old, one), replica(say_hello) as (_, two), rig(one) as made:
        streams = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: old.in_flight == 1)

        made.gateway.set_replicas([two])
        meanwhile = await made.client.post("/v1/tts")
        release.set()

        assert meanwhile.content == b"hello"
        assert (await streams).content == b"first second"
        assert len(old.calls) == 1


# Clients that leave


async def test_a_client_that_leaves_ends_the_replicas_work_and_frees_the_slot() -> None:
    noticed = asyncio.Event()

    async def endless(call: Call) -> None:
        if noticed.is_set():
            await say_hello(call)
            return
        await call.start(200)
        await call.chunk(b"x")
        await call.gone()
        noticed.set()

    async with one_replica(endless) as (made, _):
        async with made.client.stream("POST", "/v1/tts") as response:
            await anext(response.aiter_raw())

        await noticed.wait()
        assert (await made.client.post("/v1/tts")).content == b"hello"
        assert await metric(made, 'edge_client_aborts_total{phase="streaming"}') == 1
        assert made.gateway.signals().failed_total == 0


async def test_a_client_that_leaves_the_queue_is_never_sent_on() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await say_hello(call)

    async with one_replica(script) as (made, app):
        running = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: app.in_flight == 1)
        waiting = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: made.gateway.signals().queued == 1)

        waiting.cancel()
        await until(lambda: made.gateway.signals().queued == 0)
        release.set()

        assert (await running).status_code == 200
        assert len(app.calls) == 1
        assert await metric(made, 'edge_requests_total{code="499"}') == 1


# Too many


async def test_a_full_queue_is_refused_with_the_time_to_come_back() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await say_hello(call)

    async with one_replica(script, max_queued=1) as (made, app):
        running = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: app.in_flight == 1)
        waiting = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: made.gateway.signals().queued == 1)

        refused = await made.client.post("/v1/tts")
        release.set()

        assert refused.status_code == 429
        assert refused.json() == {"status": 429, "message": "all slots are busy and the queue is full"}
        assert refused.headers["retry-after"] == "2", "one waits for one slot, and a request is guessed at 2 s"
        assert [(await task).status_code for task in (running, waiting)] == [200, 200]
        assert made.gateway.signals().rejected_total == 1
        assert made.backlogs == [1], "the policy hears once, when the queue rises from 0"


async def test_without_a_replica_a_request_waits_its_time_and_is_refused() -> None:
    async with rig(limits=Limits(queue_timeout_s=0.05)) as made:
        response = await made.client.post("/v1/tts")
        cheap = await made.client.get("/model")

    assert response.json() == {"status": 503, "message": "no replica was ready within 0.05 s"}
    assert response.headers["retry-after"] == "5"
    assert cheap.json() == {"status": 503, "message": "no replica is ready"}


async def test_a_request_waits_for_the_first_replica() -> None:
    async with replica(say_hello) as (_, spec), rig() as made:
        waiting = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: made.gateway.signals().queued == 1)

        made.gateway.set_replicas([spec])

        assert (await waiting).content == b"hello"


async def test_a_hundred_requests_at_once_never_exceed_the_slots() -> None:
    async def brief(call: Call) -> None:
        await asyncio.sleep(0.005)
        await call.answer(200, call.body)

    async with (
        replica(brief, 3) as (first, one),
        replica(brief, 2) as (second, two),
        rig(one, two, max_queued=100) as made,
    ):
        responses = await asyncio.gather(*[made.client.post("/v1/tts", content=str(n).encode()) for n in range(100)])

        signals = made.gateway.signals()
        assert await metric(made, 'edge_requests_total{code="200"}') == 100

    assert [response.content for response in responses] == [str(n).encode() for n in range(100)]
    assert (first.max_in_flight, second.max_in_flight) == (3, 2)
    assert (signals.arrivals_total, signals.in_flight, signals.queued, signals.rejected_total) == (100, 0, 0, 0)
