"""The gateway before real replicas on loopback: what a client sees, whatever the replicas do."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from slackwater_inference.gateway.app import Gateway, Limits
from slackwater_inference.gateway.routing import ReplicaSpec, Router
from slackwater_inference.gateway.testing import Call, ScriptedReplica, serving
from slackwater_inference.gateway.upstream import Upstream

Script = Callable[[Call], Awaitable[None]]


@dataclass
class Rig:
    """A running gateway, its client and what else a test looks at."""

    gateway: Gateway
    client: httpx.AsyncClient
    url: str
    backlogs: list[int]


async def say_hello(call: Call) -> None:
    await call.answer(200, b"hello", content_type="audio/wav")


@asynccontextmanager
async def replica(script: Script, slots: int = 1) -> AsyncIterator[tuple[ScriptedReplica, ReplicaSpec]]:
    app = ScriptedReplica(script)
    async with serving(app) as url:
        yield app, ReplicaSpec(url, url, slots)


@asynccontextmanager
async def rig(*specs: ReplicaSpec, max_queued: int = 8, limits: Limits | None = None) -> AsyncIterator[Rig]:
    backlogs: list[int] = []
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream())
        router = Router(max_queued)
        gateway = Gateway(router, upstream, limits or Limits(), on_backlog=lambda: backlogs.append(router.queued))
        gateway.set_replicas(list(specs))
        url = await stack.enter_async_context(serving(gateway))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=20))
        yield Rig(gateway, client, url, backlogs)


@asynccontextmanager
async def one_replica(
    script: Script, slots: int = 1, max_queued: int = 8, limits: Limits | None = None
) -> AsyncIterator[tuple[Rig, ScriptedReplica]]:
    async with replica(script, slots) as (app, spec), rig(spec, max_queued=max_queued, limits=limits) as made:
        yield made, app


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; the test's own time limit ends a wrong one."""
    while not condition():
        await asyncio.sleep(0.005)


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def metric(made: Rig, line_start: str) -> float:
    lines = (await made.client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))


# Through


async def test_a_client_sees_each_chunk_before_the_replica_sends_the_next() -> None:
    seen_first = asyncio.Event()

    async def script(call: Call) -> None:
        await call.start(200, content_type="audio/wav", x_accel_buffering="no")
        await call.chunk(b"one")
        await seen_first.wait()
        await call.chunk(b"two")
        await call.end()

    async with one_replica(script) as (made, _), made.client.stream("POST", "/v1/tts", json={}) as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"one"
        seen_first.set()
        assert await anext(chunks) == b"two"

        assert [chunk async for chunk in chunks] == []
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in response.headers


async def test_body_path_query_key_and_status_pass_untouched() -> None:
    async def script(call: Call) -> None:
        await call.answer(402, b'{"status": 402, "message": "pay"}', content_type="application/json", x_more="1")

    async with one_replica(script) as (made, app):
        response = await made.client.post(
            "/v1/a%2Fb?x=1&y=%20", content=b"\x00\xff" * 70_000, headers={"authorization": "Bearer k", "te": "gzip"}
        )

    (call,) = app.calls
    assert (call.method, call.target) == ("POST", b"/v1/a%2Fb?x=1&y=%20")
    assert call.body == b"\x00\xff" * 70_000
    assert call.headers[b"authorization"] == b"Bearer k"
    assert b"te" not in call.headers
    assert (response.status_code, response.json()) == (402, {"status": 402, "message": "pay"})
    assert response.headers["x-more"] == "1"


async def test_headers_named_by_connection_stay_on_their_hop() -> None:
    async with one_replica(say_hello) as (made, app):
        await made.client.post("/v1/tts", headers={"connection": "x-hop", "x-hop": "1", "x-end": "2"})

    assert b"x-hop" not in app.calls[0].headers
    assert app.calls[0].headers[b"x-end"] == b"2"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        pytest.param("req-1", True, id="a plain id is kept"),
        pytest.param("a b", False, id="a space would split a log line"),
        pytest.param("x" * 200, False, id="too long"),
        pytest.param(None, False, id="none given"),
    ],
)
async def test_a_request_id_is_passed_or_made(given: str | None, is_kept: bool) -> None:
    async with one_replica(say_hello) as (made, app):
        response = await made.client.post("/v1/tts", headers={"x-request-id": given} if given else {})

    sent_on = app.calls[0].headers[b"x-request-id"].decode()
    assert response.headers["x-request-id"] == sent_on
    assert (sent_on == given) is is_kept
    assert len(sent_on) > 0


