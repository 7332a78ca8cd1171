"""`/v1/tts/live` when a client vanishes, sleeps or does not read, and when the engine leaves."""

import asyncio
from dataclasses import replace

import pytest

from slackwater_inference.api.testing import FRAME_BYTES, micro_services
from slackwater_inference.config.api import ApiSettings
from slackwater_inference.testing.live import SENTENCE, live

pytestmark = pytest.mark.usefixtures("one_thread")


# Clients


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


# The engine


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
