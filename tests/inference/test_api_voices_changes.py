"""`/model`: voices are listed, changed and deleted."""

import ormsgpack
import pytest

from slackwater_inference.api.testing import assert_error
from slackwater_inference.store.errors import NotFound
from slackwater_inference.testing.voices import PNG, created, on_empty_stores, voices_alone

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def services(idle_services):
    return on_empty_stores(idle_services, needs_keys=False)


@pytest.fixture
async def client(services):
    async with voices_alone(services) as client:
        yield client


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
