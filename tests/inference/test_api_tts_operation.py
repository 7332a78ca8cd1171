"""`POST /v1/tts` as an operator sees it: a full, leaving or broken engine, clients that leave, metrics, the log."""

import asyncio
import contextlib
import logging

import ormsgpack
import pytest

from slackwater_inference.api.app import create_app
from slackwater_inference.api.testing import assert_error, body, client_of, micro_services, running

pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.asynccontextmanager
async def api(**settings):
    """A client of an app on a running engine of its own."""
    async with running(micro_services(**settings)) as services, client_of(services) as client:
        client.services = services
        yield client


async def test_a_full_engine_answers_429_with_a_delay():
    async with api(max_running_requests=1, max_queued=0, pace_frames_per_s=0.1) as client:
        first = asyncio.ensure_future(client.post("/v1/tts", json=body()))
        while client.services.engine.status().running == 0:
            await asyncio.sleep(0.005)

        answer = await client.post("/v1/tts", json=body())

        first.cancel()
        await asyncio.wait({first})

    assert_error(answer, 429)
    assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_an_engine_that_leaves_answers_503_and_is_not_ready_but_alive():
    async with api() as client:
        assert (await client.get("/readyz")).status_code == 200
        client.services.engine.drain()

        answer = await client.post("/v1/tts", json=body())
        assert_error(answer, 503, "draining")
        assert "retry-after" in answer.headers
        assert_error(await client.get("/readyz"), 503, "draining")
        assert (await client.get("/healthz")).status_code == 200


async def test_readiness_names_the_stage_of_an_engine_that_starts_or_stands_by():
    services = micro_services()
    async with client_of(services) as client:
        assert_error(await client.get("/readyz"), 503, "starting")
        services.engine.stand_by()
        assert_error(await client.get("/readyz"), 503, "standby")
        assert_error(await client.post("/v1/tts", json=body()), 503, "standby")


class BrokenRunner:
    """Runs `runner` for so many steps, then fails."""

    def __init__(self, runner, num_steps):
        self._runner, self._num_steps = runner, num_steps

    def step(self, plan):
        self._num_steps -= 1
        if self._num_steps < 0:
            raise RuntimeError("planted")
        return self._runner.step(plan)


planted = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@planted
async def test_a_failure_before_the_first_audio_is_a_500():
    async with api() as client:
        engine = client.services.engine
        engine._runner = BrokenRunner(engine._runner, 2)

        answer = await client.post("/v1/tts", json=body())

        assert_error(answer, 500, "engine failed")
        assert_error(await client.get("/readyz"), 503, "failed")


@planted
async def test_a_failure_after_the_first_audio_breaks_the_answer():
    async with api() as client:
        engine = client.services.engine
        engine._runner = BrokenRunner(engine._runner, 20)

        with pytest.raises(RuntimeError, match="response already started"):
            await client.post("/v1/tts", json=body(latency="low"))

        count = engine.metrics.registry.get_sample_value
        labels = {"model": "micro", "tier": "default", "code": "500", "transport": "http"}
        assert count("tts_requests_total", labels) == 1


async def say_and_leave(app, num_parts):
    """Post a text, as a server passes it on, and close the connection after so many parts of audio."""
    sent = asyncio.Event()
    messages = []

    async def receive():
        if not messages:
            messages.append("body")
            return {"type": "http.request", "body": ormsgpack.packb(body()), "more_body": False}
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        messages.append(message)
        if sum(bool(m.get("body")) for m in messages[1:]) >= num_parts:
            sent.set()

    if num_parts == 0:
        asyncio.get_running_loop().call_later(0.05, sent.set)
    headers = [(b"content-type", b"application/msgpack")]
    scope = {"type": "http", "method": "POST", "path": "/v1/tts", "headers": headers, "query_string": b""}
    await app({**scope, "asgi": {"spec_version": "2.3"}, "http_version": "1.1"}, receive, send)


@pytest.mark.parametrize("num_parts", [0, 1])
async def test_a_client_that_leaves_frees_its_slot_at_once(num_parts):
    # After its first ten frames a stream gets one frame in ten seconds: only leaving can end it in time.
    services = micro_services(pace_frames_per_s=0.1, burst_frames=10 if num_parts else 1)
    async with running(services):
        async with asyncio.timeout(10):
            await say_and_leave(create_app(services), num_parts)

        assert services.engine.is_idle
        labels = {"model": "micro", "tier": "default", "code": "499", "transport": "http"}
        assert services.engine.metrics.registry.get_sample_value("tts_requests_total", labels) == 1


async def test_metrics_render_and_count_each_outcome():
    async with api() as client:
        await client.post("/v1/tts", json=body(max_new_tokens=4))
        await client.post("/v1/tts", json={})
        text = (await client.get("/metrics")).text

    assert 'tts_requests_total{code="200",model="micro",tier="default",transport="http"} 1.0' in text
    assert 'tts_requests_total{code="400",model="micro",tier="default",transport="http"} 1.0' in text


async def test_the_log_has_one_line_a_request_with_its_id_and_without_its_text(caplog):
    secret = "nobody should read this text here"
    with caplog.at_level(logging.INFO):
        async with api() as client:
            answer = await client.post("/v1/tts", json=body(text=secret), headers={"x-request-id": "abc-1"})
            await client.get("/healthz")
            await client.get("/a%0Ab")

    lines = [r.getMessage() for r in caplog.records if r.name == "slackwater_inference.api.access"]
    assert answer.headers["x-request-id"] == "abc-1"
    assert "POST /v1/tts status=200" in lines[0]
    assert "id=abc-1" in lines[0]
    assert "GET /a?b status=404" in lines[1]
    assert len(lines) == 2
    assert secret not in caplog.text
