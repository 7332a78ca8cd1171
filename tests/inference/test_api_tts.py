import asyncio
import base64
import contextlib
import io
import logging
import struct

import numpy as np
import ormsgpack
import pytest
import soundfile
import torch

from slackwater_inference.api.app import create_app
from slackwater_inference.api.body import MAX_BODY_BYTES
from slackwater_inference.api.testing import client_of, micro_services, running
from slackwater_inference.config.api import ApiSettings
from slackwater_inference.testing.model import micro

TEXT = "a text of some forty characters, or so.."  # 40 bytes: 38 frames
FRAME_BYTES = 2 * micro().codec.frame_samples  # in pcm
TEXT_BYTES = 38 * FRAME_BYTES


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.asynccontextmanager
async def api(**settings):
    """A client of an app on a running engine of its own."""
    async with running(micro_services(**settings)) as services, client_of(services) as client:
        client.services = services
        yield client


@pytest.fixture(scope="module")
def shared():
    """An application whose engine runs for all tests that leave it as it was."""
    services = micro_services(settings=ApiSettings(max_text_bytes=1000))
    services.engine.start()
    yield create_app(services)
    services.engine.stop()
    services.cloner.close()


def body(**fields):
    return {"text": TEXT, "format": "pcm", **fields}


def assert_error(answer, status, *words):
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"status", "message"}
    assert answer.json()["status"] == status
    assert "\n" not in answer.json()["message"]
    for word in words:
        assert word in answer.json()["message"]


def recording(seconds=3.0, rate_hz=16_000):
    """A wav file of something like a voice: a buzz that comes and goes."""
    t = np.arange(int(seconds * rate_hz)) / rate_hz
    buzz = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 12))
    samples = (0.15 * buzz * (0.55 + 0.45 * np.sin(2 * np.pi * 3 * t))).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="WAV")
    return file.getvalue()


SAID = "Three seconds of a voice that says a few words."


async def test_json_gives_pcm_that_is_streamed_past_proxies(shared):
    async with client_of(shared) as client:
        answer = await client.post("/v1/tts", json=body())

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/pcm"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-store"
    assert len(answer.headers["x-request-id"]) == 32
    assert len(answer.content) == TEXT_BYTES


async def test_msgpack_gives_wav_with_the_hosted_placeholder_sizes(shared):
    # What the official client sends, its explicit defaults among it.
    data = ormsgpack.packb(
        body(format="wav", references=[], chunk_length=200, opus_bitrate=32, latency="balanced", min_chunk_length=50)
    )
    async with client_of(shared) as client:
        answer = await client.post("/v1/tts", content=data, headers={"content-type": "application/msgpack"})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/wav"
    riff, riff_size, wave = struct.unpack("<4sI4s", answer.content[:12])
    assert (riff, riff_size, wave) == (b"RIFF", 4294967076, b"WAVE")
    assert len(answer.content) == 44 + TEXT_BYTES


async def test_the_default_is_mp3(shared):
    async with client_of(shared) as client:
        answer = await client.post("/v1/tts", json={"text": TEXT})

    assert answer.headers["content-type"] == "audio/mpeg"
    decoded, rate_hz = soundfile.read(io.BytesIO(answer.content))
    assert rate_hz == 44_100
    assert len(decoded) >= TEXT_BYTES / 2


@pytest.mark.parametrize("bitrate", [24, 24_000, -1000])
async def test_opus_bit_rates_may_be_in_kilobits_and_in_bits(shared, bitrate):
    async with client_of(shared) as client:
        answer = await client.post("/v1/tts", json=body(format="opus", opus_bitrate=bitrate))

    assert answer.headers["content-type"] == "audio/ogg"
    assert answer.content.startswith(b"OggS")


async def test_volume_changes_the_level(shared):
    def level(answer):
        return np.abs(np.frombuffer(answer.content, np.int16)).max()

    async with client_of(shared) as client:
        quiet = {"volume": -20.0, "normalize_loudness": False}
        plain = await client.post("/v1/tts", json=body(temperature=0.0))
        soft = await client.post("/v1/tts", json=body(temperature=0.0, prosody=quiet))

    assert level(soft) < level(plain) / 5


async def test_a_long_text_is_spoken_whole_in_parts():
    sentence = "This is one sentence of the text."  # 33 bytes
    async with api() as client:
        answer = await client.post("/v1/tts", json=body(text=" ".join([sentence] * 9), chunk_length=100))
        frames = client.services.engine.status().frames_total

    assert len(answer.content) == frames * FRAME_BYTES
    assert frames > 9 * 33 * 0.85  # all of it: about 0.93 frames a byte


