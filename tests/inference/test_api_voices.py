"""`POST /model`: a voice is made, in all four content types."""

import base64
import io

import ormsgpack
import pytest
import soundfile

from slackwater_inference.api.body import MAX_BODY_BYTES
from slackwater_inference.api.testing import FakeTranscriber, assert_error, client_of, micro_services, running
from slackwater_inference.asr import Transcript
from slackwater_inference.testing.voices import (
    PNG,
    RECORDING,
    SAID,
    as_user,
    created,
    on_empty_stores,
    recording,
    voices_alone,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def services(idle_services):
    return on_empty_stores(idle_services, needs_keys=False)


@pytest.fixture
async def client(services):
    async with voices_alone(services) as client:
        yield client


async def nothing_is_stored(client):
    return (await client.get("/model", params={"self": True})).json()["total"] == 0


def json_body(**more):
    encoded = base64.b64encode(RECORDING).decode()
    return {"title": "Mine", "visibility": "private", "voices": [encoded], "texts": [SAID]} | more


async def test_a_voice_has_every_field_that_the_official_clients_need(client):
    from fish_audio_sdk.schemas import ModelEntity
    from fishaudio.types import Voice

    answer = await created(client, tags=["calm", "low"], description="a test", cover=PNG)

    assert answer.status_code == 201
    voice = Voice.model_validate(answer.json())
    assert ModelEntity.model_validate(answer.json()).id == voice.id
    assert (voice.title, voice.description, voice.visibility) == ("Mine", "a test", "private")
    assert (voice.state, voice.train_mode, voice.type, voice.tags) == ("trained", "fast", "tts", ["calm", "low"])
    assert voice.languages == ["en"]
    assert [sample.text for sample in voice.samples] == [SAID]
    assert (await client.get(f"/model/{voice.id}")).json() == answer.json()


@pytest.mark.parametrize("kind", ["multipart", "urlencoded", "json", "msgpack", "msgpack of one"])
async def test_a_voice_is_made_from_any_of_the_four_content_types(client, services, kind):
    packed = {"content-type": "application/msgpack"}
    raw = json_body(voices=[RECORDING])
    match kind:
        case "multipart":
            answer = await created(client)
        case "urlencoded":
            answer = await client.post("/model", data=json_body())
        case "json":
            answer = await client.post("/model", json=json_body(tags=None, description=None))
        case "msgpack":
            answer = await client.post("/model", content=ormsgpack.packb(raw), headers=packed)
        case _:  # one value where a list is meant
            one = raw | {"voices": RECORDING, "texts": SAID, "tags": "calm"}
            answer = await client.post("/model", content=ormsgpack.packb(one), headers=packed)

    assert answer.status_code == 201, answer.text
    stored = services.voices.get(answer.json()["_id"], "self")
    assert [(services.voices.data(sample.digest), sample.text) for sample in stored.samples] == [(RECORDING, SAID)]


async def test_a_made_voice_speaks_without_being_encoded_again(client, services):
    voice_id = (await created(client)).json()["_id"]
    digest = services.voices.get(voice_id, "self").samples[0].digest

    assert services.voices.derived(digest, services.cloner.codes_name)
    voice = await services.library.voice([voice_id], "self")
    assert [reference.text for reference in voice.references] == [SAID]
    await services.library.settle()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(
            {"recordings": [RECORDING, b"no audio"], "texts": [SAID, SAID]}, ["voices[1]", "as audio"], id="no audio"
        ),
        pytest.param({"recordings": [recording(seconds=0.4)]}, ["voices[0]", "at least 1 s"], id="short"),
        pytest.param({"recordings": [recording(level=0.0005)]}, ["voices[0]", "dBFS"], id="quiet"),
        pytest.param({"texts": ["word " * 300]}, ["voices[0]", "transcript"], id="another text"),
        pytest.param({"texts": []}, ["voices[0]", "send texts"], id="no text and no speech to text"),
        pytest.param(
            {"texts": [SAID, SAID]}, ["texts must be one for each of the 1 voices, got 2"], id="too many texts"
        ),
        pytest.param(
            {"recordings": [RECORDING] * 21, "texts": [SAID] * 21}, ["voices", "20"], id="too many recordings"
        ),
        pytest.param({"recordings": [b""]}, ["voices.0"], id="an empty file"),
        pytest.param({"title": "  "}, ["title"], id="a blank title"),
        pytest.param({"title": ["a", "b"]}, ["title: may come once only"], id="two titles"),
        pytest.param({"title": "a\0b"}, ["title", "NUL"], id="a title that no database takes"),
        pytest.param({"title": "x" * 201}, ["title", "200"], id="a long title"),
        pytest.param({"type": "svc"}, ["type"], id="a singing voice"),
        pytest.param({"colour": "red"}, ["colour"], id="an unknown field"),
        pytest.param({"visibility": "secret"}, ["visibility"], id="visibility"),
        pytest.param({"visibility": "public"}, ["cover_image is needed"], id="public without a cover"),
        pytest.param({"cover": b"<svg onload=alert(1)>"}, ["cover_image must be a PNG"], id="a cover that runs"),
        pytest.param({"tags": ["x"] * 33}, ["tags"], id="too many tags"),
    ],
)
async def test_a_bad_voice_is_refused_with_the_reason_and_nothing_is_stored(client, bad, words):
    answer = await created(client, **bad)

    assert_error(answer, 400, *words)
    assert await nothing_is_stored(client)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(b"{", "application/json", id="broken json"),
        pytest.param(b"[]", "application/json", id="no object"),
        pytest.param(b'{"title": "\\ud800", "voices": ["aGk="]}', "application/json", id="half a character"),
        pytest.param(b'{"title": "x", "voices": ["no base64!"]}', "application/json", id="no base64"),
        pytest.param(b'{"title": "x", "voices": [{}]}', "application/json", id="a recording that is an object"),
        pytest.param(b"\xc1", "application/msgpack", id="broken msgpack"),
        pytest.param(b"--b\r\nnonsense", "multipart/form-data; boundary=b", id="a broken form"),
        pytest.param(b"x", "multipart/form-data", id="a form without its boundary"),
        pytest.param(b"title=x", "text/plain", id="another content type"),
        pytest.param(b"title=x", "application/x-www-form-urlencoded", id="no recordings"),
    ],
)
async def test_a_body_that_cannot_be_read_is_a_400(client, content, kind):
    assert_error(await client.post("/model", content=content, headers={"content-type": kind}), 400)
    assert await nothing_is_stored(client)


