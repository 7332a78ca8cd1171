"""The body of a speech request, checked.

Owns field names, ranges and what is not supported yet.  Field names and defaults are the hosted API's,
so that its clients work; a field that asks for what we cannot do is refused, never ignored.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from slackwater_inference.core import BadRequest

SAMPLE_RATE_HZ = 44_100
Unit = Field(default=0.7, ge=0.0, le=1.0)


class TtsRequest(BaseModel):
    """`POST /v1/tts`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(description="What to say.  Special tokens of the model are plain text here.")
    temperature: float = Unit
    top_p: float = Unit
    format: Literal["wav", "pcm", "mp3", "opus"] = Field(
        default="mp3", description="wav or pcm (int16, mono); mp3, the hosted default, and opus are not made yet."
    )
    sample_rate: int | None = Field(default=None, description=f"null or {SAMPLE_RATE_HZ} Hz.")
    chunk_length: int = Field(default=300, ge=100, le=300, strict=True, description="UTF-8 bytes of a chunk.")
    max_new_tokens: int = Field(default=1024, ge=1, description="Frames (1/21.5 s) for each chunk of the text.")
    references: list[Any] | None = Field(default=None, max_length=0, description="Not supported yet.")
    reference_id: None = Field(default=None, description="Not supported yet.")
    prosody: None = Field(default=None, description="Not supported yet.")

    # Accepted so that every client's request passes; each is a hint that changes nothing here yet.
    min_chunk_length: int = Field(default=50, ge=0, le=100, description="No effect yet.")
    normalize: bool = Field(default=True, description="No effect yet.")
    mp3_bitrate: Literal[64, 128, 192] = Field(default=128, description="No effect without mp3.")
    opus_bitrate: Literal[-1000, 24, 32, 48, 64, 24_000, 32_000, 48_000, 64_000] = Field(
        default=-1000, description="No effect without opus."
    )
    latency: Literal["low", "normal", "balanced"] = Field(default="normal", description="Always the lowest here.")
    repetition_penalty: float = Field(default=1.2, ge=0.9, le=2.0, description="No effect, as in the published model.")
    condition_on_previous_chunks: bool = Field(default=True, description="No effect yet.")
    early_stop_threshold: float = Field(default=1.0, ge=0.0, le=1.0, description="No effect yet.")
    features: list[str] = Field(default=[], max_length=0, description="Not supported yet.")

    @field_validator("text")
    @classmethod
    def _has_bytes(cls, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise ValueError("not valid Unicode; send whole characters") from error
        return value

    @field_validator("references", "features", mode="before")
    @classmethod
    def _nothing_in_it(cls, value: object) -> object:
        if value:
            raise ValueError("not supported yet; leave it out")
        return value

    @field_validator("reference_id", "prosody", mode="before")
    @classmethod
    def _null(cls, value: object) -> object:
        if value is not None:
            raise ValueError("not supported yet; leave it out or send null")
        return value

    @field_validator("format")
    @classmethod
    def _we_can_make(cls, value: str) -> str:
        if value not in ("wav", "pcm"):
            raise ValueError(f'{value} is not supported yet; send "format": "wav" or "pcm"')
        return value

    @field_validator("sample_rate")
    @classmethod
    def _native_rate(cls, value: int | None) -> int | None:
        if value not in (None, SAMPLE_RATE_HZ):
            raise ValueError(f"only {SAMPLE_RATE_HZ} is supported yet, got {value}; leave it out")
        return value

    def max_frames(self) -> int:
        """The request's limit in frames: `max_new_tokens` for each chunk that the text would make."""
        num_chunks = -(-len(self.text.encode()) // self.chunk_length)
        return self.max_new_tokens * max(1, num_chunks)


def parse_tts(body: object) -> TtsRequest:
    """Check a decoded body.  Raises BadRequest that names each bad field in one line."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object with the field text, got {type(body).__name__}")
    # `format` has a default that must be checked, too: the hosted one is mp3.
    try:
        return TtsRequest.model_validate({"format": "mp3", **body})
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise BadRequest("; ".join(faults)) from error
