import asyncio
import contextlib
import logging
from dataclasses import replace

import ormsgpack
import pytest
import torch

from slackwater_inference.api.app import create_app
from slackwater_inference.api.testing import micro_services, running
from slackwater_inference.config.api import ApiSettings
from slackwater_inference.testing.model import micro

FRAME_BYTES = 2 * micro().codec.frame_samples  # in pcm
SENTENCE = "A sentence that is long enough to be one part of the text, all by itself, as can be seen."


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Denied(Exception):
    """The handshake was answered with an error."""

    def __init__(self, status, body, headers):
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers


class Socket:
    """A websocket client of an ASGI application, as a server passes it on.

    reads: False makes it a client that takes nothing from its connection after the handshake.
    """

    def __init__(self, app, headers=(), reads=True):
        self._to_app, self._from_app = asyncio.Queue(), asyncio.Queue()
        self._reads = reads
        scope = {
            "type": "websocket",
            "path": "/v1/tts/live",
            "headers": [(b"host", b"test"), *headers],
            "query_string": b"",
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }
        self.task = asyncio.ensure_future(app(scope, self._to_app.get, self._send))

    async def _send(self, message):
        if not self._reads and message["type"] == "websocket.send":
            await asyncio.Event().wait()
        self._from_app.put_nowait(message)

    async def open(self):
        self._to_app.put_nowait({"type": "websocket.connect"})
        message = await self._from_app.get()
        if message["type"] != "websocket.accept":
            body = await self._from_app.get()
            raise Denied(message["status"], body["body"], dict(message["headers"]))
        return message

    def say(self, event, **fields):
        self.send(ormsgpack.packb({"event": event, **fields}))

    def start(self, **fields):
        self.say("start", request={"text": "", "format": "pcm", **fields})

    def send(self, data):
        self._to_app.put_nowait({"type": "websocket.receive", "bytes": data})

    def vanish(self):
        self._to_app.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def hear(self):
        """The next event."""
        message = await self._from_app.get()
        assert message["type"] == "websocket.send", message
        return ormsgpack.unpackb(message["bytes"])

    async def listen(self):
        """Audio up to `finish`, that event, and the close code."""
        audio = b""
        while (event := await self.hear())["event"] == "audio":
            audio += event["audio"]
        closed = await self._from_app.get()
        await self.task
        return audio, event, closed["code"]


@contextlib.asynccontextmanager
async def live(headers=(), reads=True, services=None, **engine):
    """An open socket on an engine of its own; ends within 20 s."""
    services = services or micro_services(**engine)
    async with asyncio.timeout(20), running(services):
        socket = Socket(create_app(services), headers, reads)
        try:
            await socket.open()
            socket.services = services
            yield socket
        finally:
            socket.task.cancel()
            await asyncio.wait({socket.task})


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


async def test_text_becomes_audio_and_stop_ends_it():
    async with live() as socket:
        socket.start(chunk_length=100)
        socket.say("text", text="A text of some ")
        socket.say("text", text="forty characters, or so..")
        socket.say("stop")
        audio, finish, code = await socket.listen()

        assert len(audio) == 38 * FRAME_BYTES
        assert finish == {"event": "finish", "reason": "stop"}
        assert code == 1000
        assert socket.services.engine.is_idle


async def test_the_official_clients_nulls_and_text_in_the_start_are_taken():
    async with live() as socket:
        nulls = {"sample_rate": None, "reference_id": None, "prosody": None, "references": []}
        socket.start(text="Hello there. ", opus_bitrate=32, latency="balanced", **nulls)
        socket.say("stop")
        audio, finish, _ = await socket.listen()

        assert audio
        assert finish["reason"] == "stop"


async def test_a_stream_without_text_finishes_without_audio():
    async with live() as socket:
        socket.start()
        socket.say("stop")

        assert await socket.listen() == (b"", {"event": "finish", "reason": "stop"}, 1000)


