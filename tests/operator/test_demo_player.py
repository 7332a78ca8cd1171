"""The demo's player: its texts, its judgement, and its sending against a loopback server."""

import asyncio
import math
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from slackwater_operator.core import PermanentError
from slackwater_operator.demo.player import (
    FRAME_S,
    WORD_FRAMES,
    Answer,
    Outcome,
    Played,
    expected_frames,
    judge,
    play,
    speak_mp3,
    text_of,
)

RATE_HZ = 44100
FRAME_BYTES = 2 * 2048


@dataclass(frozen=True)
class Row:
    """A request of a trace."""

    t_s: float
    generated_tokens: int


def wav_header(rate_hz: int = RATE_HZ, encoding: int = 1, bits: int = 16) -> bytes:
    """With the placeholder sizes of a stream."""
    form = struct.pack("<HHIIHH", encoding, 1, rate_hz, rate_hz * 2, 2, bits)
    sizes = struct.pack("<II", 4294967076, 4294967040)
    return b"RIFF" + sizes[:4] + b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + sizes[4:]


def answered(header: bytes, audio_bytes: int, status: int = 200) -> Answer:
    answer = Answer(status=status)
    answer.take(header + bytes(audio_bytes), now_s=1.0)
    return answer


# Texts


@pytest.mark.parametrize("frames", [1, 2, 16, 129, 395, 1000])
def test_a_text_speaks_for_the_frames_asked_for(frames: int) -> None:
    text = text_of(frames, number=3)

    assert abs(expected_frames(text) - frames) <= 1
    assert text.isascii()
    assert text.endswith(".")


def test_texts_differ_by_number_and_are_the_same_each_time() -> None:
    assert text_of(100, 1) != text_of(100, 2)
    assert text_of(100, 1) == text_of(100, 1)


# Judgement


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        pytest.param(answered(wav_header(), 100 * FRAME_BYTES), Outcome.OK, id="whole"),
        pytest.param(answered(wav_header(22050), 50 * FRAME_BYTES), Outcome.OK, id="whole at another rate"),
        pytest.param(answered(wav_header(), 80 * FRAME_BYTES), Outcome.OK, id="a quick speaker"),
        pytest.param(answered(wav_header(), 79 * FRAME_BYTES), Outcome.SHORT, id="its end is missing"),
        pytest.param(answered(wav_header(), 214 * FRAME_BYTES), Outcome.SHORT, id="does not stop"),
        pytest.param(answered(wav_header(), 100 * FRAME_BYTES - 1), Outcome.SHORT, id="half a sample"),
        pytest.param(answered(wav_header(encoding=3), 100 * FRAME_BYTES), Outcome.SHORT, id="not PCM"),
        pytest.param(answered(wav_header(bits=8), 100 * FRAME_BYTES), Outcome.SHORT, id="not 16 bits"),
        pytest.param(answered(b"X" * 44, 100 * FRAME_BYTES), Outcome.SHORT, id="no header"),
        pytest.param(answered(b"", 0), Outcome.SHORT, id="nothing"),
        pytest.param(Answer(status=500), Outcome.FAILED, id="server error"),
        pytest.param(Answer(status=429), Outcome.FAILED, id="refused without a time"),
        pytest.param(Answer(status=429, retry_after_s=1.0), Outcome.REFUSED, id="refused honestly"),
        pytest.param(Answer(error="refused"), Outcome.FAILED, id="no connection"),
        pytest.param(Answer(status=200, error="reset"), Outcome.BROKEN, id="broken stream"),
    ],
)
def test_an_answer_is_judged_by_what_the_client_has(answer: Answer, outcome: Outcome) -> None:
    assert judge(answer, frames=100) is outcome


def test_a_single_word_may_take_longer_than_its_letters_say() -> None:
    assert judge(answered(wav_header(), WORD_FRAMES * FRAME_BYTES), frames=1) is Outcome.OK


def test_first_audio_is_the_first_byte_after_the_header_however_it_is_cut() -> None:
    answer = Answer(status=200)

    for now_s, chunk in enumerate([wav_header()[:10], wav_header()[10:], b"\0\0"]):
        answer.take(chunk, float(now_s))

    assert answer.first_audio_at_s == 2.0
    assert answer.header == wav_header()


# Sending