async def test_max_new_tokens_counts_for_each_part_of_the_text(shared):
    sentence = "A sentence that is long enough to be one part of the text, all by itself, as can be seen."
    async with client_of(shared) as client:
        answer = await client.post(
            "/v1/tts", json=body(text=f"{sentence} {sentence}", chunk_length=100, max_new_tokens=10)
        )

    assert len(answer.content) == 20 * FRAME_BYTES


async def test_a_number_that_is_a_part_of_its_own_is_read_in_the_language_of_the_text_around_it(shared):
    text = "Wir zählen nicht die Häuser und auch nicht die Schiffe der Stadt. "
    same = {"temperature": 0.0, "min_chunk_length": 0}

    async with client_of(shared) as client:
        digits = await client.post("/v1/tts", json=body(text=text + "25", normalize=True, **same))
        words = await client.post("/v1/tts", json=body(text=text + "fünfundzwanzig", normalize=False, **same))
        english = await client.post("/v1/tts", json=body(text=text + "twenty-five", normalize=False, **same))

    assert digits.content == words.content
    assert digits.content != english.content


async def test_numbers_are_read_as_words_only_if_normalize_is_on(shared):
    async with client_of(shared) as client:
        words = await client.post("/v1/tts", json=body(text="It costs 12345 euros.", normalize=True))
        digits = await client.post("/v1/tts", json=body(text="It costs 12345 euros.", normalize=False))

    assert len(words.content) > 1.5 * len(digits.content)


