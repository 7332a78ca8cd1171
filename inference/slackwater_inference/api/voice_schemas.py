"""The bodies and answers of `/model`, checked.

Owns field names, ranges and the four content types' differences: a form repeats a field where JSON has a list, and
JSON spells bytes in base64.  Owns no voice (store.voices) and no route (voices).
"""

import base64
from collections.abc import Collection
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from slackwater_inference.api.errors import faults
from slackwater_inference.api.schemas import Recording, Text
from slackwater_inference.core import BadRequest
from slackwater_inference.store.records import SampleKind, Visibility, VoiceRecord

MAX_RECORDINGS = 20
_MAX_TITLE, _MAX_DESCRIPTION, _MAX_TAG, _MAX_TAGS, _MAX_TRANSCRIPT = 200, 4_000, 64, 32, 8_000
_MAX_COVER_BYTES = 4 * 1024 * 1024

Body = TypeVar("Body", "NewModel", "ModelPatch")


def _plain(value: str) -> str:
    if "\0" in value:  # no database keeps it
        raise ValueError("must not hold the character NUL")
    return value


def _listed(value: object) -> object:
    """One value stands for a list of it; null for none."""
    if value is None:
        return []
    return [value] if isinstance(value, str | bytes) else value


def _picture(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise ValueError("must be a picture: a file of a form, bytes in msgpack, base64 in JSON") from error


Words = Annotated[Text, AfterValidator(_plain)]
Title = Annotated[Words, Field(min_length=1, max_length=_MAX_TITLE)]
Description = Annotated[Words, Field(max_length=_MAX_DESCRIPTION)]
Tags = Annotated[
    list[Annotated[Words, Field(min_length=1, max_length=_MAX_TAG)]],
    BeforeValidator(_listed),
    Field(max_length=_MAX_TAGS),
]
Cover = Annotated[
    bytes,
    BeforeValidator(_picture),
    Field(max_length=_MAX_COVER_BYTES),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


class NewModel(_Form):
    """`POST /model`."""

    title: Title
    voices: Annotated[list[Recording], BeforeValidator(_listed)] = Field(
        min_length=1, max_length=MAX_RECORDINGS, description="Recordings of one speaker: wav, flac, mp3, ogg, m4a ..."
    )
    texts: Annotated[list[Annotated[Words, Field(max_length=_MAX_TRANSCRIPT)]], BeforeValidator(_listed)] = Field(
        default=[],
        max_length=MAX_RECORDINGS,
        description="What is said in each recording, word for word.  Left out, speech to text writes it down if the "
        "server has it.",
    )
    visibility: Visibility = Field(default=Visibility.PUBLIC)
    description: Description | None = None
    cover_image: Cover | None = Field(default=None, description="PNG, JPEG, WebP or GIF; a public voice must have one.")
    tags: Tags = []
    type: Literal["tts"] = "tts"
    train_mode: Literal["fast"] = "fast"
    enhance_audio_quality: bool = Field(
        default=True, description="No effect: silence at both ends is cut, the rest is used as it is."
    )
    generate_sample: bool = Field(default=False, description="Let the new voice speak a sample that others can hear.")

    @model_validator(mode="after")
    def _fits(self) -> "NewModel":
        if self.texts and len(self.texts) != len(self.voices):
            raise ValueError(f"texts must be one for each of the {len(self.voices)} voices, got {len(self.texts)}")
        if self.visibility is Visibility.PUBLIC and self.cover_image is None:
            raise ValueError("cover_image is needed for a public voice; send one, or visibility private or unlist")
        return self


class ModelPatch(_Form):
    """`PATCH /model/{id}`; what is left out stays as it is."""

    title: Title | None = None
    description: Description | None = None
    cover_image: Cover | None = None
    visibility: Visibility | None = None
    tags: Tags | None = None


_LISTS = ("voices", "texts", "tags")


def parse_body(kind: type[Body], body: object, *, is_form: bool) -> Body:
    """Check a decoded body.  Raises BadRequest that names each bad field in one line."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object, got {type(body).__name__}")
    try:
        return kind.model_validate(_unfolded(body, _LISTS) if is_form else body)
    except ValidationError as error:
        raise BadRequest(faults(error.errors(include_url=False, include_input=False))) from error


def _unfolded(form: dict[str, list[object]], lists: Collection[str]) -> dict[str, object]:
    """A form's fields as JSON would have them."""
    fields: dict[str, object] = {}
    for name, values in form.items():
        if name in lists:
            fields[name] = values
        elif len(values) == 1:
            fields[name] = values[0]
        else:
            raise BadRequest(f"{name[:80]}: may come once only, came {len(values)} times")
    return fields


class SampleEntity(BaseModel):
    """Audio of a voice."""

    title: str
    text: str
    task_id: str
    audio: str = Field(description="Where to get it.")


class AuthorEntity(BaseModel):
    """Whose a voice is."""

    id: str = Field(alias="_id")
    nickname: str
    avatar: str


class ModelEntity(BaseModel):
    """A voice, with every field that the hosted API's clients need.  Nobody can like, mark or share here: 0."""

    id: str = Field(alias="_id")
    type: Literal["tts"] = "tts"
    title: str
    description: str
    cover_image: str
    train_mode: Literal["fast"] = "fast"
    state: Literal["created", "training", "trained", "failed"]
    tags: list[str]
    samples: list[SampleEntity]
    created_at: datetime
    updated_at: datetime
    languages: list[str]
    visibility: Visibility
    lock_visibility: bool = False
    default_text: str = ""
    like_count: int = 0
    mark_count: int = 0
    shared_count: int = 0
    task_count: int
    liked: bool = False
    marked: bool = False
    author: AuthorEntity


class ModelList(BaseModel):
    """`GET /model`."""

    total: int
    items: list[ModelEntity]
    has_more: bool


def entity(record: VoiceRecord, *, with_recordings: bool) -> ModelEntity:
    """A voice as the API shows it.  with_recordings: its owner also sees what was uploaded."""
    path = f"/model/{record.voice_id}"
    shown: list[dict[str, Any]] = []
    for position, sample in enumerate(record.samples):
        if sample.kind is SampleKind.GENERATED or with_recordings:
            name = "Sample" if sample.kind is SampleKind.GENERATED else "Recording"
            title, audio = f"{name} {position + 1}", f"{path}/samples/{position}"
            shown.append({"title": title, "text": sample.text, "task_id": sample.digest[:32], "audio": audio})
    return ModelEntity.model_validate(
        {
            "_id": record.voice_id,
            "title": record.title,
            "description": record.description,
            "cover_image": f"{path}/cover" if record.cover_digest else "",
            "state": record.state,
            "tags": record.tags,
            "samples": shown,
            "created_at": record.created_at,
            "updated_at": record.updated_at,
            "languages": record.languages,
            "visibility": record.visibility,
            "task_count": record.task_count,
            "author": {"_id": record.owner_id, "nickname": record.owner_name, "avatar": ""},
        }
    )
