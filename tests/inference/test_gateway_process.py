"""`slackwater gateway` as a process: its talk with a supervisor, its end, its errors."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from slackwater_inference.gateway.membership import BadReplicas, specs_of
from slackwater_inference.gateway.routing import ReplicaSpec
from slackwater_inference.gateway.testing import Call, ScriptedReplica, serving

CLOSE_FRAME = b"\x88\x02\x03\xe8"
COMMAND = [sys.executable, "-c", "from slackwater_inference.gateway.cli import app; app()"]


class Process:
    """A supervised gateway process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    async def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """The next event of this name with these fields; others are skipped."""
        while line := await self._stdout.readline():
            said: dict[str, Any] = json.loads(line)
            if said["event"] == name and fields.items() <= said.items():
                return said
        raise AssertionError(f"the gateway ended before it said {name} {fields}")

    def tell(self, *replicas: dict[str, Any]) -> None:
        self._stdin.write(json.dumps({"set": "replicas", "replicas": replicas}).encode() + b"\n")

    def hang_up(self) -> None:
        self._stdin.close()


@asynccontextmanager
async def supervised(*options: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--supervised", "--port=0", *options, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Process(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def accepts(address: str) -> bool:
    url = httpx.URL(address)
    try:
        _, writer = await asyncio.open_connection(url.host, url.port)
    except OSError:
        return False
    writer.close()
    return True


async def failed_start(*options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slackwater_operator", "gateway", *options, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    return process.returncode, errors.decode()


@pytest.mark.e2e
async def test_serves_the_replicas_it_is_told_and_says_signals() -> None:
    async def script(call: Call) -> None:
        await call.answer(200, b"hello", content_type="audio/wav")

    async with serving(ScriptedReplica(script)) as url, supervised() as gateway, httpx.AsyncClient() as client:
        address = (await gateway.event("ready"))["url"]
        before = await gateway.event("signals")
        waiting = asyncio.create_task(client.post(f"{address}/v1/tts", timeout=20))
        await gateway.event("signals", queued=1, arrivals_total=1)

        gateway.tell({"uid": "one", "url": url, "slots": 2, "unknown": None})
        response = await waiting
        after = await gateway.event("signals", arrivals_total=1, queued=0, in_flight=0)

    assert response.content == b"hello"
    assert before == {
        "event": "signals",
        "in_flight": 0,
        "queued": 0,
        "arrivals_total": 0,
        "rejected_total": 0,
        "failed_total": 0,
        "oldest_queued_s": 0.0,
        "first_audio_p95_s": None,
    }
    assert after["failed_total"] == after["rejected_total"] == 0


@pytest.mark.e2e
@pytest.mark.parametrize("is_in_time", [True, False])
async def test_sigterm_lets_running_streams_end_within_the_grace(is_in_time: bool) -> None:
    first_seen, release = asyncio.Event(), asyncio.Event()

    async def script(call: Call) -> None:
        await call.start(200)
        await call.chunk(b"first ")
        first_seen.set()
        await (release.wait() if is_in_time else call.gone())
        await call.chunk(b"second")
        await call.end()

    grace_s = 60 if is_in_time else 1
    async with (
        serving(ScriptedReplica(script)) as url,
        supervised(f"--replica={url}=1", f"--grace={grace_s}") as gateway,
        httpx.AsyncClient(timeout=20) as client,
    ):
        address = (await gateway.event("ready"))["url"]
        stream = asyncio.create_task(client.post(f"{address}/v1/tts"))
        await first_seen.wait()

        gateway.process.send_signal(signal.SIGTERM)
        assert (await gateway.event("leaving"))["reason"] == "SIGTERM"
        while await accepts(address):
            await asyncio.sleep(0.02)
        release.set()

        if is_in_time:
            assert (await stream).content == b"first second"
        else:
            with pytest.raises(httpx.TransportError):
                await stream
        assert await gateway.process.wait() == 0


@pytest.mark.e2e
@pytest.mark.parametrize("is_in_time", [True, False])
async def test_sigterm_lets_websockets_end_within_the_grace_like_streams(is_in_time: bool) -> None:
    release = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await (release.wait() if is_in_time else reader.read())
        writer.write(CLOSE_FRAME)
        writer.close()

    server = await asyncio.start_server(script, "127.0.0.1", 0)
    replica = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with supervised(f"--replica={replica}=1", f"--grace={60 if is_in_time else 1}") as gateway:
        url = httpx.URL((await gateway.event("ready"))["url"])
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /v1/tts/live HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")

        gateway.process.send_signal(signal.SIGTERM)
        await gateway.event("leaving")
        while await accepts(str(url)):
            await asyncio.sleep(0.02)
        release.set()

        if is_in_time:
            assert await reader.read() == CLOSE_FRAME
        else:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        assert await gateway.process.wait() == 0
        writer.close()
    server.close()


@pytest.mark.e2e
async def test_leaves_at_once_when_the_parent_is_gone() -> None:
    async def never(call: Call) -> None:
        await call.gone()

    replica = ScriptedReplica(never)
    async with (
        serving(replica) as url,
        supervised(f"--replica={url}=1") as gateway,
        httpx.AsyncClient(timeout=20) as client,
    ):
        address = (await gateway.event("ready"))["url"]
        stream = asyncio.create_task(client.post(f"{address}/v1/tts"))
        while not replica.calls:
            await asyncio.sleep(0.01)

        gateway.hang_up()

        assert await gateway.process.wait() == 0
        with pytest.raises(httpx.TransportError):
            await stream


@pytest.mark.e2e
async def test_a_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        code, errors = await failed_start("--supervised", f"--port={port}")

    assert code == 2
    assert errors.count("\n") == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in errors


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--port=0"], "give --replica URL=SLOTS, --control-port or --supervised", id="nothing to send to"),
        pytest.param(["--replica=http://h:1"], "wants URL=SLOTS", id="no slots"),
        pytest.param(["--replica=http://h:1=0"], "wants URL=SLOTS", id="no slot at all"),
        pytest.param(["--replica=nonsense=3"], "wants URL=SLOTS", id="no URL"),
    ],
)
async def test_wrong_options_are_one_line_and_exit_code_2(options: list[str], says: str) -> None:
    code, errors = await failed_start(*options)

    assert code == 2
    assert errors.count("\n") == 1
    assert says in errors


