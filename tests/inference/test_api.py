import contextlib
import json
import logging
import struct

import httpx
import ormsgpack
import pytest
import torch

from slackwater_inference.api.app import create_app
from slackwater_inference.api.body import MAX_BODY_BYTES
from slackwater_inference.config import EngineConfig
from slackwater_inference.engine import Engine
from slackwater_inference.testing import micro

MODEL = micro()
TEXT = "a text of some forty characters, or so.."  # 40 bytes: 38 frames
NUM_SAMPLES = 38 * MODEL.codec.frame_samples


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.asynccontextmanager
async def api(keys=(), start=True, **settings):
    """A client of an app on an engine of its own."""
    engine = Engine(EngineConfig(**{"max_running_requests": 2, "max_queued": 2, **settings}), MODEL)
    if start:
        engine.start()
    # An error after the first byte must reach the server, so it must not be turned into an answer here.
    transport = httpx.ASGITransport(create_app(engine, keys), raise_app_exceptions=True)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            client.engine = engine
            yield client
    finally:
        engine.stop()


def body(**fields):
    return {"text": TEXT, "format": "pcm", **fields}


def assert_error(answer, status, *words):
    assert answer.status_code == status
    assert answer.json().keys() == {"status", "message"}
    assert answer.json()["status"] == status
    for word in words:
        assert word in answer.json()["message"]


async def test_json_gives_pcm():
    async with api() as client:
        answer = await client.post("/v1/tts", json=body())

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/pcm"
    assert answer.headers["x-accel-buffering"] == "no"
    assert len(answer.headers["x-request-id"]) == 32
    assert len(answer.content) == 2 * NUM_SAMPLES


async def test_msgpack_gives_wav_with_the_hosted_placeholder_sizes():
    data = ormsgpack.packb(body(format="wav", references=[], chunk_length=200, opus_bitrate=32, latency="balanced"))
    async with api() as client:
        answer = await client.post("/v1/tts", content=data, headers={"content-type": "application/msgpack"})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/wav"
    riff, riff_size, wave, fmt, fmt_size, *form = struct.unpack("<4sI4s4sIHHIIHH", answer.content[:36])
    data_tag, data_size = struct.unpack("<4sI", answer.content[36:44])
    assert (riff, wave, fmt, data_tag) == (b"RIFF", b"WAVE", b"fmt ", b"data")
    assert (riff_size, fmt_size, data_size) == (4294967076, 16, 4294967040)
    assert form == [1, 1, 44100, 88200, 2, 16]
    assert len(answer.content) == 44 + 2 * NUM_SAMPLES


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"text": ""}, ["text is empty"], id="empty text"),
        pytest.param({"text": None}, ["text"], id="null text"),
        pytest.param({"text": "x" * 301}, ["300 UTF-8 bytes"], id="long text"),
        pytest.param({"format": "mp3"}, ["format", "mp3 is not supported yet", "wav"], id="mp3"),
        pytest.param({"format": "opus"}, ["opus is not supported yet"], id="opus"),
        pytest.param({"format": "ogg"}, ["format"], id="unknown format"),
        pytest.param({"sample_rate": 16000}, ["only 44100", "16000"], id="another rate"),
        pytest.param({"reference_id": "someone"}, ["reference_id", "not supported yet"], id="stored voice"),
        pytest.param({"references": [{"audio": "x", "text": "y"}]}, ["references", "not supported yet"], id="clone"),
        pytest.param({"prosody": {"speed": 1.5}}, ["prosody", "not supported yet"], id="prosody"),
        pytest.param({"features": ["quality-guard"]}, ["features", "not supported yet"], id="features"),
        pytest.param({"temperature": 1.1}, ["temperature", "less than or equal to 1"], id="temperature"),
        pytest.param({"top_p": -0.1}, ["top_p"], id="top_p"),
        pytest.param({"chunk_length": 99}, ["chunk_length"], id="chunk_length"),
        pytest.param({"chunk_length": "200"}, ["chunk_length"], id="chunk_length as text"),
        pytest.param({"min_chunk_length": 101}, ["min_chunk_length"], id="min_chunk_length"),
        pytest.param({"max_new_tokens": 0}, ["max_new_tokens"], id="max_new_tokens"),
        pytest.param({"mp3_bitrate": 100}, ["mp3_bitrate"], id="mp3_bitrate"),
        pytest.param({"opus_bitrate": 31}, ["opus_bitrate"], id="opus_bitrate"),
        pytest.param({"latency": "high"}, ["latency"], id="latency"),
        pytest.param({"early_stop_threshold": 2}, ["early_stop_threshold"], id="early_stop_threshold"),
        pytest.param({"voice": "x"}, ["voice", "not permitted"], id="unknown field"),
    ],
)
async def test_refuses_a_field_and_names_it(fields, words):
    async with api(max_text_bytes=300) as client:
        answer = await client.post("/v1/tts", json=body(**fields))

    assert_error(answer, 400, *words)