async def test_a_body_over_the_limit_is_refused(client):
    answer = await created(client, recordings=[bytes(MAX_BODY_BYTES)])

    assert_error(answer, 413)


async def test_without_a_text_the_speech_to_text_writes_it_down(idle_services):
    asr = FakeTranscriber(Transcript("What was understood in the recording.", 3.0, (), "en"))
    services = on_empty_stores(idle_services, needs_keys=False, asr=asr)
    async with voices_alone(services) as client:
        answer = await created(client, texts=[])

    assert answer.status_code == 201, answer.text
    assert answer.json()["samples"][0]["text"] == "What was understood in the recording."
    assert asr.asked == [(RECORDING, None)]


async def test_a_recording_in_which_nothing_is_understood_is_refused(idle_services):
    asr = FakeTranscriber(Transcript(" ", 3.0, (), None))
    services = on_empty_stores(idle_services, needs_keys=False, asr=asr)
    async with voices_alone(services) as client:
        answer = await created(client, texts=[])

    assert_error(answer, 400, "voices[0]", "no speech was understood")


async def test_a_new_voice_speaks_a_sample_that_everybody_hears():
    async with running(micro_services(needs_keys=True)) as locked, client_of(locked) as client:
        ann, bob = as_user(locked, "ann"), as_user(locked, "bob")
        made = await created(client, ann, generate_sample=True, visibility="unlist")
        assert made.status_code == 201, made.text
        (shown,) = (await client.get(f"/model/{made.json()['_id']}", headers=bob)).json()["samples"]
        heard = await client.get(shown["audio"], headers=bob)

    assert [sample["title"] for sample in made.json()["samples"]] == ["Recording 1", "Sample 2"]
    assert heard.headers["content-type"] == "audio/mpeg"
    assert soundfile.info(io.BytesIO(heard.content)).duration > 0.05
    assert locked.voices.get(made.json()["_id"], "user-ann").recordings[0].text == SAID


async def test_a_sample_that_cannot_be_spoken_leaves_no_voice(client):
    assert_error(await created(client, generate_sample=True), 503)  # the engine is not started
    assert await nothing_is_stored(client)
