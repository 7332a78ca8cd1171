"""`POST /v1/tts/stream/with-timestamp`: audio with the time of each word, as server-sent events.

Owns the events and the estimate of when a word is said.  There is no aligner: a part's words share its time in
proportion to their length.  Until the part's length is known it is taken from the text's length, afterwards the
snapshot is corrected.
"""

import base64
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field

from slackwater_inference.api.auth import Caller
from slackwater_inference.api.limits import admitted
from slackwater_inference.api.schemas import flat_schema
from slackwater_inference.api.services import Services
from slackwater_inference.api.tts import (
    SPEECH_ERRORS,
    ModelHeader,
    OpenSpeech,
    SpeechResponse,
    open_speech,
    speech_body,
)

# engine-api.md 1.5: about 0.93 frames of 46.4 ms for a UTF-8 byte of English.
_SECONDS_A_BYTE = 0.043
_NOT_SPOKEN = re.compile(r"<\|speaker:\d+\|>|\[[^\[\]]*\]")
# A word, or one character of a script that is written without spaces.
_WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)
_HAS_SOUND = re.compile(r"\w")


class Segment(BaseModel):
    """A word and when it is said, in seconds from the start of its part's audio; estimated."""

    text: str
    start: float
    end: float


class Alignment(BaseModel):
    """The words of a part that are heard so far.  A newer one of the same chunk_seq replaces an older one."""

    segments: list[Segment]
    audio_duration: float = Field(description="Seconds of the part's audio so far.")


class TimestampEvent(BaseModel):
    """The data of one event."""

    audio_base64: str = Field(description="The next bytes of the audio; may be empty.")
    content: str = Field(description="The part of the text that the alignment is about.")
    alignment: Alignment
    chunk_seq: int = Field(ge=0, description="Number of that part.")
    chunk_audio_offset_sec: float = Field(ge=0, description="When that part's audio begins.")


@dataclass(slots=True)
class _Place:
    """Where in the audio we are."""

    part: int = 0
    offset_s: float = 0.0
    duration_s: float = 0.0  # of the part so far


# Of each event, as its fields come out of an event-stream parser; OpenAPI 3.1 has no other place to say it.
_EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"const": "message"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": flat_schema(TimestampEvent),
        },
    },
}


def timestamp_routes(services: Services) -> APIRouter:
    """The route, on `services`."""
    router = APIRouter(tags=["Speech"])

    @router.post(
        "/v1/tts/stream/with-timestamp",
        summary="Speak a text and say when each word comes",
        description="Server-sent events of type `message`.  The audio of all events in order is one file.  Times are "
        "estimated from the words' lengths, not measured, and corrected once a part's length is known.  An error "
        "before the first event is a status; after it the connection is cut.",
        response_class=Response,
        responses={
            200: {
                "description": "Events",
                "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
            },
            **SPEECH_ERRORS,
        },
        openapi_extra=speech_body(),
    )
    async def tts_with_timestamps(
        request: Request, caller: Annotated[Caller, Depends(admitted)], model: ModelHeader = None
    ) -> Response:
        async with open_speech(services, request, caller, model) as speech:
            return SpeechResponse(speech, _events(speech), "text/event-stream", services.settings.send_limit_s)

    return router


async def _events(speech: OpenSpeech) -> AsyncIterator[bytes]:
    place = _Place()
    async for piece in speech.pieces():
        if piece.part != place.part:  # the part before is whole now
            yield _event(speech, place, b"", is_whole=True)
            place = _Place(piece.part, place.offset_s + place.duration_s)
        place.duration_s += piece.duration_s
        # The piece without sound is the encoder's rest, behind the last part.
        yield _event(speech, place, piece.data, is_whole=piece.duration_s == 0.0)


def _event(speech: OpenSpeech, place: _Place, audio: bytes, *, is_whole: bool) -> bytes:
    text = speech.synthesis.parts[place.part].shown
    event = TimestampEvent(
        audio_base64=base64.b64encode(audio).decode(),
        content=text,
        alignment=align(text, place.duration_s, is_whole=is_whole),
        chunk_seq=place.part,
        chunk_audio_offset_sec=round(place.offset_s, 3),
    )
    return f"event: message\ndata: {event.model_dump_json()}\n\n".encode()


def align(text: str, duration_s: float, *, is_whole: bool) -> Alignment:
    """Words of `text` that are heard within the first `duration_s` of its audio, and estimated times.

    is_whole: that is all of its audio.
    """
    words = [word for word in _WORDS.findall(_NOT_SPOKEN.sub(" ", text)) if _HAS_SOUND.search(word)]
    lengths = [len(word.encode()) for word in words]
    total = sum(lengths)
    whole_s = duration_s if is_whole else max(duration_s, total * _SECONDS_A_BYTE)
    segments = []
    start_s = 0.0
    for word, length in zip(words, lengths, strict=True):
        end_s = start_s + whole_s * length / total
        if start_s >= duration_s:
            break
        segments.append(Segment(text=word, start=round(start_s, 3), end=round(min(end_s, duration_s), 3)))
        start_s = end_s
    return Alignment(segments=segments, audio_duration=round(duration_s, 3))
