"""From a text to the columns that the slow transformer reads, and to how long its speech may get.

Owns the prompt layout (as data), the embedded byte-level tokenizer and the frame budget.  Does not
own special ids (config) or voices.  Called by the engine when a request comes in.
"""

import math
from collections.abc import Callable
from enum import Enum

from slackwater_inference.config import ModelConfig
from slackwater_inference.core import Column, FrameBudget

# mlx-audio's guard against runaway, engine-api.md 1.8.
_MIN_BUDGET_FRAMES = 32
_FRAMES_PER_TOKEN = 12


class Part(Enum):
    """The parts of a layout that are not literal text."""

    IM_START = "im_start"
    IM_END = "im_end"
    VOICE = "voice"
    TEXT = "text"  # the caller's


# A literal is tokenised on its own: joining strings first would change a BPE tokenizer's merges.
Layout = tuple[Part | str, ...]
WITHOUT_REFERENCE: Layout = (
    Part.IM_START,
    "system\n",
    "convert the provided text to speech",
    Part.IM_END,
    "\n",
    Part.IM_START,
    "user\n",
    Part.TEXT,
    Part.IM_END,
    "\n",
    Part.IM_START,
    "assistant\n",
    Part.VOICE,
)

Encode = Callable[[str], list[int]]


def encode_bytes(text: str) -> list[int]:
    """Ids of a text in the embedded vocabulary: its UTF-8 bytes.

    No text makes a special id, whatever it spells, since those are all above 255.
    """
    return list(text.encode())


def prompt_columns(
    text: str, model: ModelConfig, encode: Encode, layout: Layout = WITHOUT_REFERENCE
) -> tuple[Column, ...]:
    """The prompt for `text`, one column a position: (id, 0, ..., 0)."""
    special = {Part.IM_START: model.im_start_id, Part.IM_END: model.im_end_id, Part.VOICE: model.voice_id}
    no_codes = (0,) * model.num_codebooks
    ids: list[int] = []
    for part in layout:
        if part is Part.TEXT:
            ids += encode(text)
        elif isinstance(part, Part):
            ids.append(special[part])
        else:
            ids += encode(part)
    return tuple((token_id, *no_codes) for token_id in ids)


def frame_budget(text: str, num_tokens: int, max_new_tokens: int | None, model: ModelConfig) -> FrameBudget:
    """How many frames `text` (of `num_tokens` ids) should and may take.

    max_new_tokens: the caller's own limit in frames, if any.
    """
    expected = max(model.min_expected_frames, math.ceil(model.frames_per_byte * len(text.encode())))
    limit = min(
        max(_MIN_BUDGET_FRAMES, _FRAMES_PER_TOKEN * num_tokens),
        max(_MIN_BUDGET_FRAMES, math.ceil(model.length_margin * expected)),
    )
    if model.stop_at_expected_length:
        limit = min(limit, expected)
    if max_new_tokens is not None:
        limit = min(limit, max_new_tokens)
    return FrameBudget(expected_frames=min(expected, limit), max_frames=limit)
