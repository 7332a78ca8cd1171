"""A long text: its beginning sounds while the rest is planned, and who leaves stops that."""

import asyncio
import gc
import threading
import weakref

import pytest

from slackwater_inference.api import speech
from slackwater_inference.api.auth import SELF, Caller
from slackwater_inference.api.schemas import parse_tts
from slackwater_inference.api.testing import client_of, micro_services, running
from slackwater_inference.testing.live import SENTENCE
from slackwater_inference.testing.voices import recording

pytestmark = pytest.mark.usefixtures("one_thread")

NOBODY = Caller(None, SELF)
MANY = "This is one of a great many sentences. "
LONG = MANY * 110 + "Near the end of it all the machine says farewell. " + MANY * 10
SAID = "Three seconds of a voice that says a few words."


def asked(text=LONG, **fields):
    return parse_tts({"text": text, "format": "pcm", "max_new_tokens": 2, "latency": "low", **fields})


async def opened(services, body):
    return await speech.synthesis(services, NOBODY, body, None)


async def drained(made):
    async for _ in made.pieces():
        pass


async def test_its_beginning_sounds_while_its_end_is_not_planned_yet(monkeypatch):
    has_heard = threading.Event()

    def slow(text, language):
        if "farewell" in text:
            assert has_heard.wait(10)
        return text

    monkeypatch.setattr(speech, "normalize", slow)
    async with running(micro_services()) as services:
        made = await opened(services, asked())
        made.speak(LONG)
        pieces = made.pieces()

        async with asyncio.timeout(10):
            await anext(pieces)
            has_heard.set()
            async for _ in pieces:
                pass
        made.close()

    assert "".join(part.shown for part in made.parts).replace(" ", "") == LONG.replace(" ", "")


async def test_a_failure_while_its_end_is_planned_breaks_the_answer(monkeypatch):
    def broken(text, language):
        if "farewell" in text:
            raise RuntimeError("planning broke")
        return text

    monkeypatch.setattr(speech, "normalize", broken)
    async with running(micro_services()) as services:
        made = await opened(services, asked())
        made.speak(LONG)

        with pytest.raises(RuntimeError, match="planning broke"):
            await asyncio.wait_for(drained(made), 10)

        made.close()
        assert services.engine.is_idle


async def test_nothing_more_is_planned_once_its_client_has_left(monkeypatch):
    num_planned = 0

    def counted(text, language):
        nonlocal num_planned
        num_planned += 1
        return text

    monkeypatch.setattr(speech, "normalize", counted)
    async with running(micro_services()) as services:
        made = await opened(services, asked())
        made.speak(LONG)
        await anext(made.pieces())

        made.close()

        seen = num_planned
        await asyncio.sleep(0.3)
        assert num_planned < 120
        assert num_planned - seen <= 60  # the slice that a thread is at


async def test_a_stream_does_not_keep_the_recordings_that_came_with_it():
    async with running(micro_services()) as services:
        body = asked(SENTENCE, references=[{"audio": recording(), "text": SAID}])
        kept = weakref.ref(body)
        made = await opened(services, body)

        del body
        gc.collect()

        assert kept() is None
        made.close()


async def test_a_speakers_tag_is_paid_as_often_as_it_was_written():
    services = micro_services(needs_keys=True)
    key, plain = services.keys.add("one")
    text = "<|speaker:0|>" + MANY * 12
    async with running(services), client_of(services) as client:
        headers = {"authorization": f"Bearer {plain}"}
        answer = await client.post("/v1/tts", json={"text": text, "max_new_tokens": 2}, headers=headers)

    assert answer.status_code == 200
    assert len(text) - 20 < services.keys.used(key.key_id).num_bytes <= len(text)
