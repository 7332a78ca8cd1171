"""Voice models as values: what is stored, what a list asks for, what an update changes.

Owns the shapes and the rule of who may see a voice.  Owns no row and no object (voices).  Used by the store, by
cloning and by the API.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class Visibility(StrEnum):
    """Who may see and use a voice."""

    PUBLIC = "public"  # listed for everybody
    UNLIST = "unlist"  # everybody who knows its id
    PRIVATE = "private"  # its owner


class SampleKind(StrEnum):
    """Where a sample comes from."""

    RECORDING = "recording"  # uploaded; the model is conditioned on it
    GENERATED = "generated"  # spoken by the voice itself, for listening only


class SortBy(StrEnum):
    """Order of a list; each falls, ties by age, the youngest first."""

    SCORE = "score"  # we know nothing better than use
    TASK_COUNT = "task_count"
    CREATED_AT = "created_at"


@dataclass(frozen=True, slots=True)
class Image:
    """A cover."""

    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class NewSample:
    """Audio that a new voice is to keep.  data: the file as it was uploaded.  text: what is said in it.

    derived: what was made from it and is kept beside it, by name.
    """

    data: bytes
    text: str
    media_type: str
    duration_s: float
    kind: SampleKind = SampleKind.RECORDING
    derived: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewVoice:
    """What `VoiceStore.create` makes a voice of.  voice_id: None = a new one; a voice moved from elsewhere has one."""

    owner_id: str
    owner_name: str
    title: str
    samples: Sequence[NewSample]
    description: str = ""
    visibility: Visibility = Visibility.PUBLIC
    tags: Sequence[str] = ()
    languages: Sequence[str] = ()
    title_languages: Sequence[str] = ()
    cover: Image | None = None
    voice_id: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Audio of a voice.  digest: its object."""

    digest: str
    text: str
    media_type: str
    duration_s: float
    kind: SampleKind


@dataclass(frozen=True, slots=True)
class VoiceRecord:
    """One voice model as it is stored.  task_count: texts that were spoken with it."""

    voice_id: str
    owner_id: str
    owner_name: str
    title: str
    description: str
    visibility: Visibility
    state: str
    tags: tuple[str, ...]
    languages: tuple[str, ...]
    samples: tuple[Sample, ...]
    cover_digest: str | None
    cover_media_type: str | None
    task_count: int
    created_at: datetime
    updated_at: datetime

    @property
    def recordings(self) -> tuple[Sample, ...]:
        """The samples that the model is conditioned on, in order."""
        return tuple(sample for sample in self.samples if sample.kind is SampleKind.RECORDING)

    def is_visible_to(self, user_id: str) -> bool:
        """Whether the user may see and use the voice."""
        return self.visibility is not Visibility.PRIVATE or self.owner_id == user_id


@dataclass(frozen=True, slots=True)
class VoiceChanges:
    """What `VoiceStore.update` changes; None leaves a field as it is."""

    title: str | None = None
    title_languages: Sequence[str] | None = None
    description: str | None = None
    visibility: Visibility | None = None
    tags: Sequence[str] | None = None
    cover: Image | None = None


@dataclass(frozen=True, slots=True)
class VoiceQuery:
    """Which voices to list.  title: part of it, in any case.  tags: all of them.  languages: any of them.

    own_only: the user's own, of every visibility; otherwise the public ones, of `author_id` alone if given.
    """

    page_size: int = 10
    page_number: int = 1
    title: str | None = None
    tags: Sequence[str] = ()
    own_only: bool = False
    author_id: str | None = None
    languages: Sequence[str] = ()
    title_languages: Sequence[str] = ()
    sort_by: SortBy = SortBy.SCORE


@dataclass(frozen=True, slots=True)
class VoicePage:
    """One page of a list.  total: voices on all pages."""

    total: int
    items: tuple[VoiceRecord, ...]
    has_more: bool
