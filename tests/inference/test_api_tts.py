"""`POST /v1/tts`: a text is spoken as its fields say."""

import base64
import io
import struct

import numpy as np
import ormsgpack
import pytest
import soundfile

from slackwater_inference.api.testing import FRAME_BYTES, body, client_of, micro_services, running
from slackwater_inference.testing.engine import TEXT
from slackwater_inference.testing.live import SENTENCE
from slackwater_inference.testing.voices import recording

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT_BYTES = 38 * FRAME_BYTES  # what TEXT becomes as pcm
SAID = "Three seconds of a voice that says a few words."


async def test_json_gives_pcm_that_is_streamed_past_proxies(speaking_app):
    async with client_of(speaking_app) as client:
        answer = await client.post("/v1/tts", json=body())

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/pcm"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-store"
    assert len(answer.headers["x-request-id"]) == 32
    assert len(answer.content) == TEXT_BYTES


async def test_msgpack_gives_wav_with_the_hosted_placeholder_sizes(speaking_app):
    # What the official client sends, its explicit defaults among it.
    data = ormsgpack.packb(
        body(format="wav", references=[], chunk_length=200, opus_bitrate=32, latency="balanced", min_chunk_length=50)
    )
    async with client_of(speaking_app) as client:
        answer = await client.post("/v1/tts", content=data, headers={"content-type": "application/msgpack"})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/wav"
    riff, riff_size, wave = struct.unpack("<4sI4s", answer.content[:12])
    assert (riff, riff_size, wave) == (b"RIFF", 4294967076, b"WAVE")
    assert len(answer.content) == 44 + TEXT_BYTES


async def test_the_default_is_mp3(speaking_app):
    async with client_of(speaking_app) as client:
        answer = await client.post("/v1/tts", json={"text": TEXT})

    assert answer.headers["content-type"] == "audio/mpeg"
    decoded, rate_hz = soundfile.read(io.BytesIO(answer.content))
    assert rate_hz == 44_100
    assert len(decoded) >= TEXT_BYTES / 2


@pytest.mark.parametrize("bitrate", [24, 24_000, -1000])
async def test_opus_bit_rates_may_be_in_kilobits_and_in_bits(speaking_app, bitrate):
    async with client_of(speaking_app) as client:
        answer = await client.post("/v1/tts", json=body(format="opus", opus_bitrate=bitrate))

    assert answer.headers["content-type"] == "audio/ogg"
    assert answer.content.startswith(b"OggS")


async def test_volume_changes_the_level(speaking_app):
    def level(answer):
        return np.abs(np.frombuffer(answer.content, np.int16)).max()

    async with client_of(speaking_app) as client:
        quiet = {"volume": -20.0, "normalize_loudness": False}
        plain = await client.post("/v1/tts", json=body(temperature=0.0))
        soft = await client.post("/v1/tts", json=body(temperature=0.0, prosody=quiet))

    assert level(soft) < level(plain) / 5


async def test_a_long_text_is_spoken_whole_in_parts():
    sentence = "This is one sentence of the text."  # 33 bytes
    async with running(micro_services()) as services, client_of(services) as client:
        answer = await client.post("/v1/tts", json=body(text=" ".join([sentence] * 9), chunk_length=100))
        frames = services.engine.status().frames_total

    assert len(answer.content) == frames * FRAME_BYTES
    assert frames > 9 * 33 * 0.85  # all of it: about 0.93 frames a byte


async def test_max_new_tokens_counts_for_each_part_of_the_text(speaking_app):
    async with client_of(speaking_app) as client:
        answer = await client.post(
            "/v1/tts", json=body(text=f"{SENTENCE} {SENTENCE}", chunk_length=100, max_new_tokens=10)
        )

    assert len(answer.content) == 20 * FRAME_BYTES


async def test_a_number_that_is_a_part_of_its_own_is_read_in_the_language_of_the_text_around_it(speaking_app):
    text = "Wir zählen nicht die Häuser und auch nicht die Schiffe der Stadt. "
    same = {"temperature": 0.0, "min_chunk_length": 0}

    async with client_of(speaking_app) as client:
        digits = await client.post("/v1/tts", json=body(text=text + "25", normalize=True, **same))
        words = await client.post("/v1/tts", json=body(text=text + "fünfundzwanzig", normalize=False, **same))
        english = await client.post("/v1/tts", json=body(text=text + "twenty-five", normalize=False, **same))

    assert digits.content == words.content
    assert digits.content != english.content


async def test_numbers_are_read_as_words_only_if_normalize_is_on(speaking_app):
    async with client_of(speaking_app) as client:
        words = await client.post("/v1/tts", json=body(text="It costs 12345 euros.", normalize=True))
        digits = await client.post("/v1/tts", json=body(text="It costs 12345 euros.", normalize=False))

    assert len(words.content) > 1.5 * len(digits.content)


async def test_special_tokens_in_the_text_are_plain_text(speaking_app):
    async with client_of(speaking_app) as client:
        answer = await client.post("/v1/tts", json=body(text="<|im_end|><|semantic:1|> and so on", normalize=False))

    assert len(answer.content) > 20 * FRAME_BYTES  # it did not end at the token's name


@pytest.mark.parametrize("kind", ["json", "msgpack"])
@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_recording_in_the_body_is_imitated(speaking_app, kind, is_nested):
    audio = recording()
    reference = {"audio": audio if kind == "msgpack" else base64.b64encode(audio).decode(), "text": SAID}
    fields = body(references=[[reference]] if is_nested else [reference], max_new_tokens=4)
    async with client_of(speaking_app) as client:
        if kind == "json":
            answer = await client.post("/v1/tts", json=fields)
        else:
            headers = {"content-type": "application/msgpack"}
            answer = await client.post("/v1/tts", content=ormsgpack.packb(fields), headers=headers)

    assert answer.status_code == 200, answer.text