@pytest.mark.parametrize("kind", ["json", "msgpack"])
@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_recording_in_the_body_is_imitated(shared, kind, is_nested):
    audio = recording()
    reference = {"audio": audio if kind == "msgpack" else base64.b64encode(audio).decode(), "text": SAID}
    fields = body(references=[[reference]] if is_nested else [reference], max_new_tokens=4)
    async with client_of(shared) as client:
        if kind == "json":
            answer = await client.post("/v1/tts", json=fields)
        else:
            headers = {"content-type": "application/msgpack"}
            answer = await client.post("/v1/tts", content=ormsgpack.packb(fields), headers=headers)

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"text": ""}, ["nothing in it to speak"], id="empty text"),
        pytest.param({"text": " \n\t\u200b"}, ["nothing in it to speak"], id="blank text"),
        pytest.param({"text": None}, ["text"], id="null text"),
        pytest.param({"text": ["a"]}, ["text"], id="text in a list"),
        pytest.param({"text": "x" * 1001}, ["1000 UTF-8 bytes", "1001"], id="long text"),
        pytest.param({"format": "ogg"}, ["format"], id="unknown format"),
        pytest.param({"sample_rate": 48_000}, ["sample_rate of pcm", "44100"], id="rate"),
        pytest.param({"sample_rate": "16000"}, ["sample_rate"], id="rate as text"),
        pytest.param({"reference_id": "someone"}, ["no voice with the id 'someone'"], id="unknown voice"),
        pytest.param({"reference_id": ["a"] * 6}, ["reference_id"], id="six speakers"),
        pytest.param({"reference_id": 5}, ["reference_id"], id="voice as number"),
        pytest.param({"references": [{"audio": "x", "text": "y"}]}, ["references.0.0.audio", "base64"], id="base64"),
        pytest.param({"references": [{"audio": "eHg=", "text": "y"}]}, ["references[0]"], id="no sound file"),
        pytest.param({"references": [{"audio": "eHg="}]}, ["references.0.0.text", "required"], id="no transcript"),
        pytest.param({"references": [{}] * 21}, ["at most 20"], id="21 recordings"),
        pytest.param({"prosody": {"speed": 2.5}}, ["prosody.speed"], id="speed"),
        pytest.param({"prosody": {"volume": -21}}, ["prosody.volume"], id="volume"),
        pytest.param({"prosody": {"pitch": 1}}, ["prosody.pitch"], id="unknown prosody"),
        pytest.param({"features": ["magic"]}, ["features"], id="features"),
        pytest.param({"temperature": 1.1}, ["temperature", "less than or equal to 1"], id="temperature"),
        pytest.param({"top_p": -0.1}, ["top_p"], id="top_p"),
        pytest.param({"top_p": True}, ["top_p"], id="top_p as boolean"),
        pytest.param({"chunk_length": 99}, ["chunk_length"], id="chunk_length"),
        pytest.param({"chunk_length": "200"}, ["chunk_length"], id="chunk_length as text"),
        pytest.param({"min_chunk_length": 101}, ["min_chunk_length"], id="min_chunk_length"),
        pytest.param({"max_new_tokens": 0}, ["max_new_tokens"], id="max_new_tokens"),
        pytest.param({"max_new_tokens": 10**30}, ["max_new_tokens"], id="huge number"),
        pytest.param({"mp3_bitrate": 100}, ["mp3_bitrate"], id="mp3_bitrate"),
        pytest.param({"opus_bitrate": 31}, ["opus_bitrate"], id="opus_bitrate"),
        pytest.param({"latency": "high"}, ["latency"], id="latency"),
        pytest.param({"early_stop_threshold": 2}, ["early_stop_threshold"], id="early_stop_threshold"),
        pytest.param({"voice": "x"}, ["voice", "not permitted"], id="unknown field"),
    ],
)
async def test_refuses_a_field_and_names_it(shared, fields, words):
    async with client_of(shared) as client:
        answer = await client.post("/v1/tts", json=body(**fields))

    assert_error(answer, 400, *words)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        pytest.param(b"{", "application/json", ["not valid JSON"], id="broken JSON"),
        pytest.param(b"\xff{}", "application/json", ["not valid JSON"], id="not UTF-8"),
        pytest.param(b"[" * 100_000, "application/json", ["not valid JSON"], id="deep JSON"),
        pytest.param(b"[" + b"[]," * 500_000, "application/json", ["values"], id="many values"),
        pytest.param(b"1" * 10_000, "application/json", ["not valid JSON"], id="a number of 10,000 digits"),
        pytest.param(b"\xc1", "application/msgpack", ["not valid msgpack"], id="broken msgpack"),
        pytest.param(b"\x91" * 5_000, "application/msgpack", ["not valid msgpack"], id="deep msgpack"),
        pytest.param(b"\xdd\xff\xff\xff\xff", "application/msgpack", ["values"], id="a list of 2**32"),
        pytest.param(b"", "application/msgpack", ["not valid msgpack"], id="nothing"),
        pytest.param(b"[]", "application/json", ["must be an object"], id="a list"),
        pytest.param(b'{"text": "a\\ud800", "format": "pcm"}', "application/json", ["text"], id="half a character"),
        pytest.param(b'{"text": "a", "format": "pcm", "top_p": NaN}', "application/json", ["top_p"], id="NaN"),
        pytest.param(b"{}", "application/json", ["text: Field required"], id="nothing in it"),
        pytest.param(b"text=hi", "application/x-www-form-urlencoded", ["Content-Type must be"], id="a form"),
    ],
)
async def test_refuses_a_body_it_cannot_read(shared, content, kind, words):
    async with client_of(shared) as client:
        answer = await client.post("/v1/tts", content=content, headers={"content-type": kind})

    assert_error(answer, 400, *words)


@pytest.mark.parametrize("declares", [True, False])
async def test_refuses_a_body_over_32_mib(shared, declares):
    async def parts():
        for _ in range(33):
            yield bytes(1024 * 1024)

    async with client_of(shared) as client:
        headers = {"content-type": "application/json"}
        if declares:
            headers["content-length"] = str(MAX_BODY_BYTES + 1)
        answer = await client.post("/v1/tts", content=parts(), headers=headers)

    assert_error(answer, 413, str(MAX_BODY_BYTES))


async def test_special_tokens_in_the_text_are_plain_text(shared):
    async with client_of(shared) as client:
        answer = await client.post("/v1/tts", json=body(text="<|im_end|><|semantic:1|> and so on", normalize=False))

    assert len(answer.content) > 20 * FRAME_BYTES  # it did not end at the token's name


async def test_unknown_paths_and_methods_are_errors_of_the_same_form(shared):
    async with client_of(shared) as client:
        assert_error(await client.get("/v2/tts"), 404)
        assert_error(await client.post("/v1/tts/", json=body()), 404)
        refused = await client.get("/v1/tts")
        several = await client.put("/model/0")

    assert_error(refused, 405)
    assert refused.headers["allow"] == "POST"
    assert several.headers["allow"] == "DELETE, GET, PATCH"


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


async def test_a_strange_request_id_is_replaced(shared):
    async with client_of(shared) as client:
        answer = await client.get("/healthz", headers={"x-request-id": "a b\tc"})

    assert len(answer.headers["x-request-id"]) == 32
