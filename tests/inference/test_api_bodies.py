"""Bodies that stop coming or are too many at once, and answers that nobody reads."""

import asyncio
import json

import pytest

from slackwater_inference.api.app import create_app
from slackwater_inference.api.testing import FRAME_BYTES, assert_error, body, client_of, micro_services, running
from slackwater_inference.config.api import ApiSettings

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE = 60_000


async def ask(app, receive, send, path="/v1/tts"):
    """One request, as a server passes it on."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app({**scope, "asgi": {"spec_version": "2.3"}, "http_version": "1.1"}, receive, send)


class Sent:
    """What an application sent."""

    def __init__(self):
        self.status = None
        self.body = b""

    async def __call__(self, message):
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


@pytest.mark.parametrize("path", ["/v1/tts", "/v1/tts/stream/with-timestamp", "/model"])
async def test_a_body_that_stops_coming_gives_its_place_back(path):
    services = micro_services(settings=ApiSettings(body_limit_s=0.05))
    app, sent = create_app(services), Sent()
    first = [{"type": "http.request", "body": b'{"te', "more_body": True}]

    async def receive():
        return first.pop() if first else await asyncio.Future()

    async with asyncio.timeout(5):
        await ask(app, receive, sent, path)

    assert (sent.status, json.loads(sent.body)) == (
        408,
        {"status": 408, "message": "nothing of the body came for 0.05 s"},
    )
    assert app.state.limits._total == 0
    services.cloner.close()


async def test_too_many_large_bodies_at_once_are_refused_and_their_memory_is_given_back():
    services = micro_services(settings=ApiSettings(max_held_bytes=2 * LARGE))
    app, go_on = create_app(services), asyncio.Event()

    async def upload():
        sent, messages = Sent(), [{"type": "http.request", "body": b" " * LARGE, "more_body": True}]

        async def receive():
            if messages:
                return messages.pop()
            await go_on.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        await ask(app, receive, sent)
        return sent.status

    first_two = [asyncio.create_task(upload()) for _ in range(2)]
    await asyncio.sleep(0)
    async with client_of(app) as client:
        refused = await client.post("/model", json={"title": "x" * LARGE})
        go_on.set()
        statuses = await asyncio.gather(*first_two)
        taken = await client.post("/model", json={"title": "x" * LARGE})

    assert_error(refused, 429, "too many large requests are open")
    assert refused.headers["retry-after"] == "1"
    assert statuses == [400, 400]
    assert taken.status_code == 400
    services.cloner.close()


async def test_an_answer_that_nobody_reads_is_cut_and_never_ended():
    services = micro_services(settings=ApiSettings(send_limit_s=0.05))
    app, messages = create_app(services), []
    data = [{"type": "http.request", "body": json.dumps(body()).encode(), "more_body": False}]

    async def receive():
        return data.pop() if data else await asyncio.Future()

    async def send(message):
        messages.append(message)
        if message.get("body"):
            await asyncio.Future()  # the client's window is full

    async with running(services):
        async with asyncio.timeout(5):
            await ask(app, receive, send)

        assert services.engine.is_idle
    assert app.state.limits._total == 0
    assert len(messages[1]["body"]) >= FRAME_BYTES
    assert all(message.get("more_body", True) for message in messages)