@pytest.mark.e2e
async def test_a_wrong_set_message_changes_nothing() -> None:
    async def script(call: Call) -> None:
        await call.answer(200, b"hello")

    async with serving(ScriptedReplica(script)) as url, supervised() as gateway, httpx.AsyncClient() as client:
        address = (await gateway.event("ready"))["url"]
        gateway.tell({"uid": "one", "url": url, "slots": 2})
        gateway.tell({"uid": "two", "url": url, "slots": 0})

        response = await client.post(f"{address}/v1/tts", timeout=20)

    assert response.content == b"hello"


def test_a_set_of_replicas_may_be_empty_and_have_fields_that_we_do_not_know() -> None:
    message = {"set": "replicas", "replicas": [{"uid": "a", "url": "http://127.0.0.1:9000", "slots": 2, "new": 1}]}

    assert specs_of(message) == [ReplicaSpec("a", "http://127.0.0.1:9000/", 2)]
    assert specs_of({"replicas": []}) == []


REPLICA = {"uid": "a", "url": "http://h:1", "slots": 1}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        pytest.param([], "valid dictionary", id="no object"),
        pytest.param({"set": "replicas"}, "replicas: Field required", id="no list"),
        pytest.param({"replicas": [{**REPLICA, "slots": 0}]}, "replicas.0.slots: .* got 0", id="no slots"),
        pytest.param({"replicas": [{**REPLICA, "uid": ""}]}, "replicas.0.uid: ", id="no name"),
        pytest.param({"replicas": [{**REPLICA, "url": "h:1"}]}, "replicas.0.url: .* got 'h:1'", id="no URL"),
        pytest.param({"replicas": [REPLICA, REPLICA]}, "'a' is there again", id="one name for two"),
    ],
)
def test_a_wrong_set_of_replicas_is_refused_in_one_line_that_names_the_field(message: Any, says: str) -> None:
    with pytest.raises(BadReplicas, match=says) as refused:
        specs_of(message)

    assert "\n" not in str(refused.value)
