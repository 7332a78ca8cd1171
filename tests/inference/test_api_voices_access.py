"""`/model`: who sees, hears, changes and speaks with a voice."""

import pytest

from slackwater_inference.api.testing import assert_error, client_of
from slackwater_inference.testing.voices import PNG, RECORDING, as_user, created, on_empty_stores, voices_alone

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def locked(idle_services):
    """Services that ask for keys."""
    return on_empty_stores(idle_services, needs_keys=True)


@pytest.fixture
async def anybody(locked):
    async with voices_alone(locked) as client:
        yield client


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