async def test_the_hosted_default_format_is_refused_and_not_replaced_silently():
    async with api() as client:
        assert_error(await client.post("/v1/tts", json={"text": TEXT}), 400, "mp3 is not supported yet")


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        pytest.param(b"{", "application/json", ["not valid json"], id="broken JSON"),
        pytest.param(b"\xff{}", "application/json", ["not valid json"], id="not UTF-8"),
        pytest.param(b"[" * 100_000, "application/json", ["not valid json"], id="deep JSON"),
        pytest.param(b"\xc1", "application/msgpack", ["not valid msgpack"], id="broken msgpack"),
        pytest.param(b"[]", "application/json", ["must be an object"], id="a list"),
        pytest.param(b'{"text": "a\\ud800", "format": "pcm"}', "application/json", ["text"], id="half a character"),
        pytest.param(b'{"text": "a", "format": "pcm", "top_p": NaN}', "application/json", ["top_p"], id="NaN"),
        pytest.param(b"{}", "application/json", ["text: Field required"], id="nothing in it"),
        pytest.param(b"text=hi", "application/x-www-form-urlencoded", ["Content-Type must be"], id="a form"),
    ],
)
async def test_refuses_a_body_it_cannot_read(content, kind, words):
    async with api() as client:
        answer = await client.post("/v1/tts", content=content, headers={"content-type": kind})

    assert_error(answer, 400, *words)


@pytest.mark.parametrize("declares", [True, False])
async def test_refuses_a_body_over_32_mib(declares):
    async def parts():
        for _ in range(33):
            yield bytes(1024 * 1024)

    async with api() as client:
        headers = {"content-type": "application/json"}
        if declares:
            headers["content-length"] = str(MAX_BODY_BYTES + 1)
        answer = await client.post("/v1/tts", content=parts(), headers=headers)

    assert_error(answer, 413)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic one", "one", "Bearer one two", "Bearer ключ".encode()],
)
async def test_refuses_everybody_without_a_known_key(authorization):
    headers = {} if authorization is None else {"authorization": authorization}
    async with api(keys=["one", "two"]) as client:
        answer = await client.post("/v1/tts", json=body(), headers=headers)

    assert_error(answer, 401)


@pytest.mark.parametrize("authorization", ["Bearer one", "bearer two", "Bearer  two "])
async def test_lets_every_known_key_speak(authorization):
    async with api(keys=["one", "two"]) as client:
        answer = await client.post("/v1/tts", json=body(max_new_tokens=4), headers={"authorization": authorization})

    assert answer.status_code == 200


async def test_unknown_paths_and_methods_are_errors_of_the_same_form():
    async with api() as client:
        assert_error(await client.get("/v2/tts"), 404)
        refused = await client.get("/v1/tts")

    assert_error(refused, 405)
    assert refused.headers["allow"] == "POST"


