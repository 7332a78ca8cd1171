"""`POST /v1/tts`: what is wrong with a request, and how that is said."""

import pytest

from slackwater_inference.api.body import MAX_BODY_BYTES
from slackwater_inference.api.testing import assert_error, body, client_of

pytestmark = pytest.mark.usefixtures("one_thread")


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
async def test_refuses_a_field_and_names_it(speaking_app, fields, words):
    async with client_of(speaking_app) as client:
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
async def test_refuses_a_body_it_cannot_read(speaking_app, content, kind, words):
    async with client_of(speaking_app) as client:
        answer = await client.post("/v1/tts", content=content, headers={"content-type": kind})

    assert_error(answer, 400, *words)


@pytest.mark.parametrize("declares", [True, False])
async def test_refuses_a_body_over_32_mib(speaking_app, declares):
    async def parts():
        for _ in range(33):
            yield bytes(1024 * 1024)

    async with client_of(speaking_app) as client:
        headers = {"content-type": "application/json"}
        if declares:
            headers["content-length"] = str(MAX_BODY_BYTES + 1)
        answer = await client.post("/v1/tts", content=parts(), headers=headers)

    assert_error(answer, 413, str(MAX_BODY_BYTES))


async def test_unknown_paths_and_methods_are_errors_of_the_same_form(speaking_app):
    async with client_of(speaking_app) as client:
        assert_error(await client.get("/v2/tts"), 404)
        assert_error(await client.post("/v1/tts/", json=body()), 404)
        refused = await client.get("/v1/tts")
        several = await client.put("/model/0")

    assert_error(refused, 405)
    assert refused.headers["allow"] == "POST"
    assert several.headers["allow"] == "DELETE, GET, PATCH"


async def test_a_strange_request_id_is_replaced(speaking_app):
    async with client_of(speaking_app) as client:
        answer = await client.get("/healthz", headers={"x-request-id": "a b\tc"})

    assert len(answer.headers["x-request-id"]) == 32
