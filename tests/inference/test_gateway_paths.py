"""Which paths the gateway lets through, however a client spells them."""

import asyncio
from urllib.parse import urlsplit

import pytest

from slackwater_inference.gateway.testing import Call, one_replica, replica, rig, say_hello


async def sent_as_it_is(url: str, request_line: str) -> bytes:
    """The answer to a request that no client library has put in order."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"{request_line} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("path", ["/v1/../metrics", "/model/../../healthz", "/v1/%2e%2e/metrics", "/v1//../metrics"])
async def test_a_path_reaches_the_replica_as_it_was_sent(path: str) -> None:
    async with one_replica(say_hello) as (made, app):
        await sent_as_it_is(made.url, f"GET {path}")

    assert [call.target.rstrip(b"?") for call in app.calls] == [path.encode()]


async def test_a_speech_request_needs_a_slot_however_its_path_is_spelt() -> None:
    may_end = asyncio.Event()

    async def script(call: Call) -> None:
        await may_end.wait()
        await say_hello(call)

    async with replica(script) as (app, spec), rig(spec, max_queued=0) as made:
        first = asyncio.create_task(made.client.post("/v1/tts", json={}))
        while not app.calls:
            await asyncio.sleep(0.005)

        answer = await sent_as_it_is(made.url, "POST /%761/tts")

        may_end.set()
        await first
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert app.max_in_flight == 1
