"""Plays a trace as HTTP clients would: each request at its time, each answer read as it streams.

Owns the text that is asked for, the clock of the sending and the judgement of each answer.  Knows
nothing of the product but `POST /v1/tts`; `demo.run` calls `play`.
"""

import asyncio
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import httpx

from slackwater_operator.core import PermanentError

FRAMES_PER_BYTE = 0.93  # speech of English text at 21.5 frames a second
FRAME_S = 2048 / 44100
WAV_HEADER_BYTES = 44
# Bounds of the duration, as shares of the expected one: an engine ends a runaway at twice.
MIN_LENGTH, MAX_LENGTH = 0.8, 2.05
WORD_FRAMES = 8  # a single word takes longer than its letters say
MAX_RETRY_AFTER_S = 60.0

SENTENCES = (
    "The water stands still for a moment before it turns.",
    "A small boat waits by the wooden pier, and nobody is in a hurry.",
    "In the morning the market opens with bread, apples and the news of the day.",
    "Please read the second page again, slowly, and tell me what you hear.",
    "The train to the coast leaves at a quarter past nine from platform four.",
    "She closed the window, because the wind had changed and rain was near.",
    "Old maps show a road here, though only sheep have used it for years.",
    "When the lamp is green the door is open, and you may come in.",
)


class TraceRequest(Protocol):
    """What a request of a trace has to have."""

    @property
    def t_s(self) -> float:
        """When it comes, in seconds from the start."""

    @property
    def generated_tokens(self) -> int:
        """Its length; one token is played as one frame of speech."""


class Outcome(StrEnum):
    """How a request ended for its client."""

    OK = "ok"  # a whole answer, perhaps after honest refusals
    REFUSED = "refused"  # 429 or 503 with Retry-After, each time it was tried
    BROKEN = "broken"  # the stream ended in its middle
    FAILED = "failed"  # no connection, another status, or a refusal that does not say when to come back
    SHORT = "short"  # ended in order, but is not the audio asked for: header, alignment or duration


@dataclass(frozen=True, slots=True)
class Played:
    """One request as its client saw it.

    sent_s counts from the start of the play; first_audio_s and total_s from the first sending, so
    they hold the waits of refusals too.  first_audio_s is the first byte after the WAV header.
    """

    t_s: float  # when the trace has it
    frames: int  # asked for
    sent_s: float
    first_audio_s: float | None
    total_s: float
    num_bytes: int
    status: int | None  # None = no answer
    outcome: Outcome
    retries: int  # honest refusals before the last answer


@dataclass(slots=True)
class Answer:
    """What came back for one sending."""

    status: int | None = None
    retry_after_s: float | None = None  # set = an honest refusal
    header: bytes = b""
    num_bytes: int = 0
    first_audio_at_s: float | None = None
    error: str = ""  # the connection's, when it did not end in order

    def take(self, chunk: bytes, now_s: float) -> None:
        """Account for body bytes; keeps none but the header."""
        if self.num_bytes < WAV_HEADER_BYTES:
            self.header = (self.header + chunk)[:WAV_HEADER_BYTES]
        self.num_bytes += len(chunk)
        if self.first_audio_at_s is None and self.num_bytes > WAV_HEADER_BYTES:
            self.first_audio_at_s = now_s


@dataclass(slots=True)
class Player:
    """The settings of a play and what has come of it so far.

    on_done: called with each request as it ends.  max_retries: honest refusals that a client takes.
    """

    client: httpx.AsyncClient
    on_done: Callable[[Played], None]
    max_retries: int
    started_at_s: float = field(default_factory=time.monotonic)

    async def ask(self, request: TraceRequest, text: str) -> Played:
        """Send one request, again after each honest refusal, and judge what came."""
        sent_at_s = time.monotonic()
        answer, retries = await self._send(text), 0
        while answer.retry_after_s is not None and retries < self.max_retries:
            await asyncio.sleep(answer.retry_after_s)
            answer, retries = await self._send(text), retries + 1
        frames = expected_frames(text)
        played = Played(
            t_s=request.t_s,
            frames=frames,
            sent_s=sent_at_s - self.started_at_s,
            first_audio_s=answer.first_audio_at_s - sent_at_s if answer.first_audio_at_s is not None else None,
            total_s=time.monotonic() - sent_at_s,
            num_bytes=answer.num_bytes,
            status=answer.status,
            outcome=judge(answer, frames),
            retries=retries,
        )
        self.on_done(played)
        return played

    async def _send(self, text: str) -> Answer:
        answer = Answer()
        body = {"text": text, "format": "wav", "latency": "low"}  # a listener who waits for the first word
        try:
            async with self.client.stream("POST", "/v1/tts", json=body) as response:
                answer.status = response.status_code
                answer.retry_after_s = refused_for(response)
                if response.status_code == 200:
                    async for chunk in response.aiter_raw():
                        answer.take(chunk, time.monotonic())
        except httpx.TransportError as error:
            answer.error = str(error) or type(error).__name__
        return answer


