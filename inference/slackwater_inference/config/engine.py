"""How one engine process serves: slots, queue, memory, chunk sizes."""

import math
from typing import Self

from pydantic import Field, model_validator

from slackwater_inference.config.model import ModelConfig
from slackwater_inference.config.settings import Settings

_LOOP_FRAMES = 43  # 2 s
_MIN_LOOP_FRAMES = 16  # the longest pattern that the guard knows, twice
_MAX_LENGTH = 4096


class EngineConfig(Settings):
    """How one engine process serves."""

    max_running_requests: int = Field(default=8, ge=1, le=256)
    """Decode slots.  A step serves all of them at little more than the cost of one, but a larger one takes longer."""
    max_queued: int = Field(default=16, ge=0)
    """Requests that may wait for a slot; more are refused at once, since a long queue only adds latency."""
    block_size: int = Field(default=16, ge=1)
    """Positions of one KV block."""
    max_length: int | None = Field(default=None, ge=64)
    """Positions of the longest sequence: prompt and audio.  None: 4,096, or the model's own if that is shorter; a
    reference of 30 s and a part of 300 bytes take some 1,500."""
    num_kv_blocks: int | None = Field(default=None, ge=1)
    """None: every slot can hold the longest sequence, so that a free slot is never without pages: the gateway
    counts slots and would queue behind them.  4 MiB a slot for the tiny model, 576 MiB for S2-Pro in bf16."""
    max_prefill_tokens: int = Field(default=128, ge=1)
    """Prompt positions computed between two frames, so that a long prompt starves no running stream."""
    prefill_piece: int = Field(default=64, ge=1)
    """Prompt positions computed at one go, and the unit of the prefix cache.  A smaller one spares more of a prompt
    that is like an earlier one and makes a new prompt slower; 64 are 3 s of a reference."""
    max_held_ratio: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the KV blocks that open websockets may hold for their voices; the prompts of more voices stay only
    as long as nobody wants their blocks."""
    loop_frames: int | None = Field(default=None, ge=0)
    """A part that repeats one pattern of frames exactly for so long is ended; 0 = never.  None: 43, two seconds,
    and never for a voice that is ended at its expected length, whose seeded weights may well repeat themselves."""
    pace_frames_per_s: float = Field(default=0.0, ge=0.0)
    """A stream's highest frame rate after its burst; 0 is unpaced.  See README, Pacing."""
    burst_frames: int = Field(default=10, ge=1)
    """Frames of a paced stream that come at full speed, so that first audio is not delayed."""
    min_chunk_frames: int = Field(default=4, ge=1)
    """Frames before the first audio, and of any chunk but the last: 186 ms of sound at 21.5 frames/s."""
    max_chunk_frames: int = Field(default=16, ge=1)
    """Frames of a chunk while the listener has enough; larger ones save little and cost smoothness."""
    low_buffer_frames: int = Field(default=8, ge=0)
    """A listener with fewer frames left than this gets a chunk at once: twice the smallest one."""
    max_vocoder_frames: int = Field(default=64, ge=1)
    """Streams x frames of one codec batch: bounds its memory."""
    max_text_bytes: int = Field(default=2000, ge=1)
    """UTF-8 bytes of one part of a text; with its audio it must fit into the longest sequence."""
    max_unread_frames: int = Field(default=256, ge=0)
    """A stream whose caller has more frames to read begins no further part: bounds the memory that a slow reader
    takes to this and one part, 8 KiB a frame."""

    @model_validator(mode="after")
    def _a_loop_is_seen_twice(self) -> Self:
        if self.loop_frames is not None and 0 < self.loop_frames < _MIN_LOOP_FRAMES:
            raise ValueError(f"loop_frames must be 0 or at least {_MIN_LOOP_FRAMES}, got {self.loop_frames}")
        return self

    @model_validator(mode="after")
    def _pieces_are_whole_blocks(self) -> Self:
        if self.prefill_piece % self.block_size or self.prefill_piece > self.max_prefill_tokens:
            raise ValueError(
                f"prefill_piece must be a multiple of block_size {self.block_size} and at most max_prefill_tokens "
                f"{self.max_prefill_tokens}, got {self.prefill_piece}"
            )
        return self

    def longest(self, model: ModelConfig) -> int:
        """Positions of the longest sequence of `model`."""
        longest = min(self.max_length or _MAX_LENGTH, model.text_config.max_seq_len)
        return longest if self.num_kv_blocks is None else min(longest, self.num_kv_blocks * self.block_size)

    def kv_blocks(self, model: ModelConfig) -> int:
        """KV blocks to allocate for `model`."""
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        return self.max_running_requests * math.ceil(self.longest(model) / self.block_size)

    def held_blocks(self, model: ModelConfig) -> int:
        """KV blocks that may be held for open websockets: the longest sequence fits beside them."""
        num_blocks = self.kv_blocks(model)
        longest = math.ceil(self.longest(model) / self.block_size)
        return max(0, min(math.floor(num_blocks * self.max_held_ratio), num_blocks - longest))

    def loop_limit(self, model: ModelConfig) -> int:
        """Frames of exact repetition that end a part of `model`; 0 = never."""
        if self.loop_frames is not None:
            return self.loop_frames
        return 0 if model.stop_at_expected_length else _LOOP_FRAMES
