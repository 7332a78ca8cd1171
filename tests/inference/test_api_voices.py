"""`/model`: voices over HTTP, in all four content types."""

import base64
import io
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import ormsgpack
import pytest
import soundfile
import torch
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from slackwater_inference.api.body import MAX_BODY_BYTES
from slackwater_inference.api.errors import add_error_handlers
from slackwater_inference.api.limits import Limits
from slackwater_inference.api.testing import FakeTranscriber, client_of, micro_services, running
from slackwater_inference.api.voices import voice_routes
from slackwater_inference.asr import Transcript
from slackwater_inference.cloning import VoiceLibrary
from slackwater_inference.store.database import MEMORY_URL, Database
from slackwater_inference.store.errors import NotFound
from slackwater_inference.store.keys import KeyStore
from slackwater_inference.store.objects import MEMORY_URL as OBJECTS_IN_MEMORY
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.voices import VoiceStore

RATE_HZ = 16_000
SAID = "This is my own voice, and it says a few words."
PNG = b"\x89PNG\r\n\x1a\n and so on"


def recording(pitch_hz=120, seconds=3.0, level=0.15):
    """A wav file of something like a voice: a buzz that comes and goes."""
    at_s = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    buzz = sum(np.sin(2 * np.pi * pitch_hz * k * at_s) / k for k in range(1, 12))
    samples = (level * buzz * (0.55 + 0.45 * np.sin(2 * np.pi * 3 * at_s))).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="WAV")
    return file.getvalue()


RECORDING = recording()


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shared():
    """Services whose engine and cloner all tests share; neither is changed by a voice."""
    services = micro_services()
    yield services
    services.cloner.close()


def on_empty_stores(shared, *, needs_keys, asr=None):
    database = Database(MEMORY_URL)
    voices = VoiceStore(database, ObjectStore(OBJECTS_IN_MEMORY))
    keys = KeyStore(database) if needs_keys else None
    return replace(shared, voices=voices, library=VoiceLibrary(voices, shared.cloner), keys=keys, asr=asr)


@pytest.fixture
def services(shared):
    return on_empty_stores(shared, needs_keys=False)


@asynccontextmanager
async def voices_alone(services):
    """A client of these routes and no others: the whole application takes longer to make than a test."""
    app = FastAPI()
    app.state.services = services
    app.state.limits = Limits(8, services.engine.metrics)
    add_error_handlers(app)
    app.include_router(voice_routes(services))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest.fixture
async def client(services):
    async with voices_alone(services) as client:
        yield client


@pytest.fixture
def locked(shared):
    """Services that ask for keys."""
    return on_empty_stores(shared, needs_keys=True)


@pytest.fixture
async def anybody(locked):
    async with voices_alone(locked) as client:
        yield client


def as_user(services, name, **more):
    _, key = services.keys.add(name, user_id=f"user-{name}", **more)
    return {"Authorization": f"Bearer {key}"}


async def created(client, headers=None, *, recordings=(RECORDING,), texts=(SAID,), cover=None, **fields):
    """The answer to what the official client sends."""
    files = [("voices", data) for data in recordings] + ([("cover_image", cover)] if cover else [])
    data = {"title": "Mine", "visibility": "private", "type": "tts", "train_mode": "fast"} | fields
    return await client.post("/model", data=data | {"texts": list(texts)}, files=files, headers=headers)


def assert_error(answer, status, *words):
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"status", "message"}
    assert "\n" not in answer.json()["message"]
    for word in words:
        assert word in answer.json()["message"]


async def nothing_is_stored(client):
    return (await client.get("/model", params={"self": True})).json()["total"] == 0


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


def json_body(**more):
    encoded = base64.b64encode(RECORDING).decode()
    return {"title": "Mine", "visibility": "private", "voices": [encoded], "texts": [SAID]} | more


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


async def test_without_a_text_the_speech_to_text_writes_it_down(shared):
    asr = FakeTranscriber(Transcript("What was understood in the recording.", 3.0, (), "en"))
    services = on_empty_stores(shared, needs_keys=False, asr=asr)
    async with voices_alone(services) as client:
        answer = await created(client, texts=[])

    assert answer.status_code == 201, answer.text
    assert answer.json()["samples"][0]["text"] == "What was understood in the recording."
    assert asr.asked == [(RECORDING, None)]


