"""`/model`: voices are made, listed, shown, changed and deleted.

Owns the routes and who sees what of a voice.  Does not own the checks of a recording (cloning), the fields
(voice_schemas) or where voices are kept (store).
"""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field

from slackwater_inference.api.auth import Caller, caller_of
from slackwater_inference.api.body import JSON, MSGPACK, MULTIPART, URLENCODED, read_body
from slackwater_inference.api.errors import ApiError, declared
from slackwater_inference.api.limits import admitted
from slackwater_inference.api.media import audio_type, image_type
from slackwater_inference.api.schemas import flat_schema
from slackwater_inference.api.services import Services
from slackwater_inference.api.voice_schemas import (
    ModelEntity,
    ModelList,
    ModelPatch,
    NewModel,
    Words,
    entity,
    parse_body,
)
from slackwater_inference.audio.output import AudioOutput, OutputSettings
from slackwater_inference.core import BadRequest, SamplingParams, Speech
from slackwater_inference.store.errors import Forbidden
from slackwater_inference.store.records import (
    Image,
    NewSample,
    NewVoice,
    SampleKind,
    SortBy,
    Visibility,
    VoiceChanges,
    VoiceQuery,
    VoiceRecord,
)
from slackwater_inference.text.language import languages_of
from slackwater_inference.text.parts import PartPlanner

_FORMS = (MULTIPART, URLENCODED)
_KINDS = (*_FORMS, JSON, MSGPACK)
_SAMPLE_BYTES, _MIN_SAMPLE_BYTES = 200, 50  # UTF-8 bytes of a generated sample's text: some ten seconds
_MAX_LABELS = 32

_Caller = Annotated[Caller, Depends(caller_of)]
_Labels = Annotated[list[Annotated[Words, Field(max_length=64)]], Query(max_length=_MAX_LABELS)]
_Title = Annotated[Words | None, Query(max_length=200, description="A part of the title, in any case.")]


