"""`/v1/tts/live`: who is let in, how often, and what it costs."""

import pytest

from slackwater_inference.api.app import create_app
from slackwater_inference.api.testing import micro_services
from slackwater_inference.testing.live import SENTENCE, Denied, Socket, live

pytestmark = pytest.mark.usefixtures("one_thread")


async def test_an_unknown_key_is_denied_at_the_handshake():
    socket = Socket(create_app(micro_services(needs_keys=True)), [(b"authorization", b"Bearer nobody")])

    with pytest.raises(Denied) as denied:
        await socket.open()
    await socket.task

    assert denied.value.status == 401
    assert b'"status":401' in denied.value.body
    assert b"x-request-id" in denied.value.headers


async def test_an_engine_that_is_not_ready_denies_the_handshake_so_that_another_can_be_asked():
    socket = Socket(create_app(micro_services()))

    with pytest.raises(Denied) as denied:
        await socket.open()
    await socket.task

    assert denied.value.status == 503
    assert b"starting" in denied.value.body


async def test_a_key_may_open_so_many_connections_only():
    services = micro_services(needs_keys=True)
    _, key = services.keys.add("one", max_concurrent=1)
    headers = [(b"authorization", f"Bearer {key}".encode())]
    async with live(headers, services=services):
        second = Socket(socket_app := create_app(services), headers)
        await second.open()  # another application counts for itself
        third = Socket(socket_app, headers)
        with pytest.raises(Denied) as denied:
            await third.open()
        await third.task
        second.vanish()
        await second.task

        fourth = Socket(socket_app, headers)
        await fourth.open()
        fourth.vanish()
        await fourth.task

    assert denied.value.status == 429
    assert b"retry-after" in denied.value.headers


async def test_text_is_paid_as_it_is_spoken_and_no_further_than_the_credit_goes():
    services = micro_services(needs_keys=True)
    # Fifteen dollars a million bytes: the first sentence is covered, the second is not.
    made, key = services.keys.add("one", credit=len(SENTENCE) * 15 * services.settings.prices["s1"] / 15_000_000)
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"model", b"s1")]
    async with live(headers, services=services) as socket:
        socket.start(chunk_length=100)
        socket.say("text", text=SENTENCE)
        socket.say("flush")
        await socket.hear()
        socket.say("text", text=SENTENCE)
        socket.say("stop")
        _, finish, _ = await socket.listen()

        assert "credit" in finish["message"]
        assert services.keys.used(made.key_id).num_bytes == len(SENTENCE)