async def test_a_recording_in_which_nothing_is_understood_is_refused(shared):
    asr = FakeTranscriber(Transcript(" ", 3.0, (), None))
    services = on_empty_stores(shared, needs_keys=False, asr=asr)
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


async def test_recordings_are_heard_by_their_owner_alone(locked, anybody):
    ann, bob, root = as_user(locked, "ann"), as_user(locked, "bob"), as_user(locked, "root", is_admin=True)
    made = (await created(anybody, ann, visibility="unlist")).json()
    address = made["samples"][0]["audio"]

    heard = await anybody.get(address, headers=ann)

    assert (heard.content, heard.headers["content-type"]) == (RECORDING, "audio/wav")
    assert heard.headers["x-content-type-options"] == "nosniff"
    assert (await anybody.get(f"/model/{made['_id']}", headers=bob)).json()["samples"] == []
    assert_error(await anybody.get(address, headers=bob), 403)
    assert_error(await anybody.get(address), 403)
    assert (await anybody.get(address, headers=root)).content == RECORDING
    assert_error(await anybody.get(f"/model/{made['_id']}/samples/7", headers=ann), 404)
    assert_error(await anybody.get(f"/model/{made['_id']}/samples/-1", headers=ann), 404)
    assert_error(await anybody.get(f"/model/{made['_id']}/samples/x", headers=ann), 400)


async def test_a_cover_is_shown_to_whoever_sees_the_voice(locked, anybody):
    ann, bob = as_user(locked, "ann"), as_user(locked, "bob")
    public = (await created(anybody, ann, visibility="public", cover=PNG)).json()
    private = (await created(anybody, ann, cover=PNG)).json()
    bare = (await created(anybody, ann)).json()

    shown = await anybody.get(public["cover_image"])  # a page's image sends no key

    assert (shown.content, shown.headers["content-type"]) == (PNG, "image/png")
    assert (await anybody.get(private["cover_image"], headers=ann)).content == PNG
    assert_error(await anybody.get(private["cover_image"], headers=bob), 403)
    assert_error(await anybody.get(private["cover_image"]), 401)
    assert bare["cover_image"] == ""
    assert_error(await anybody.get(f"/model/{bare['_id']}/cover", headers=ann), 404, "no cover")


async def test_a_private_voice_is_its_owners_and_the_admins(locked, anybody):
    ann, bob, root = as_user(locked, "ann"), as_user(locked, "bob"), as_user(locked, "root", is_admin=True)
    path = f"/model/{(await created(anybody, ann)).json()['_id']}"

    for method in ("GET", "PATCH", "DELETE"):
        assert_error(await anybody.request(method, path, headers=bob), 403)
        assert_error(await anybody.request(method, path), 401)
        assert_error(await anybody.request(method, "/model/" + "0" * 32, headers=bob), 404)

    assert (await anybody.patch(path, data={"title": "Moderated"}, headers=root)).status_code == 200
    assert (await anybody.get(path, headers=ann)).json()["title"] == "Moderated"
    assert (await anybody.delete(path, headers=root)).status_code == 200
    assert_error(await anybody.get(path, headers=ann), 404)


async def test_a_private_voice_of_another_user_cannot_be_spoken_with(locked):
    ann, bob = as_user(locked, "ann"), as_user(locked, "bob")
    async with client_of(locked) as whole:
        voice_id = (await created(whole, ann)).json()["_id"]
        answer = await whole.post("/v1/tts", json={"text": "hi", "reference_id": voice_id}, headers=bob)

    assert_error(answer, 400, "there is no voice")


@pytest.mark.parametrize("path", ["/model", "/model/" + "0" * 32])
async def test_a_key_is_needed(anybody, path):
    assert_error(await anybody.get(path), 401)
    assert_error(await anybody.get(path, headers={"Authorization": "Bearer sw_wrong"}), 401)