async def test_a_fragment_waits_for_a_flush_and_what_follows_goes_on_in_the_same_stream():
    async with live() as socket:
        socket.start(format="wav")
        socket.say("text", text="Half a sent")
        await asyncio.sleep(0.2)
        assert socket.services.engine.status().frames_total == 0

        socket.say("flush")
        first = await socket.hear()
        socket.say("text", text="ence, and more of it.")
        socket.say("stop")
        rest, finish, _ = await socket.listen()

        assert first["audio"].startswith(b"RIFF")
        assert b"RIFF" not in rest  # one file, not one for each flush
        assert len(first["audio"] + rest) > 44 + 25 * FRAME_BYTES
        assert finish["reason"] == "stop"


async def test_a_complete_part_is_spoken_without_a_flush():
    async with live() as socket:
        socket.start(chunk_length=100)
        socket.say("text", text=f"{SENTENCE} {SENTENCE}")

        assert (await socket.hear())["event"] == "audio"


async def test_a_voice_is_prefilled_at_the_start_and_let_go_at_the_end():
    async with live() as socket:
        socket.start()
        await until(lambda: not socket.services.engine.is_idle)

        socket.say("stop")
        await socket.listen()

        assert socket.services.engine.is_idle


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        pytest.param([b"\xc1"], ["not valid msgpack"], id="no msgpack"),
        pytest.param([b"\xdd\xff\xff\xff\xff"], ["values"], id="a list of 2**32"),
        pytest.param([ormsgpack.packb([1])], ["body"], id="a list"),
        pytest.param([ormsgpack.packb({})], ["event"], id="no event"),
        pytest.param([ormsgpack.packb({"event": "sing"})], ["event", "sing"], id="unknown event"),
        pytest.param([ormsgpack.packb({"event": "text", "text": "a"})], ["must be start", "text"], id="text first"),
        pytest.param([ormsgpack.packb({"event": "stop"})], ["must be start", "stop"], id="stop first"),
        pytest.param([ormsgpack.packb({"event": "start"})], ["request"], id="empty start"),
        pytest.param([ormsgpack.packb({"event": "start", "request": 5})], ["request"], id="a number for a request"),
        pytest.param(
            [ormsgpack.packb({"event": "start", "request": {"temperature": 2.0}})], ["temperature"], id="bad field"
        ),
        pytest.param([ormsgpack.packb({"event": "start", "request": {"colour": 2}})], ["colour"], id="unknown field"),
        pytest.param(
            [ormsgpack.packb({"event": "start", "request": {"reference_id": "x"}})], ["no voice"], id="unknown voice"
        ),
        pytest.param([ormsgpack.packb({"event": "start", "request": {}})] * 2, ["once only"], id="second start"),
        pytest.param(
            [ormsgpack.packb({"event": "start", "request": {}}), ormsgpack.packb({"event": "text"})],
            ["text"],
            id="text without text",
        ),
        pytest.param(
            [
                ormsgpack.packb({"event": "start", "request": {}}),
                ormsgpack.packb({"event": "text", "text": "x" * 1001}),
            ],
            ["1001 bytes of text wait", "1000"],
            id="too much text",
        ),
    ],
)
async def test_a_wrong_event_finishes_with_an_error_that_says_what_is_wrong(messages, words):
    async with live(settings=ApiSettings(max_text_bytes=1000)) as socket:
        for message in messages:
            socket.send(message)
        audio, finish, code = await socket.listen()

        assert (finish["event"], finish["reason"], code) == ("finish", "error", 1008)
        for word in words:
            assert word in finish["message"]
        assert audio == b""
        assert socket.services.engine.is_idle


async def test_text_after_stop_is_an_error():
    async with live(pace_frames_per_s=0.1) as socket:
        socket.start()
        socket.say("text", text=SENTENCE)
        socket.say("stop")
        socket.say("stop")  # said twice it still means one thing
        socket.say("text", text="more")
        _, finish, _ = await socket.listen()

        assert "after stop" in finish["message"]


async def test_a_message_of_text_is_refused():
    async with live() as socket:
        socket._to_app.put_nowait({"type": "websocket.receive", "text": '{"event": "start"}'})
        _, finish, _ = await socket.listen()

        assert "binary msgpack" in finish["message"]


