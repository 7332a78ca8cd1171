"""One request's speech: from its text, as it comes, to the bytes of its audio.

Owns the order plan, normalise, say, pay, encode.  Does not own how the bytes are sent (tts, timestamps, live) nor
any of the steps.  Called by these three routes.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from slackwater_inference.api.auth import Caller
from slackwater_inference.api.limits import Meter
from slackwater_inference.api.schemas import TtsRequest
from slackwater_inference.api.services import Services
from slackwater_inference.audio.output import AudioOutput
from slackwater_inference.core import BadRequest, Speech, Voice
from slackwater_inference.stream import SpeechStream
from slackwater_inference.text.detect import detect
from slackwater_inference.text.normalize import normalize
from slackwater_inference.text.parts import PartPlanner

# Threads of their own: a database that hangs holds up asyncio's, and must not silence streams that are running.
_ENCODERS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="encoder")
# Text is planned and normalised slice by slice: its beginning sounds meanwhile, and who leaves stops it.  What is
# longer than _BRIEF_CHARS goes to a thread, since the event loop would stand still for over some 20 ms.
_SLICE_CHARS, _BRIEF_CHARS = 2_000, 300
_MAX_SEED = 2**62
_CONTEXT_CHARS = 2_000  # of the newest text, by which its language is told
_UNREAD = "und"  # a language whose numbers are left as they are
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the text.  num_bytes: of the caller's text in it, to be paid.

    shown: as the caller wrote it.   spoken: as it was handed to the engine, with words for numbers.
    """

    shown: str
    spoken: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Encoded audio.  data: may be empty while an encoder collects.  part: index of the part that it belongs to.

    duration_s: of the sound that went into the encoder for it, at the caller's speed.
    """

    data: bytes
    part: int
    duration_s: float


class Synthesis:
    """A stream of the engine, with the caller's text on one side and the caller's audio on the other.

    Whoever holds it must `close` it: that frees the engine's slot and pages.
    """

    def __init__(self, stream: SpeechStream, body: TtsRequest, output: AudioOutput, meter: Meter, rate_hz: int) -> None:
        """rate_hz: of the engine's audio."""
        self.media_type = output.media_type
        self.parts: list[Part] = []
        self.num_waiting_bytes = 0  # of the parts that do not sound yet
        self._stream = stream
        self._output = output
        self._meter = meter
        # Not `body` itself: its recordings may be 32 MiB, and a stream may last an hour.
        self._seconds_a_sample = 1 / (rate_hz * (body.prosody.speed if body.prosody else 1.0))
        self._part_bytes = body.chunk_length, body.min_chunk_length
        self._has_words_for_numbers = body.normalize
        self._planner = PartPlanner(*self._part_bytes)
        self._newest = ""  # text, up to _CONTEXT_CHARS
        self._num_unpaid_bytes = 0  # of the text that came, in no part yet
        self._speaking: asyncio.Task[None] | None = None

    def speak(self, text: str) -> None:
        """Say `text` and nothing behind it, beside the one who reads `pieces` and who gets its errors."""
        self._speaking = asyncio.create_task(self._speak(text))
        self._speaking.add_done_callback(self._wake_reader)

    async def feed(self, text: str) -> None:
        """Add text; what is complete by it is spoken.  Raises the engine's errors."""
        for start in range(0, len(text), _SLICE_CHARS):
            piece = text[start : start + _SLICE_CHARS]
            self._newest = (self._newest + piece)[-_CONTEXT_CHARS:]
            self._num_unpaid_bytes += len(piece.encode())
            is_brief = len(piece) <= _BRIEF_CHARS
            await self._say(self._planned(piece) if is_brief else await asyncio.to_thread(self._planned, piece))

    async def flush(self) -> None:
        """Speak what is left.  Raises the engine's errors."""
        await self._say(self._spoken(self._planner.flush()))

    async def end(self) -> None:
        """Speak what is left; no text follows."""
        await self.flush()
        self._stream.end()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The audio as it is made, to its end; for one reader.

        Raises the engine's errors, those of `speak`, or 402 in the middle.
        """
        part = -1
        async for chunk in self._stream:
            while part < chunk.part:
                part += 1
                await self._pay(self.parts[part])
            data = await _in_encoder(self._output.feed, chunk.samples)
            yield Piece(data, part, len(chunk.samples) / 4 * self._seconds_a_sample)
        if self._speaking is not None:
            await self._speaking  # raises what it ended with
        if part >= 0:
            yield Piece(await _in_encoder(self._output.finish), part, 0.0)

    def close(self) -> None:
        """Stop at once.  May be called twice."""
        if self._speaking is not None:
            self._speaking.cancel()
        self._stream.close()

    async def _speak(self, text: str) -> None:
        await self.feed(text)
        await self.end()

    def _wake_reader(self, speaking: asyncio.Task[None]) -> None:
        """End the stream whose text broke off; the engine would wait for more of it."""
        if not speaking.cancelled() and speaking.exception() is not None:
            self._stream.put(None)

    def _planned(self, text: str) -> list[Part]:
        return self._spoken(self._planner.feed(text))

    def _spoken(self, planned: list[str]) -> list[Part]:
        """The parts as they are to be spoken: with words for numbers, cut again where these made them too long."""
        parts = []
        # A part may be all digits, so the language is that of the text around it.
        language = detect(self._newest) or _UNREAD
        for text in planned:
            # A turn of several parts has its speaker's tag in each, and is paid as it was written.
            num_bytes = min(len(text.encode()), self._num_unpaid_bytes)
            self._num_unpaid_bytes -= num_bytes
            words = normalize(text, language) if self._has_words_for_numbers else text
            if len(words.encode()) <= self._part_bytes[0]:
                parts.append(Part(text, words, num_bytes))
                continue
            planner = PartPlanner(*self._part_bytes)
            for piece in [*planner.feed(words), *planner.flush()]:
                parts.append(Part(piece, piece, num_bytes))  # which of the caller's words these are is not known
                num_bytes = 0  # the first carries the price of all
        return parts

    async def _say(self, parts: list[Part]) -> None:
        for part in parts:
            self.parts.append(part)
            self.num_waiting_bytes += part.num_bytes
            self._stream.say(part.spoken)
            await asyncio.sleep(0)  # the others' turn: a part takes the engine up to a millisecond to take

    async def _pay(self, part: Part) -> None:
        self.num_waiting_bytes -= part.num_bytes
        if part.num_bytes:
            await self._meter.charge(part.num_bytes)


async def synthesis(
    services: Services, caller: Caller, body: TtsRequest, model: str | None, *, is_live: bool = False
) -> Synthesis:
    """Open a stream for `body`; its text is still to be fed.

    model: the `model` header.  is_live: text will come later, so what comes before it is computed now.
    Raises ApiError 402, BadRequest (a voice, a recording), Draining, EngineFailed.
    """
    settings = services.settings
    num_bytes = len(body.text.encode())
    if num_bytes > settings.max_text_bytes:
        raise BadRequest(
            f"text must be at most {settings.max_text_bytes} UTF-8 bytes, got {num_bytes}; send it in several requests"
        )
    name = settings.model_of(model)
    meter = Meter(services.keys, caller, name, settings.prices[name])
    meter.check(num_bytes)
    voice = await _voice(services, caller, body)
    rate_hz = services.engine.model.codec.sample_rate_hz
    output = await _in_encoder(AudioOutput, body.output(), rate_hz)
    speech = Speech(
        voice=voice,
        sampling=body.sampling(secrets.randbelow(_MAX_SEED)),
        max_new_tokens=body.max_new_tokens,
        condition_on_previous_parts=body.condition_on_previous_chunks,
        min_chunk_frames=body.min_chunk_frames(),
        tenant=caller.user_id,
        tier=caller.tier,
    )
    stream = services.engine.open(speech, hold_prefix=is_live)
    return Synthesis(stream, body, output, meter, rate_hz)


async def _voice(services: Services, caller: Caller, body: TtsRequest) -> Voice | None:
    """The recordings in the body, else the stored voices that it names, else the model's own voice."""
    speakers = body.speakers()
    if speakers:
        return await services.library.inline([[(item.audio, item.text) for item in one] for one in speakers])
    ids = body.reference_ids()
    if not ids:
        return None
    return await services.library.voice(ids, caller.user_id)  # which counts the use, too


async def _in_encoder(
    call: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(_ENCODERS, partial(call, *arguments, **named))