async def test_max_new_tokens_counts_for_each_chunk_of_the_text():
    async with api() as client:
        short = await client.post("/v1/tts", json=body(max_new_tokens=10))
        two_chunks = await client.post("/v1/tts", json=body(text="x" * 150, chunk_length=100, max_new_tokens=10))

    assert len(short.content) == 2 * 10 * MODEL.codec.frame_samples
    assert len(two_chunks.content) == 2 * 20 * MODEL.codec.frame_samples


async def test_a_full_engine_answers_429_with_a_delay():
    async with api(max_running_requests=1, max_queued=0, pace_frames_per_s=0.1) as client:
        stream = client.engine.submit(TEXT)

        answer = await client.post("/v1/tts", json=body())

        stream.close()

    assert_error(answer, 429, "slots")
    assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_an_engine_that_leaves_answers_503_and_is_not_ready_but_alive():
    async with api() as client:
        assert (await client.get("/readyz")).status_code == 200
        client.engine.drain()

        assert_error(await client.post("/v1/tts", json=body()), 503, "draining")
        assert_error(await client.get("/readyz"), 503, "draining")
        assert (await client.get("/healthz")).status_code == 200


async def test_readiness_names_the_stage_of_an_engine_that_starts_or_stands_by():
    async with api(start=False) as client:
        assert_error(await client.get("/readyz"), 503, "starting")
        client.engine.stand_by()
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
        client.engine._runner = BrokenRunner(client.engine._runner, 2)

        answer = await client.post("/v1/tts", json=body())

        assert_error(answer, 500, "engine failed")
        assert_error(await client.get("/readyz"), 503, "failed")


@planted
async def test_a_failure_after_the_first_audio_breaks_the_answer():
    async with api() as client:
        client.engine._runner = BrokenRunner(client.engine._runner, 20)

        with pytest.raises(RuntimeError, match="response already started"):
            await client.post("/v1/tts", json=body())

        count = client.engine.metrics.registry.get_sample_value
        labels = {"model": "micro", "tier": "default", "code": "500", "transport": "http"}
        assert count("tts_requests_total", labels) == 1


async def test_metrics_render_and_count_each_outcome():
    async with api() as client:
        await client.post("/v1/tts", json=body(max_new_tokens=4))
        await client.post("/v1/tts", json={})
        text = (await client.get("/metrics")).text

    assert 'tts_requests_total{code="200",model="micro",tier="default",transport="http"} 1.0' in text
    assert 'tts_requests_total{code="400",model="micro",tier="default",transport="http"} 1.0' in text
    assert 'tts_slots{model="micro"} 2.0' in text


async def test_the_log_has_one_line_a_request_with_its_id_and_without_its_text(caplog):
    secret = "nobody should read this text here"
    with caplog.at_level(logging.INFO):
        async with api() as client:
            answer = await client.post("/v1/tts", json=body(text=secret), headers={"x-request-id": "abc-1"})
            await client.get("/healthz")

    lines = [r.getMessage() for r in caplog.records if r.name == "slackwater_inference.api.access"]
    assert answer.headers["x-request-id"] == "abc-1"
    assert len(lines) == 1
    assert "POST /v1/tts status=200" in lines[0]
    assert "id=abc-1" in lines[0]
    assert secret not in caplog.text


async def test_a_strange_request_id_is_replaced():
    async with api() as client:
        answer = await client.get("/healthz", headers={"x-request-id": "a b\tc"})

    assert len(answer.headers["x-request-id"]) == 32


async def test_the_openapi_page_declares_both_bodies_and_every_error():
    async with api() as client:
        post = json.loads((await client.get("/openapi.json")).text)["paths"]["/v1/tts"]["post"]

    assert post["requestBody"]["content"].keys() == {"application/json", "application/msgpack"}
    assert {"200", "400", "401", "413", "429", "500", "503"} <= post["responses"].keys()