async def test_a_client_that_vanishes_frees_everything_at_once():
    # After its first ten frames the stream gets one frame in ten seconds: only leaving can end it in time.
    async with live(pace_frames_per_s=0.1, burst_frames=10) as socket:
        socket.start(latency="low")
        socket.say("text", text=SENTENCE)
        socket.say("flush")
        await socket.hear()

        socket.vanish()
        await socket.task

        assert socket.services.engine.is_idle
        labels = {"model": "micro", "tier": "default", "code": "499", "transport": "ws"}
        assert socket.services.engine.metrics.registry.get_sample_value("tts_requests_total", labels) == 1


class SlowLibrary:
    """Voices that take as long to encode as the test lasts."""

    def __init__(self):
        self.is_asked = asyncio.Event()

    async def inline(self, speakers):
        self.is_asked.set()
        await asyncio.Event().wait()


@pytest.fixture
def slow_voices():
    return replace(micro_services(settings=ApiSettings(max_text_bytes=1000)), library=SlowLibrary())


async def test_a_client_that_vanishes_while_its_voice_is_encoded_is_let_go(slow_voices):
    async with live(services=slow_voices) as socket:
        socket.start(references=[{"audio": b"x", "text": "y"}])
        socket.say("text", text="Spoken to nobody.")
        await slow_voices.library.is_asked.wait()
        socket.vanish()
        await socket.task


async def test_what_may_wait_while_a_voice_is_encoded_is_bounded(slow_voices):
    async with live(services=slow_voices) as socket:
        socket.start(references=[{"audio": b"x", "text": "y"}])
        for _ in range(80):
            socket.say("text", text="x" * 1000)
        _, finish, _ = await socket.listen()

        assert "bytes of events wait" in finish["message"]


async def test_a_client_that_reads_nothing_is_given_up():
    async with live(reads=False, settings=ApiSettings(send_limit_s=0.1)) as socket:
        socket.start()
        socket.say("text", text=SENTENCE)
        socket.say("flush")
        await socket.task

        assert socket.services.engine.is_idle


@pytest.mark.parametrize(
    ("limits", "has_start", "words"),
    [
        pytest.param({"start_limit_s": 0.1}, False, "no start event", id="no start"),
        pytest.param({"idle_limit_s": 0.1}, True, "nothing was said for 0.1 s", id="idle"),
        pytest.param({"connection_limit_s": 0.1}, True, "may last 0.1 s", id="too long a connection"),
    ],
)
async def test_limits_of_time_end_a_connection_with_a_reason(limits, has_start, words):
    async with live(settings=ApiSettings(**limits)) as socket:
        if has_start:
            socket.start()
        _, finish, _ = await socket.listen()

        assert finish["reason"] == "error"
        assert words in finish["message"]
        assert socket.services.engine.is_idle


async def test_an_engine_that_leaves_lets_the_stream_say_what_it_was_given_and_then_sends_it_away():
    async with live() as socket:
        socket.start()
        socket.say("text", text=SENTENCE)
        socket.say("flush")
        first = await socket.hear()
        socket.services.engine.drain()
        rest, finish, code = await socket.listen()

        assert len(first["audio"] + rest) > 70 * FRAME_BYTES
        assert finish["reason"] == "error"
        assert "the server is leaving" in finish["message"]
        assert code == 1012


async def test_an_engine_that_stops_is_an_error_of_the_server():
    async with live(pace_frames_per_s=0.1) as socket:
        socket.start()
        socket.say("text", text=SENTENCE)
        socket.say("flush")
        await socket.hear()
        socket.services.engine.stop()
        _, finish, code = await socket.listen()

        assert finish["reason"] == "error"
        assert code == 1011


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


async def test_the_log_names_the_connection_and_not_its_text(caplog):
    with caplog.at_level(logging.INFO):
        async with live([(b"x-request-id", b"abc-2")]) as socket:
            socket.start()
            socket.say("text", text="nobody should read this")
            socket.say("stop")
            await socket.listen()

    (line,) = [r.getMessage() for r in caplog.records if r.name == "slackwater_inference.api.access"]
    assert "WS /v1/tts/live status=101 outcome=200" in line
    assert "id=abc-2" in line
    assert "nobody should" not in caplog.text
