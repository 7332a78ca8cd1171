"""The body of a speech request, checked.

Owns field names, ranges and defaults: the hosted API's, so that its clients work.  An unknown field is refused,
since a misspelt one would be ignored otherwise.  Does not own reading the body (body) nor speaking it (speech).
"""

import binascii
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from slackwater_inference.api.errors import faults
from slackwater_inference.audio.output import SAMPLE_RATES_HZ, OutputSettings
from slackwater_inference.core import BadRequest, SamplingParams

MAX_REFERENCES = 20  # recordings in one request, as many as one stored voice may have
MAX_SPEAKERS = 5  # the published model was conditioned on at most five
_MAX_FRAMES = 4096  # of one part: 190 s, far more than 300 bytes of text can need

# Frames before the first audio.  The codec's streams are exact, so this trades no quality: a listener that asked
# for no low latency starts with more sound in hand, and so hears no gap on a busy machine.
_MIN_CHUNK_FRAMES = {"low": 4, "balanced": 6, "normal": 8}


def _audio_bytes(value: object) -> object:
    """msgpack brings bytes; JSON can only bring them as base64."""
    if not isinstance(value, str):
        return value
    try:
        return binascii.a2b_base64(value.encode(), strict_mode=True)  # half as long as base64's own check
    except (binascii.Error, ValueError) as error:
        raise ValueError("must be the recording's bytes (msgpack) or valid base64 of them (JSON)") from error


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError("not valid Unicode; send whole characters") from error
    return value


Text = Annotated[str, BeforeValidator(lambda value: _is_text(value) if isinstance(value, str) else value)]
Recording = Annotated[
    bytes,
    BeforeValidator(_audio_bytes),
    Field(min_length=1),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "minLength": 1}),
]


class _Body(BaseModel):
    # Strict: "200" is no number and true is no count, as the schema says.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ReferenceAudio(_Body):
    """A recording to imitate."""

    audio: Recording = Field(description="wav, flac, mp3, ogg, m4a ...: bytes in msgpack, base64 in JSON.")
    text: Text = Field(description="What is said in it, word for word.")


def _nested(value: object) -> object:
    """A flat list is one speaker's."""
    if isinstance(value, list) and len(value) > MAX_REFERENCES:
        # Before the items are looked at: a message about each of a million faults would be long.
        raise ValueError(f"at most {MAX_REFERENCES} recordings, got {len(value)}")
    if isinstance(value, list) and value and not any(isinstance(item, list) for item in value):
        return [value]
    return value


_One = Annotated[list[ReferenceAudio], Field(max_length=MAX_REFERENCES)]
_References = Annotated[
    list[_One],
    BeforeValidator(_nested),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": ReferenceAudio.model_json_schema(), "maxItems": MAX_REFERENCES},
                {
                    "type": "array",
                    "items": {"type": "array", "items": ReferenceAudio.model_json_schema()},
                    "maxItems": MAX_SPEAKERS,
                },
            ]
        }
    ),
]
_Ids = Annotated[list[str], Field(max_length=MAX_SPEAKERS)]


class Prosody(_Body):
    """How it is said."""

    speed: float = Field(default=1.0, ge=0.5, le=2.0, description="2 is twice as fast, at the same pitch.")
    volume: float = Field(default=0.0, ge=-20.0, le=20.0, description="dB.")
    normalize_loudness: bool = Field(default=True, description="Bring every voice to the same loudness.")


