import asyncio
import sys
import threading
import types
from dataclasses import replace

import numpy as np
import ormsgpack
import pytest
import soundfile

from slackwater_inference.api.testing import FakeTranscriber, assert_error, client_of, micro_services
from slackwater_inference.asr import AsrUnavailable, FasterWhisper, Segment, Transcript
from slackwater_inference.core import BadRequest, QueueFull

SAID = Transcript("two words", 1.5, (Segment("two", 0.0, 0.7), Segment("words", 0.8, 1.5)), "en")


@pytest.fixture(scope="module")
def engineless():
    """Services whose engine never runs: transcribing needs none."""
    return micro_services()


@pytest.fixture
def post(engineless):
    async def send(transcriber, **request):
        async with client_of(replace(engineless, asr=transcriber)) as client:
            return await client.post("/v1/asr", **request)

    return send


async def test_msgpack_with_segments_as_the_official_client_asks(post):
    fake = FakeTranscriber(SAID)
    body = ormsgpack.packb({"audio": b"sound", "ignore_timestamps": False, "language": "en"})
    answer = await post(fake, content=body, headers={"content-type": "application/msgpack"})

    assert answer.json() == {
        "text": "two words",
        "duration": 1.5,
        "segments": [{"text": "two", "start": 0.0, "end": 0.7}, {"text": "words", "start": 0.8, "end": 1.5}],
        "language_code": "en",
        "language": "en",
    }
    assert fake.asked == [(b"sound", "en")]


async def test_a_form_without_segments(post):
    fake = FakeTranscriber(SAID)
    answer = await post(fake, files={"audio": b"sound"}, data={"ignore_timestamps": "true"})

    assert answer.json()["text"] == "two words"
    assert answer.json()["segments"] == []
    assert fake.asked == [(b"sound", None)]


async def test_without_a_model_it_is_a_clear_503(post):
    assert_error(await post(None, files={"audio": b"sound"}), 503, "no speech-to-text model", "--asr")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        pytest.param({"data": {"language": "en"}}, ["Content-Type"], id="urlencoded"),
        pytest.param({"files": {"language": (None, "en")}}, ["audio: Field required"], id="no audio"),
        pytest.param({"files": {"audio": b""}}, ["audio"], id="empty audio"),
        pytest.param({"files": [("audio", b"a"), ("audio", b"b")]}, ["audio", "once"], id="two recordings"),
        pytest.param({"files": {"audio": b"bad"}}, ["cannot be read"], id="no sound file"),
        pytest.param({"files": {"audio": b"a"}, "data": {"ignore_timestamps": "perhaps"}}, ["ignore"], id="no boolean"),
        pytest.param({"files": {"audio": b"a"}, "data": {"speed": "1"}}, ["speed"], id="unknown field"),
        pytest.param({"content": b"\x90", "headers": {"content-type": "application/msgpack"}}, ["object"], id="a list"),
        pytest.param(
            {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data"}}, ["boundary"], id="no boundary"
        ),
        pytest.param(
            {"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            ["not a valid form"],
            id="broken form",
        ),
    ],
)
async def test_refuses_a_request_and_says_why(post, request_, words):
    assert_error(await post(FakeTranscriber(SAID), **request_), 400, *words)


class FakeWhisper:
    """Stands where faster_whisper's model does; notes how many run at once."""

    supported_languages = ("en", "de")

    def __init__(self, folder, **settings):
        self.running = self.most = 0
        self.heard = []
        self.may_go = threading.Event()
        self.may_go.set()

    def transcribe(self, samples, language, **settings):
        self.running += 1
        self.most = max(self.most, self.running)
        self.may_go.wait(10)
        self.heard.append((len(samples), samples.dtype, language))
        self.running -= 1
        segment = types.SimpleNamespace(text=" Hello.", start=0.0, end=0.5)
        return iter([segment, segment]), types.SimpleNamespace(language="en")


@pytest.fixture
def whisper(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_whisper", types.SimpleNamespace(WhisperModel=FakeWhisper))
    (tmp_path / "model.bin").touch()
    return FasterWhisper(tmp_path, max_duration_s=2.0)


@pytest.fixture
def sound(tmp_path):
    def make(seconds=0.5):
        soundfile.write(tmp_path / "a.wav", np.zeros(int(8_000 * seconds), np.float32), 8_000)
        return (tmp_path / "a.wav").read_bytes()

    return make


async def test_whisper_hears_16_khz_and_its_segments_become_the_text(whisper, sound):
    made = await whisper.transcribe(sound(), "de")

    assert whisper._model.heard == [(8_000, np.float32, "de")]
    assert made == Transcript("Hello. Hello.", 0.5, (Segment("Hello.", 0.0, 0.5),) * 2, "en")


async def test_a_language_that_whisper_does_not_know_is_detected_instead(whisper, sound):
    await whisper.transcribe(sound(), "klingon")

    assert whisper._model.heard[0][2] is None


async def test_a_recording_that_is_too_long_is_refused(whisper, sound):
    with pytest.raises(BadRequest, match="longer than 2 s"):
        await whisper.transcribe(sound(3.0), None)


async def test_one_is_transcribed_at_a_time_and_few_may_wait(whisper, sound):
    whisper._model.may_go.clear()
    running = [asyncio.ensure_future(whisper.transcribe(sound(), None)) for _ in range(9)]
    await asyncio.sleep(0)

    with pytest.raises(QueueFull, match="8 recordings wait"):
        await whisper.transcribe(sound(), None)
    whisper._model.may_go.set()
    await asyncio.gather(*running)

    assert whisper._model.most == 1


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_whisper", None)

    with pytest.raises(AsrUnavailable, match=r"slackwater\[asr\]"):
        FasterWhisper(tmp_path, 60.0)


def test_a_folder_without_a_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_whisper", types.SimpleNamespace(WhisperModel=FakeWhisper))

    with pytest.raises(AsrUnavailable, match=r"no model\.bin"):
        FasterWhisper(tmp_path, 60.0)
