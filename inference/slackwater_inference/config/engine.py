"""How one engine process serves: slots, queue, memory, chunk sizes."""

import math

from pydantic import Field

from slackwater_inference.config.model import ModelConfig
from slackwater_inference.config.settings import Settings


class EngineConfig(Settings):
    """How one engine process serves."""

    max_running_requests: int = Field(default=8, ge=1, le=256)
    """Decode slots.  A step serves all of them at little more than the cost of one, but a larger one takes longer."""
    max_queued: int = Field(default=16, ge=0)
    """Requests that may wait for a slot; more are refused at once, since a long queue only adds latency."""
    block_size: int = Field(default=16, ge=1)
    """Positions of one KV block."""
    num_kv_blocks: int | None = Field(default=None, ge=1)
    """None: every slot can hold a sequence of the model's full length, so that a free slot is never without
    pages: the gateway counts slots and would queue behind them.  4 MiB a slot for the tiny model."""
    max_prefill_tokens: int = Field(default=256, ge=1)
    """Prompt positions computed between two frames, so that a long prompt starves no running stream."""
    seed: int = Field(default=0, ge=0)
    """Of the seeded weights: another seed is another hum."""
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
    """UTF-8 bytes of a request's text; with its audio this must fit into the model's max_seq_len."""

    def kv_blocks(self, model: ModelConfig) -> int:
        """KV blocks to allocate for `model`."""
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        return self.max_running_requests * math.ceil(model.text_config.max_seq_len / self.block_size)