async def play(
    requests: Sequence[TraceRequest],
    base_url: str,
    key: str | None = None,
    *,
    on_done: Callable[[Played], None] = lambda _: None,
    max_retries: int = 3,
    max_connections: int = 512,
    silence_timeout_s: float = 120.0,
) -> list[Played]:
    """Send each request at its time and return what became of each, in the order of `requests`.

    requests: sorted by `t_s`.  key: bearer key, if the API wants one.
    max_connections: bounds our sockets; a request past it waits, and the wait counts as its latency.
    silence_timeout_s: longest time without a byte.
    Trouble of a request is its outcome, never an exception.  When cancelled, every request is ended.
    """
    async with httpx.AsyncClient(
        base_url=base_url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        # As independent clients: a connection each.
        limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=0),
        timeout=httpx.Timeout(silence_timeout_s, pool=None),
        trust_env=False,
    ) as client:
        player = Player(client, on_done, max_retries)
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, request in enumerate(requests):
                await asyncio.sleep(player.started_at_s + request.t_s - time.monotonic())
                tasks.append(group.create_task(player.ask(request, text_of(request.generated_tokens, number))))
        return [task.result() for task in tasks]


async def speak_mp3(base_url: str, text: str, *, timeout_s: float = 30.0) -> bytes:
    """The MP3 that the API streams for `text`.  Raises PermanentError when it does not come whole."""
    async with httpx.AsyncClient(base_url=base_url, timeout=timeout_s, trust_env=False) as client:
        try:
            response = await client.post("/v1/tts", json={"text": text, "format": "mp3"})
        except httpx.TransportError as error:
            raise PermanentError(f"the API could not speak a sample as MP3: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise PermanentError(f"the API could not speak a sample as MP3: it answered {response.status_code}")
        return response.content


def text_of(frames: int, number: int) -> str:
    """A plain English text that speaks for about `frames` frames; `number` chooses where it begins.

    ASCII, so that its characters are its bytes; at least one.
    """
    num_chars = max(1, round(frames / FRAMES_PER_BYTE))
    first = number % len(SENTENCES)
    once = " ".join(SENTENCES[first:] + SENTENCES[:first]) + " "
    text = (once * (num_chars // len(once) + 1))[:num_chars]
    return text[:-1] + "."  # a space at the end might be stripped, and a cut word needs an end


def expected_frames(text: str) -> int:
    """Frames of speech that a text is expected to take."""
    return math.ceil(FRAMES_PER_BYTE * len(text.encode()))


def refused_for(response: httpx.Response) -> float | None:
    """Seconds to wait, when the answer is an overload that says when to come back; else None."""
    wait = response.headers.get("retry-after", "")
    if response.status_code not in (429, 503) or not wait.isdigit():
        return None
    return min(float(wait), MAX_RETRY_AFTER_S)


def judge(answer: Answer, frames: int) -> Outcome:
    """What became of a request whose last answer this is."""
    if answer.retry_after_s is not None:
        return Outcome.REFUSED
    if answer.error:
        return Outcome.BROKEN if answer.status == 200 else Outcome.FAILED
    if answer.status != 200:
        return Outcome.FAILED
    duration_s = audio_s(answer)
    if duration_s is None:
        return Outcome.SHORT
    is_whole = MIN_LENGTH * frames <= duration_s / FRAME_S <= MAX_LENGTH * frames + WORD_FRAMES
    return Outcome.OK if is_whole else Outcome.SHORT


def audio_s(answer: Answer) -> float | None:
    """Duration of a streamed 16-bit PCM WAV by its bytes (its header cannot know); None when it is none."""
    header = answer.header
    if (
        len(header) < WAV_HEADER_BYTES
        or header[:4] != b"RIFF"
        or header[8:16] != b"WAVEfmt "
        or header[36:40] != b"data"
    ):
        return None
    encoding, channels, sample_rate_hz = struct.unpack("<HHI", header[20:28])
    (bits,) = struct.unpack("<H", header[34:36])
    data_bytes = answer.num_bytes - WAV_HEADER_BYTES
    if encoding != 1 or bits != 16 or not channels or not sample_rate_hz or data_bytes % (2 * channels):
        return None
    return float(data_bytes / (2 * channels * sample_rate_hz))
