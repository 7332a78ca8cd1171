"""`/v1/tts/live`: what a client says, and what it hears for that."""

import asyncio
import logging

import ormsgpack
import pytest

from slackwater_inference.api.testing import FRAME_BYTES
from slackwater_inference.config.api import ApiSettings
from slackwater_inference.testing.engine import until
from slackwater_inference.testing.live import SENTENCE, live

pytestmark = pytest.mark.usefixtures("one_thread")


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


# What is wrong


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
        socket.send('{"event": "start"}')
        _, finish, _ = await socket.listen()

        assert "binary msgpack" in finish["message"]