Script = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each connection's one request with `script(number, request, writer)`."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[bytes] = []
        self.open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            request = head + await reader.readexactly(length)
            self.requests.append(request)
            await self._script(len(self.requests), request, writer)
            await writer.drain()
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[Server, str]]:
    server = Server(script)
    async with await asyncio.start_server(server.handle, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield server, f"http://127.0.0.1:{port}"


def reply(status: int, body: bytes = b"", length: int | None = None, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def speak(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
    text = request.partition(b'"text":"')[2].partition(b'"')[0]
    writer.write(reply(200, wav_header() + bytes(expected_frames(text.decode()) * FRAME_BYTES)))


async def test_plays_a_trace_and_tells_each_request_as_it_ends() -> None:
    told: list[Played] = []
    rows = [Row(0.0, 10), Row(0.02, 200), Row(0.04, 50)]

    async with serving(speak) as (server, url):
        played = await play(rows, url, key="secret", on_done=told.append)

    assert [p.outcome for p in played] == [Outcome.OK] * 3
    assert [p.frames for p in played] == pytest.approx([10, 200, 50], abs=1)
    assert sorted(told, key=lambda p: p.t_s) == played
    assert all(p.sent_s >= p.t_s for p in played)
    assert all(p.first_audio_s is not None and 0 < p.first_audio_s <= p.total_s for p in played)
    assert [p.num_bytes for p in played] == [44 + p.frames * FRAME_BYTES for p in played]
    assert all(request.startswith(b"POST /v1/tts ") and b"Bearer secret" in request for request in server.requests)


async def test_an_honest_refusal_is_tried_again_and_counted_once() -> None:
    async def busy_first(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        if number < 3:
            writer.write(reply(429 if number == 1 else 503, Retry_After="0"))
        else:
            await speak(number, request, writer)

    async with serving(busy_first) as (_, url):
        (played,) = await play([Row(0.0, 20)], url)

    assert (played.outcome, played.retries, played.status) == (Outcome.OK, 2, 200)


async def test_a_service_that_stays_busy_refuses_after_the_tries_allowed() -> None:
    async def busy(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(503, Retry_After="0"))

    async with serving(busy) as (server, url):
        (played,) = await play([Row(0.0, 20)], url, max_retries=2)

    assert (played.outcome, played.retries, played.first_audio_s) == (Outcome.REFUSED, 2, None)
    assert len(server.requests) == 3


async def test_a_stream_that_ends_early_is_broken_and_no_server_is_failed() -> None:
    async def half(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, wav_header() + bytes(1000), length=9999))

    async with serving(half) as (_, url):
        (broken,) = await play([Row(0.0, 20)], url)
    (failed,) = await play([Row(0.0, 20)], url)

    assert (broken.outcome, broken.num_bytes) == (Outcome.BROKEN, 1044)
    assert broken.first_audio_s is not None
    assert (failed.outcome, failed.status) == (Outcome.FAILED, None)


async def test_a_sample_is_what_the_api_streams_and_trouble_with_it_is_said_in_a_line() -> None:
    async def whole_once(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, b"mp3 bytes") if number == 1 else reply(503, b"{}"))

    async with serving(whole_once) as (server, url):
        sample = await speak_mp3(url, "Still water.")
        with pytest.raises(PermanentError, match=r"could not speak a sample as MP3: .*503"):
            await speak_mp3(url, "Still water.")

    assert sample == b"mp3 bytes"
    assert b'"format":"mp3"' in server.requests[0].replace(b" ", b"")


async def test_cancelling_ends_every_request_and_sends_no_more() -> None:
    async def never(number: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, wav_header(), length=10**6))
        await writer.drain()
        while not writer.is_closing():  # the client's end of the connection shows in a write
            writer.write(b"\0\0")
            await writer.drain()
            await asyncio.sleep(0.005)

    async with serving(never) as (server, url):
        playing = asyncio.create_task(play([Row(0.0, 9), Row(0.0, 9), Row(1000.0, 9)], url))
        while len(server.requests) < 2:  # not `open`: a connection is open before its request has been read
            await asyncio.sleep(0.005)

        playing.cancel()

        with pytest.raises(asyncio.CancelledError):
            await playing
        while server.open:
            await asyncio.sleep(0.005)
        assert len(server.requests) == 2


def test_a_frame_is_that_of_the_codec() -> None:
    assert math.isclose(FRAME_S, FRAME_BYTES / 2 / RATE_HZ)
