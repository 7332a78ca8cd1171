"""The gateway before real replicas on loopback, all well: what passes, what is refused, what is counted."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.testing import Call, metric, one_replica, replica, rig, say_hello, until

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
        response = await made.client.get("/debug")

    assert response.json() == {"status": 404, "message": "no such path: /debug"}
    assert app.calls == []


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json"])
async def test_the_engines_pages_pass_without_a_slot(path: str) -> None:
    async with one_replica(say_hello, max_queued=0) as (made, _):
        assert (await made.client.get(path)).content == b"hello"
        assert made.gateway.signals().arrivals_total == 0


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


async def test_a_whole_recording_of_32_mib_passes() -> None:
    async with replica(say_hello) as (played, spec), rig(spec) as made:
        answer = await made.client.post("/model", content=b"x" * 32 * 2**20)

    assert answer.status_code == 200
    assert len(played.calls[0].body) == 32 * 2**20


# Readiness


async def test_ready_is_having_a_replica_and_not_leaving() -> None:
    async with replica(say_hello) as (_, spec), rig() as made:
        statuses = [(await made.client.get("/readyz")).status_code]
        made.gateway.set_replicas([spec])
        statuses.append((await made.client.get("/readyz")).status_code)
        made.gateway.leave()
        statuses.append((await made.client.get("/readyz")).status_code)

        assert statuses == [503, 200, 503]
        assert (await made.client.get("/healthz")).status_code == 200


# Metrics


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