@pytest.mark.parametrize("voice_id", ["x", "%00", "%ff", "..%2f..", "A" * 32])
async def test_what_is_no_id_is_not_found(client, voice_id):
    assert_error(await client.get(f"/model/{voice_id}"), 404)


@pytest.mark.parametrize("kind", ["multipart", "urlencoded", "json", "msgpack"])
async def test_a_voice_is_changed_by_any_of_the_four_content_types(client, kind):
    before = (await created(client, tags=["old"])).json()
    path = f"/model/{before['_id']}"
    changes = {"title": "Neu", "tags": ["young", "loud"], "visibility": "unlist"}
    match kind:
        case "multipart":
            answer = await client.patch(path, data=changes, files=[("cover_image", PNG)])
        case "urlencoded":
            answer = await client.patch(path, data=changes)
        case "json":
            answer = await client.patch(path, json=changes | {"description": None})
        case _:
            packed = ormsgpack.packb(changes | {"cover_image": PNG})
            answer = await client.patch(path, content=packed, headers={"content-type": "application/msgpack"})

    assert (answer.status_code, answer.content) == (200, b"")
    after = (await client.get(path)).json()
    assert {name: after[name] for name in changes} == changes
    unchanged = before.keys() - changes.keys() - {"updated_at", "cover_image"}
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert after["updated_at"] > before["updated_at"]


async def test_an_update_without_anything_changes_nothing(client):
    made = (await created(client)).json()

    answer = await client.patch(f"/model/{made['_id']}")  # what the official client sends for update(id)

    assert (answer.status_code, answer.content) == (200, b"")
    assert (await client.get(f"/model/{made['_id']}")).json()["title"] == made["title"]


@pytest.mark.parametrize(
    "change", [{"title": ""}, {"visibility": "x"}, {"voices": ["aGk="]}, {"tags": [""]}, {"visibility": "public"}]
)
async def test_a_bad_change_is_refused_and_changes_nothing(client, change):
    made = (await created(client)).json()

    assert_error(await client.patch(f"/model/{made['_id']}", json=change), 400)
    assert (await client.get(f"/model/{made['_id']}")).json() == made


async def test_a_deleted_voice_and_its_recordings_are_gone(client, services):
    made = (await created(client)).json()
    digest = services.voices.get(made["_id"], "self").samples[0].digest

    answer = await client.delete(f"/model/{made['_id']}")

    assert (answer.status_code, answer.content) == (200, b"")
    assert_error(await client.get(f"/model/{made['_id']}"), 404)
    assert_error(await client.delete(f"/model/{made['_id']}"), 404)
    with pytest.raises(NotFound):
        services.voices.data(digest)


async def test_a_list_is_paged_and_filtered_as_the_official_client_asks(client):
    for number in range(6):
        await created(
            client, title=f"Voice {number}", cover=PNG, visibility="public", tags=["even"] if number % 2 else []
        )

    async def listed(**params):
        return (await client.get("/model", params={"page_size": 4, "page_number": 1, "self": False} | params)).json()

    first, second = await listed(sort_by="created_at"), await listed(sort_by="created_at", page_number=2)
    assert [item["title"] for item in first["items"]] == ["Voice 5", "Voice 4", "Voice 3", "Voice 2"]
    assert (first["total"], first["has_more"], second["has_more"]) == (6, True, False)
    assert [item["title"] for item in second["items"]] == ["Voice 1", "Voice 0"]
    assert (await listed(tag=["even"], title="voice"))["total"] == 3
    assert (await listed(tag=["even", "odd"]))["total"] == 0
    assert (await listed(language=["de", "en"]))["total"] == 6
    assert (await listed(author_id="self"))["total"] == 6
    assert (await listed(author_id="nobody"))["total"] == 0


@pytest.mark.parametrize(
    "params",
    [
        {"page_size": 0},
        {"page_size": 101},
        {"page_number": 0},
        {"page_number": 10**30},
        {"sort_by": "luck"},
        {"self": "perhaps"},
        {"title": "a\0b"},
        {"tag": ["\0"]},
        {"author_id": "\0"},
        {"language": ["x"] * 33},
    ],
)
async def test_a_bad_question_is_a_400(client, params):
    assert_error(await client.get("/model", params=params), 400)
