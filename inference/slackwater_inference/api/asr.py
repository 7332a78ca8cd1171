"""`POST /v1/asr`: a recording in, its text out.

Owns the body and the answer.  Does not own the model (slackwater_inference.asr); without one it answers 503.
"""

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slackwater_inference.api.body import MSGPACK, MULTIPART, read_body
from slackwater_inference.api.errors import ApiError, declared, faults
from slackwater_inference.api.limits import admitted
from slackwater_inference.api.schemas import Recording, Text
from slackwater_inference.api.services import Services
from slackwater_inference.core import BadRequest


class AsrRequest(BaseModel):
    """What to write down."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    audio: Recording = Field(description="wav, flac, mp3, ogg, m4a ...")
    language: Text | None = Field(default=None, max_length=32, description="A hint: an ISO 639-1 code.")
    ignore_timestamps: bool | None = Field(default=None, description="false asks for segments; null is true.")


class AsrSegment(BaseModel):
    """A stretch of speech, in seconds."""

    text: str
    start: float
    end: float


class AsrAnswer(BaseModel):
    """What was said."""

    text: str
    duration: float = Field(description="Seconds.")
    segments: list[AsrSegment] = Field(description="Empty unless ignore_timestamps is false.")
    language_code: str | None = Field(description="ISO 639-1.")
    language: str | None = Field(description="For display; the code, since names are not known here.")


def asr_routes(services: Services) -> APIRouter:
    """The route, on `services`."""
    router = APIRouter(tags=["Speech to text"])
    schema = AsrRequest.model_json_schema()
    form = {**schema, "properties": {**schema["properties"], "audio": {"type": "string", "format": "binary"}}}

    @router.post(
        "/v1/asr",
        summary="Write down what a recording says",
        dependencies=[Depends(admitted)],
        responses=declared(400, 401, 408, 413, 429, 500, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {MULTIPART: {"schema": form}, MSGPACK: {"schema": schema}},
            }
        },
    )
    async def asr(request: Request) -> AsrAnswer:
        if services.asr is None:
            raise ApiError(503, "this server has no speech-to-text model; its operator can add one with --asr FOLDER")
        asked = _parse(await read_body(request, MULTIPART, MSGPACK))
        made = await services.asr.transcribe(asked.audio, asked.language)
        segments = [AsrSegment(text=each.text, start=each.start_s, end=each.end_s) for each in made.segments]
        return AsrAnswer(
            text=made.text,
            duration=made.duration_s,
            segments=segments if asked.ignore_timestamps is False else [],
            language_code=made.language_code,
            language=made.language_code,
        )

    return router


def _parse(body: object) -> AsrRequest:
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object with the field audio, got {type(body).__name__}")
    fields = {}
    for name, value in body.items():
        if isinstance(value, list):  # a form
            if len(value) != 1:
                raise BadRequest(f"{str(name)[:80]}: may come once only")
            value = value[0]
        fields[name] = value
    try:
        return AsrRequest.model_validate(fields)
    except ValidationError as error:
        raise BadRequest(faults(error.errors(include_url=False, include_input=False))) from error