async def test_a_get_needs_no_slot() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        if call.method == "POST":
            await release.wait()
        await say_hello(call)

    async with one_replica(script, max_queued=0) as (made, app):
        speaking = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: app.in_flight == 1)

        voices = await made.client.get("/model")

        assert (voices.status_code, voices.content) == (200, b"hello")
        assert made.gateway.signals().arrivals_total == 1
        release.set()
        await speaking


async def test_paths_that_are_not_the_api_stay_inside() -> None:
    async with one_replica(say_hello) as (made, app):
        response = await made.client.get("/docs")

    assert response.json() == {"status": 404, "message": "no such path: /docs"}
    assert app.calls == []


async def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 400

    async with one_replica(say_hello, limits=Limits(max_body_bytes=1000)) as (made, app):
        announced = await made.client.post("/v1/tts", content=b"x" * 1001)
        chunked = await made.client.post("/v1/tts", content=unannounced())
        fits = await made.client.post("/v1/tts", content=b"x" * 1000)

    assert announced.json() == chunked.json() == {"status": 413, "message": "the body may have 1000 bytes"}
    assert fits.status_code == 200
    assert len(app.calls) == 1


async def test_many_large_bodies_at_once_are_refused_and_their_memory_is_given_back() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await say_hello(call)

    async with one_replica(script, limits=Limits(max_held_bytes=1500)) as (made, app):
        first = asyncio.create_task(made.client.post("/v1/tts", content=b"x" * 1000))
        await until(lambda: app.in_flight == 1)

        refused = await made.client.post("/v1/tts", content=b"x" * 1000)
        release.set()

        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await first).status_code == 200
        assert (await made.client.post("/v1/tts", content=b"x" * 1000)).status_code == 200


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


# Replicas that leave


async def test_streams_on_a_replica_that_left_the_set_go_on_to_their_end() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await call.start(200)
        await call.chunk(b"first ")
        await release.wait()
        await call.chunk(b"second")
        await call.end()

    async with replica(script) as (old, one), replica(say_hello) as (_, two), rig(one) as made:
        streams = asyncio.create_task(made.client.post("/v1/tts"))
        await until(lambda: old.in_flight == 1)

        made.gateway.set_replicas([two])
        meanwhile = await made.client.post("/v1/tts")
        release.set()

        assert meanwhile.content == b"hello"
        assert (await streams).content == b"first second"
        assert len(old.calls) == 1


async def test_ready_is_having_a_replica_and_not_leaving() -> None:
    async with replica(say_hello) as (_, spec), rig() as made:
        statuses = [(await made.client.get("/readyz")).status_code]
        made.gateway.set_replicas([spec])
        statuses.append((await made.client.get("/readyz")).status_code)
        made.gateway.leave()
        statuses.append((await made.client.get("/readyz")).status_code)

        assert statuses == [503, 200, 503]
        assert (await made.client.get("/healthz")).status_code == 200


async def test_first_audio_is_counted_after_the_wav_header() -> None:
    header_sent, more = asyncio.Event(), asyncio.Event()

    async def script(call: Call) -> None:
        await call.start(200, content_type="audio/wav")
        await call.chunk(b"h" * 44)
        header_sent.set()
        await more.wait()
        await call.chunk(b"audio")
        await call.end()

    async with one_replica(script) as (made, _), made.client.stream("POST", "/v1/tts") as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"h" * 44
        assert made.gateway.signals().first_audio_p95_s is None

        more.set()
        assert await anext(chunks) == b"audio"
        await until(lambda: made.gateway.signals().first_audio_p95_s is not None)


async def test_every_status_is_counted() -> None:
    codes = iter([200, 401, 500])

    async def script(call: Call) -> None:
        await call.answer(next(codes), json.dumps({}).encode())

    async with one_replica(script) as (made, _):
        sent = Counter([(await made.client.post("/v1/tts")).status_code for _ in range(3)])

        assert sent == {200: 1, 401: 1, 500: 1}
        assert [await metric(made, f'edge_requests_total{{code="{code}"}}') for code in sent] == [1, 1, 1]
        assert made.gateway.signals().failed_total == 1
        assert await metric(made, "edge_ttfb_seconds_count") == 3
        assert await metric(made, "edge_in_flight") == 0