class TtsRequest(_Body):
    """What to say, and how."""

    text: Text = Field(
        description="What to say.  `<|speaker:0|>` changes the speaker, `[laugh]` is a cue; every other special token "
        "of the model is plain text."
    )
    temperature: float = Field(default=0.7, ge=0.0, le=1.0, description="0 always says it the same way.")
    top_p: float = Field(default=0.7, ge=0.0, le=1.0, description="Share of the likeliest sounds to choose from.")
    references: _References | None = Field(
        default=None, description="Recordings to imitate; a list of lists: one a speaker."
    )
    reference_id: str | _Ids | None = Field(
        default=None, description="A stored voice; a list: one a speaker.  Ignored where references are given."
    )
    prosody: Prosody | None = Field(default=None, description="null leaves the voice as it is.")
    chunk_length: int = Field(default=300, ge=100, le=300, description="UTF-8 bytes of a part of the text, at most.")
    min_chunk_length: int = Field(default=50, ge=0, le=100, description="UTF-8 bytes of a part, at least.")
    normalize: bool = Field(default=True, description="Read numbers, dates and currencies out as words.")
    format: Literal["wav", "pcm", "mp3", "opus"] = Field(
        default="mp3", description="wav and pcm are 16 bit mono; opus is in Ogg."
    )
    sample_rate: int | None = Field(
        default=None,
        description="Hz; "
        + "; ".join(f"{name}: {', '.join(map(str, rates))}" for name, rates in SAMPLE_RATES_HZ.items())
        + ".  null is the last of them.",
    )
    mp3_bitrate: Literal[64, 128, 192] = Field(default=128, description="kbit/s; of mp3 only.")
    opus_bitrate: Literal[-1000, 24, 32, 48, 64, 24_000, 32_000, 48_000, 64_000] = Field(
        default=-1000, description="bit/s or kbit/s, -1000 is automatic; of opus only."
    )
    latency: Literal["low", "normal", "balanced"] = Field(
        default="normal",
        description="It starts with 186 ms of sound (low), 279 ms (balanced) or 372 ms (normal): with more in hand, "
        "fewer gaps.",
    )
    max_new_tokens: int = Field(
        default=1024, ge=1, le=_MAX_FRAMES, description="Frames of 46 ms for each part of the text, at most."
    )
    condition_on_previous_chunks: bool = Field(default=True, description="Let each part hear the one before it.")

    # Hints: accepted so that every client's request passes, without effect.
    repetition_penalty: float = Field(
        default=1.2, ge=0.0, le=2.0, description="A hint without effect: repetition is kept down while sampling."
    )
    early_stop_threshold: float = Field(
        default=1.0, ge=0.0, le=1.0, description="A hint without effect: parts are not made in batches of one text."
    )
    features: list[Literal["quality-guard"]] = Field(
        default=[], max_length=8, description="A hint without effect: loops and runaway speech are always stopped."
    )

    @model_validator(mode="after")
    def _output_can_be_made(self) -> Self:
        rates = SAMPLE_RATES_HZ[self.format]
        if self.sample_rate is not None and self.sample_rate not in rates:
            raise ValueError(
                f"sample_rate of {self.format} must be null or one of {', '.join(map(str, rates))}, "
                f"got {self.sample_rate}"
            )
        speakers = self.speakers()
        if len(speakers) > MAX_SPEAKERS or sum(map(len, speakers)) > MAX_REFERENCES:
            raise ValueError(f"references: at most {MAX_SPEAKERS} speakers and {MAX_REFERENCES} recordings in all")
        return self

    def speakers(self) -> list[list[ReferenceAudio]]:
        """The inline recordings, one list a speaker."""
        return [speaker for speaker in self.references or [] if speaker]

    def reference_ids(self) -> list[str]:
        """The stored voices, one a speaker."""
        if self.reference_id is None or self.reference_id == "":
            return []
        return [self.reference_id] if isinstance(self.reference_id, str) else self.reference_id

    def sampling(self, seed: int) -> SamplingParams:
        """How tokens are drawn.  At temperature 0 a repetition still draws (RAS), so only one seed says it the same."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=seed if self.temperature else 0)

    def min_chunk_frames(self) -> int:
        """Frames before the first audio."""
        return _MIN_CHUNK_FRAMES[self.latency]

    def output(self) -> OutputSettings:
        """The sound that is asked for."""
        kbit = self.opus_bitrate if self.opus_bitrate >= 1000 or self.opus_bitrate < 0 else self.opus_bitrate * 1000
        prosody = self.prosody
        return OutputSettings(
            format=self.format,
            sample_rate_hz=self.sample_rate,
            mp3_bitrate=self.mp3_bitrate,
            opus_bitrate=kbit,
            speed=prosody.speed if prosody else 1.0,
            volume_db=prosody.volume if prosody else 0.0,
            normalize_loudness=prosody.normalize_loudness if prosody else False,
        )


def flat_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of `model` with nothing but itself in it: OpenAPI has no place for `$defs` beside a body."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            return inlined({**definitions[name], **{key: value for key, value in node.items() if key != "$ref"}})
        return {key: inlined(value) for key, value in node.items()}

    flat: dict[str, Any] = inlined(schema)
    return flat


def parse_tts(body: object) -> TtsRequest:
    """Check a decoded body.  Raises BadRequest that names each bad field in one line."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object with the field text, got {type(body).__name__}")
    try:
        return TtsRequest.model_validate(body)
    except ValidationError as error:
        raise BadRequest(faults(error.errors(include_url=False, include_input=False))) from error
