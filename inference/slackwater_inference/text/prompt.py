"""From a text and a voice to the columns that the slow transformer reads, and to how long the speech may get.

Owns the prompt layouts (as data, engine-api.md 1.6) and the frame budget.  Does not own tokenizers, special ids
(config) or where a text is cut (parts).  Called by the engine for each part of a stream's text.
"""

import math
import re
from collections.abc import Iterator, Sequence
from enum import Enum

from slackwater_inference.config import ModelConfig
from slackwater_inference.core import Codes, Column, FrameBudget, Voice
from slackwater_inference.text.tokenizer import Tokenizer

# mlx-audio's guard against runaway, engine-api.md 1.8.
_MIN_BUDGET_FRAMES = 32
_FRAMES_PER_TOKEN = 12

SPEAKER_TAG = re.compile(r"<\|speaker:\d+\|>")


class Part(Enum):
    """The parts of a layout that are not literal text."""

    IM_START = "im_start"
    IM_END = "im_end"
    VOICE = "voice"  # <|voice|>: what follows is speech
    TEXT = "text"  # to speak; in the system turn, what the references say
    CODES = "codes"  # speech


# A literal is tokenised on its own: joining strings first would change a BPE tokenizer's merges.
Layout = tuple[Part | str, ...]

SYSTEM: Layout = (Part.IM_START, "system\n", "convert the provided text to speech", Part.IM_END, "\n")
SYSTEM_WITH_REFERENCES: Layout = (
    Part.IM_START,
    "system\n",
    "convert the provided text to speech reference to the following:\n\nText:\n",
    Part.TEXT,
    "\n\nSpeech:\n",
    Part.CODES,
    Part.IM_END,
    "\n",
)
USER_HEAD: Layout = (Part.IM_START, "user\n")
USER_BODY: Layout = (Part.TEXT, Part.IM_END, "\n")
ASSISTANT_HEAD: Layout = (Part.IM_START, "assistant\n", Part.VOICE)
ASSISTANT_BODY: Layout = (Part.CODES, Part.IM_END, "\n")


class PromptBuilder:
    """Writes prompts for one model."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._special = {Part.IM_START: model.im_start_id, Part.IM_END: model.im_end_id, Part.VOICE: model.voice_id}
        self._no_codes = (0,) * model.num_codebooks

    def prompt(
        self, text: str, voice: Voice | None = None, previous: Sequence[tuple[str, Codes]] = ()
    ) -> tuple[Column, ...]:
        """The prompt after which the model speaks `text`.

        previous: earlier parts of the same speech, each a text and its codes, oldest first; they stand as turns of
        the conversation, so that the voice goes on as it was.   Raises ValueError on codes that the model cannot read.
        """
        turns = [*self.prefix(voice)]
        for said, codes in previous:
            turns += self._columns((*USER_BODY, *ASSISTANT_HEAD, *ASSISTANT_BODY, *USER_HEAD), said, codes)
        return (*turns, *self._columns((*USER_BODY, *ASSISTANT_HEAD), text))

    def prefix(self, voice: Voice | None) -> tuple[Column, ...]:
        """What every prompt of `voice` begins with, up to the first text to speak."""
        if voice is None or not voice.references:
            return tuple(self._columns((*SYSTEM, *USER_HEAD)))
        texts = [r.text if SPEAKER_TAG.search(r.text) else f"<|speaker:{r.speaker}|>{r.text}" for r in voice.references]
        codes = tuple(frame for reference in voice.references for frame in reference.codes)
        return tuple(self._columns((*SYSTEM_WITH_REFERENCES, *USER_HEAD), "\n".join(texts), codes))

    def _columns(self, layout: Layout, text: str = "", codes: Codes = ()) -> Iterator[Column]:
        for part in layout:
            if part is Part.CODES:
                yield from self._speech(codes)
                continue
            if part is Part.TEXT:
                ids = self._tokenizer.encode(text)
            elif isinstance(part, Part):
                ids = [self._special[part]]
            else:
                ids = self._tokenizer.encode(part)
            for token_id in ids:
                yield (token_id, *self._no_codes)

    def _speech(self, codes: Codes) -> Iterator[Column]:
        width, num_semantic = self._model.num_codebooks, self._model.num_semantic
        for frame in codes:
            if len(frame) != width or not all(0 <= code < num_semantic for code in frame):
                raise ValueError(f"a frame must be {width} codes in 0 .. {num_semantic - 1}, got {frame}")
            yield (self._model.semantic_begin_id + frame[0], *frame)


def frame_budget(text: str, num_tokens: int, max_new_tokens: int | None, model: ModelConfig) -> FrameBudget:
    """How many frames `text` (of `num_tokens` ids) should and may take.  A speaker tag is not spoken.

    max_new_tokens: the caller's own limit in frames, if any.
    """
    num_bytes = len(SPEAKER_TAG.sub("", text).encode())
    expected = max(model.min_expected_frames, math.ceil(model.frames_per_byte * num_bytes))
    limit = min(
        max(_MIN_BUDGET_FRAMES, _FRAMES_PER_TOKEN * num_tokens),
        max(_MIN_BUDGET_FRAMES, math.ceil(model.length_margin * expected)),
    )
    if model.stop_at_expected_length:
        limit = min(limit, expected)
    if max_new_tokens is not None:
        limit = min(limit, max_new_tokens)
    return FrameBudget(expected_frames=min(expected, limit), max_frames=limit)
