import json
import re

import pytest
from pydantic import ValidationError

from slackwater_inference.api.app import create_app
from slackwater_inference.api.schemas import TtsRequest, flat_schema
from slackwater_inference.api.testing import client_of, micro_services
from slackwater_inference.audio.output import OutputSettings


def parsed(**fields):
    return TtsRequest.model_validate({"text": "a", **fields})


def test_defaults_are_the_hosted_ones():
    body = parsed()

    assert body.output() == OutputSettings(format="mp3", mp3_bitrate=128, opus_bitrate=-1000)
    assert (body.temperature, body.top_p, body.max_new_tokens) == (0.7, 0.7, 1024)
    assert (body.chunk_length, body.min_chunk_length) == (300, 50)
    assert body.normalize
    assert body.condition_on_previous_chunks
    assert body.speakers() == body.reference_ids() == []


def test_prosody_reaches_the_sound_and_brings_loudness_with_it():
    plain = parsed(prosody={"speed": 1.5, "volume": -3}).output()
    raw = parsed(prosody={"normalize_loudness": False}).output()

    assert (plain.speed, plain.volume_db, plain.normalize_loudness) == (1.5, -3.0, True)
    assert (raw.speed, raw.volume_db, raw.normalize_loudness) == (1.0, 0.0, False)


@pytest.mark.parametrize(("given", "bits"), [(24, 24_000), (64, 64_000), (48_000, 48_000), (-1000, -1000)])
def test_opus_bit_rates_are_bits_in_either_unit(given, bits):
    assert parsed(format="opus", opus_bitrate=given).output().opus_bitrate == bits


@pytest.mark.parametrize("latency", ["low", "balanced", "normal"])
def test_a_listener_who_asked_for_low_latency_starts_with_less_sound_in_hand(latency):
    assert parsed(latency=latency).min_chunk_frames() == {"low": 4, "balanced": 6, "normal": 8}[latency]


def test_references_of_one_speaker_and_of_several():
    one = {"audio": b"x", "text": "y"}

    assert [len(speaker) for speaker in parsed(references=[one, one]).speakers()] == [2]
    assert [len(speaker) for speaker in parsed(references=[[one], [], [one, one]]).speakers()] == [1, 2]
    assert parsed(references=None).speakers() == parsed(references=[]).speakers() == []
    assert parsed(reference_id=["a", "b"]).reference_ids() == ["a", "b"]
    assert parsed(reference_id="").reference_ids() == []


@pytest.mark.parametrize(
    "references",
    [
        pytest.param([[{"audio": b"x", "text": "y"}]] * 6, id="six speakers"),
        pytest.param([[{"audio": b"x", "text": "y"}] * 6] * 4, id="24 recordings"),
        pytest.param([{"audio": b"x", "text": "y"}, [{"audio": b"x", "text": "y"}]], id="flat and nested"),
        pytest.param([{"audio": b"", "text": "y"}], id="no bytes"),
    ],
)
def test_references_have_bounds(references):
    with pytest.raises(ValidationError):
        parsed(references=references)


def test_a_flat_schema_refers_to_nothing():
    schema = json.dumps(flat_schema(TtsRequest))

    assert "$ref" not in schema
    assert "$defs" not in schema


@pytest.fixture(scope="module")
def openapi():
    return create_app(micro_services(needs_keys=True)).openapi()


def test_every_route_declares_its_errors_in_the_one_form(openapi):
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            errors = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
            for status, answer in errors.items():
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, method, status)
            if path.startswith(("/v1/", "/model", "/wallet")):
                assert {"401", "500", "503"} <= errors.keys() or path.endswith("/cover"), (path, method)
    assert set(openapi["components"]["schemas"]["ErrorBody"]["properties"]) == {"status", "message"}
    assert "422" not in json.dumps(openapi["paths"])


def test_the_speech_routes_describe_both_bodies_and_say_that_a_key_is_needed(openapi):
    for path in ("/v1/tts", "/v1/tts/stream/with-timestamp"):
        post = openapi["paths"][path]["post"]
        assert post["requestBody"]["content"].keys() == {"application/json", "application/msgpack"}
        assert {"200", "400", "401", "402", "413", "429", "500", "503"} <= post["responses"].keys()
        assert post["security"] == [{"HTTPBearer": []}]
    assert "estimated" in openapi["paths"]["/v1/tts/stream/with-timestamp"]["post"]["description"]
    assert "security" not in openapi["paths"]["/healthz"]["get"]


async def test_without_keys_none_is_asked_for():
    async with client_of(micro_services()) as client:
        assert "security" not in (await client.get("/openapi.json")).text


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_the_pages_load_nothing_from_elsewhere(path):
    app = create_app(micro_services())
    async with client_of(app) as client:
        answer = await client.get(path)

    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    fetched = re.findall(r"""(?:src|href|fetch\()\s*=?\s*["']([^"'#]+)""", answer.text)
    assert fetched
    assert [address for address in fetched if not address.startswith(("/", "data:"))] == []
    for here in (address for address in fetched if address.startswith("/")):
        async with client_of(app) as client:
            assert (await client.get(here)).status_code != 404, here