def voice_routes(services: Services) -> APIRouter:
    """The routes, on `services`."""
    router = APIRouter(tags=["Voices"])
    voices, library = services.voices, services.library

    @router.get("/model", summary="List voices", responses=declared(400, 401, 500, 503))
    async def list_voices(
        caller: _Caller,
        page_size: Annotated[int, Query(ge=1, le=100)] = 10,
        page_number: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
        title: _Title = None,
        tag: _Labels = [],  # noqa: B006 - FastAPI copies defaults
        own: Annotated[bool, Query(alias="self", description="Your own, also those that nobody else sees.")] = False,
        author_id: Annotated[Words | None, Query(max_length=64)] = None,
        language: _Labels = [],  # noqa: B006
        title_language: _Labels = [],  # noqa: B006
        sort_by: SortBy = SortBy.SCORE,
    ) -> ModelList:
        query = VoiceQuery(page_size, page_number, title, tag, own, author_id, language, title_language, sort_by)
        page = await asyncio.to_thread(voices.list, query, caller.user_id)
        items = [entity(record, with_recordings=_owns(caller, record)) for record in page.items]
        return ModelList(total=page.total, items=items, has_more=page.has_more)

    @router.post(
        "/model",
        status_code=201,
        summary="Make a voice",
        description="Every recording is checked before anything is stored; a bad one is named with the reason.",
        responses=declared(400, 401, 408, 413, 429, 500, 503),
        openapi_extra=_documented(NewModel),
    )
    async def create_voice(request: Request, caller: Annotated[Caller, Depends(admitted)]) -> ModelEntity:
        body = parse_body(NewModel, await read_body(request, *_KINDS), is_form=_is_form(request))
        record = await asyncio.to_thread(voices.create, await _new_voice(services, caller, body))
        return entity(record, with_recordings=True)

    @router.get("/model/{voice_id}", summary="Show a voice", responses=declared(401, 403, 404, 500, 503))
    async def get_voice(voice_id: str, caller: _Caller) -> ModelEntity:
        record = await _visible(services, voice_id, caller)
        return entity(record, with_recordings=_owns(caller, record))

    @router.patch(
        "/model/{voice_id}",
        summary="Change a voice",
        response_class=Response,
        responses={200: {"description": "Changed"}, **declared(400, 401, 403, 404, 408, 413, 429, 500, 503)},
        openapi_extra=_documented(ModelPatch),
    )
    async def update_voice(voice_id: str, request: Request, caller: _Caller) -> Response:
        # A client that changes nothing sends no body and no type of it.
        body = await read_body(request, *_KINDS) if "content-type" in request.headers else {}
        changes = parse_body(ModelPatch, body, is_form=_is_form(request))
        record = await _visible(services, voice_id, caller)
        if changes.visibility is Visibility.PUBLIC and not (changes.cover_image or record.cover_digest):
            raise BadRequest("cover_image is needed for a public voice; send one")
        is_admin = caller.key is not None and caller.key.is_admin
        made = await asyncio.to_thread(_changes, changes)
        await asyncio.to_thread(lambda: voices.update(voice_id, caller.user_id, made, is_admin=is_admin))
        return Response()

    @router.delete(
        "/model/{voice_id}",
        summary="Delete a voice, and every recording that no other voice has",
        response_class=Response,
        responses={200: {"description": "Deleted"}, **declared(401, 403, 404, 500, 503)},
    )
    async def delete_voice(voice_id: str, caller: _Caller) -> Response:
        is_admin = caller.key is not None and caller.key.is_admin
        library.forget(await asyncio.to_thread(lambda: voices.delete(voice_id, caller.user_id, is_admin=is_admin)))
        return Response()

    @router.get(
        "/model/{voice_id}/cover",
        summary="A voice's cover",
        response_class=Response,
        responses={200: _file("image/*"), **declared(401, 403, 404, 500, 503)},
    )
    async def get_cover(voice_id: str, request: Request) -> Response:
        record = await _visible(services, voice_id, await _viewer(request))
        if record.cover_digest is None or record.cover_media_type is None:
            raise ApiError(404, "this voice has no cover")
        return await _sent(services, record.cover_digest, record.cover_media_type)

    @router.get(
        "/model/{voice_id}/samples/{position}",
        summary="Audio of a voice",
        description="What the voice spoke itself, for everybody who sees the voice; the recordings, for its owner.",
        response_class=Response,
        responses={200: _file("audio/*"), **declared(400, 401, 403, 404, 500, 503)},
    )
    async def get_sample(voice_id: str, position: int, request: Request) -> Response:
        viewer = await _viewer(request)
        record = await _visible(services, voice_id, viewer)
        if not 0 <= position < len(record.samples):
            raise ApiError(404, "this voice has no such sample")
        sample = record.samples[position]
        if sample.kind is SampleKind.RECORDING and not _owns(viewer, record):
            raise ApiError(403, "only the owner of a voice may hear its recordings")
        return await _sent(services, sample.digest, sample.media_type)

    return router


async def _new_voice(services: Services, caller: Caller, body: NewModel) -> NewVoice:
    """What is to be stored, all of it checked.  Raises BadRequest that names the file and the reason."""
    cover = None if body.cover_image is None else _image(body.cover_image)
    texts = body.texts or [""] * len(body.voices)
    samples = []
    for index, (audio, given) in enumerate(zip(body.voices, texts, strict=True)):
        try:
            text = given or await _transcript(services, audio)
            encoded = await services.cloner.encode(audio, text)
        except BadRequest as error:
            raise BadRequest(f"voices[{index}]: {error}") from error
        kept = services.cloner.derived(encoded)
        samples.append(NewSample(audio, text, audio_type(audio), encoded.duration_s, derived=kept))
    spoken = [await _spoken(services, caller, samples)] if body.generate_sample else []
    return NewVoice(
        owner_id=caller.user_id,
        owner_name=caller.user_id if caller.key is None else caller.key.name,
        title=body.title,
        samples=[*samples, *spoken],
        description=body.description or "",
        visibility=body.visibility,
        tags=body.tags,
        languages=await asyncio.to_thread(languages_of, [sample.text for sample in samples]),
        title_languages=await asyncio.to_thread(languages_of, [body.title]),
        cover=cover,
    )


async def _transcript(services: Services, audio: bytes) -> str:
    if services.asr is None:
        raise BadRequest(
            "it needs a transcript, since this server has no speech to text; send texts, one for each recording"
        )
    text = (await services.asr.transcribe(audio, None)).text.strip()
    if not text:
        raise BadRequest("no speech was understood in it; send texts, one for each recording")
    return text


async def _spoken(services: Services, caller: Caller, recordings: list[NewSample]) -> NewSample:
    """The beginning of the first recording's text, spoken by the new voice.  Nobody pays for it."""
    voice = await services.library.inline([[(recording.data, recording.text) for recording in recordings]])
    planner = PartPlanner(_SAMPLE_BYTES, _MIN_SAMPLE_BYTES)
    text = [*planner.feed(recordings[0].text), *planner.flush()][0]
    rate_hz = services.engine.model.codec.sample_rate_hz
    output = await asyncio.to_thread(AudioOutput, OutputSettings(format="mp3"), rate_hz)
    data = bytearray()
    num_samples = 0
    stream = services.engine.open(Speech(voice=voice, sampling=SamplingParams(), tenant=caller.user_id))
    try:
        stream.say(text)
        stream.end()
        async for chunk in stream:
            num_samples += len(chunk.samples) // 4  # fp32
            data += await asyncio.to_thread(output.feed, chunk.samples)
    finally:
        stream.close()
    data += await asyncio.to_thread(output.finish)
    return NewSample(bytes(data), text, output.media_type, num_samples / rate_hz, SampleKind.GENERATED)


async def _visible(services: Services, voice_id: str, caller: Caller) -> VoiceRecord:
    """The voice, as `caller` may see it.  Raises Forbidden, NotFound, and 401 where a key could help."""
    try:
        return await asyncio.to_thread(services.voices.get, voice_id, caller.user_id)
    except Forbidden:
        if not caller.user_id:
            raise ApiError(401, "this voice is private; send its owner's API key") from None
        if caller.key is None or not caller.key.is_admin:
            raise
        return await asyncio.to_thread(services.voices.get_any, voice_id)


async def _viewer(request: Request) -> Caller:
    """The caller, or nobody: a page's image and player send no key, and public voices need none."""
    if "authorization" not in request.headers and request.app.state.services.keys is not None:
        return Caller(None, "")
    return await caller_of(request)


def _owns(caller: Caller, record: VoiceRecord) -> bool:
    return record.owner_id == caller.user_id or (caller.key is not None and caller.key.is_admin)


def _changes(body: ModelPatch) -> VoiceChanges:
    return VoiceChanges(
        title=body.title,
        title_languages=None if body.title is None else languages_of([body.title]),
        description=body.description,
        visibility=body.visibility,
        tags=body.tags,
        cover=None if body.cover_image is None else _image(body.cover_image),
    )


def _image(data: bytes) -> Image:
    media_type = image_type(data)
    if media_type is None:
        raise BadRequest("cover_image must be a PNG, JPEG, WebP or GIF picture")
    return Image(data, media_type)


async def _sent(services: Services, digest: str, media_type: str) -> Response:
    data = await asyncio.to_thread(services.voices.data, digest)
    headers = {
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, max-age=300",
        "ETag": f'"{digest}"',
    }
    return Response(data, media_type=media_type, headers=headers)


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in _FORMS


def _file(kind: str) -> dict[str, Any]:
    return {"description": "The file", "content": {kind: {"schema": {"type": "string", "format": "binary"}}}}


def _documented(body: type[NewModel] | type[ModelPatch]) -> dict[str, Any]:
    """What OpenAPI says of a body."""
    schema = flat_schema(body)
    required = bool(schema.get("required"))
    return {"requestBody": {"required": required, "content": {kind: {"schema": schema} for kind in _KINDS}}}
