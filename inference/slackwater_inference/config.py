"""Settings of the model and of the engine, checked once at the edge.

Owns names, defaults and the presets.  Dimension names are those of Fish's S2 `config.json`
(`text_config`, `audio_decoder_config`), so that its checkpoints can be read later.  Owns no tensor.
"""

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Field(gt=0)


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TransformerConfig(_Settings):
    """One of the two transformers.  `n_local_heads` are the key/value heads."""

    vocab_size: int = Positive
    n_layer: int = Positive
    dim: int = Positive
    n_head: int = Positive
    n_local_heads: int = Positive
    head_dim: int = Field(gt=0, multiple_of=2)
    intermediate_size: int = Positive
    max_seq_len: int = Positive
    attention_qk_norm: bool  # no default: S2 has it in the slow part only, and a wrong guess still makes sound
    rope_base: float = 1_000_000.0
    norm_eps: float = 1e-6

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> Self:
        if self.n_head % self.n_local_heads:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_local_heads {self.n_local_heads}")
        return self


class CodecConfig(_Settings):
    """The decoder half of a causal codec: quantiser look-up, then one transposed convolution a rate."""

    sample_rate_hz: int = 44_100
    residual_codebook_size: int = Positive  # entries that exist; fast logits above it are masked
    codebook_dim: int = 8
    latent_dim: int = Positive
    rates: tuple[int, ...] = Field(min_length=2)  # upsampling factors; their product is the samples of a frame
    channels: tuple[int, ...] = Field(min_length=2)  # after conv_in, then after each rate
    dilations: tuple[int, ...] = (1, 3)  # of the residual units behind each rate

    @property
    def frame_samples(self) -> int:
        """Samples of one frame."""
        return math.prod(self.rates)

    @property
    def frame_rate_hz(self) -> float:
        """Frames of one second of audio."""
        return self.sample_rate_hz / self.frame_samples

    @model_validator(mode="after")
    def _one_channel_count_a_level(self) -> Self:
        if len(self.channels) != len(self.rates) + 1:
            raise ValueError(f"channels must have {len(self.rates) + 1} entries for {len(self.rates)} rates")
        return self


class ModelConfig(_Settings):
    """A whole DualAR voice: slow and fast transformer, codec, special ids."""

    name: str
    """What metrics call this voice; one of a few, never a path."""
    text_config: TransformerConfig
    audio_decoder_config: TransformerConfig
    codec: CodecConfig
    num_codebooks: int = Field(ge=2)  # 1 semantic + the residual ones
    im_start_id: int = Field(ge=0)
    im_end_id: int = Field(ge=0)
    voice_id: int = Field(ge=0)  # <|voice|>, opens the assistant's turn
    semantic_begin_id: int = Field(ge=0)  # id of semantic code 0; the others follow
    weight_dtype: Literal["float32", "bfloat16"] = "float32"

    frames_per_byte: float = 0.93
    """Frames of speech for a UTF-8 byte of text; the default is that of English at 21.5 frames/s."""
    min_expected_frames: int = 8
    """A single word takes longer than its letters say; 8 frames are 0.4 s."""
    length_margin: float = Field(default=2.0, ge=1.0)
    """A text may take this times its expected length before the engine ends it as a runaway."""
    stop_at_expected_length: bool = False
    """End every request at its expected length.  For seeded weights, which cannot know when to stop."""

    @property
    def num_semantic(self) -> int:
        """Entries of the semantic codebook."""
        return self.audio_decoder_config.vocab_size

    @property
    def column_width(self) -> int:
        """Rows of one input column: the id and one code a codebook (the window's cw)."""
        return self.num_codebooks + 1

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        slow, fast = self.text_config, self.audio_decoder_config
        if slow.dim != fast.dim:
            raise ValueError(f"dim of both transformers must be equal (no project_in), got {slow.dim} and {fast.dim}")
        if fast.max_seq_len < self.num_codebooks:
            raise ValueError(f"fast max_seq_len {fast.max_seq_len} must hold {self.num_codebooks} codebooks")
        if self.semantic_begin_id + self.num_semantic > slow.vocab_size:
            end = self.semantic_begin_id + self.num_semantic
            raise ValueError(f"semantic ids end at {end}, past the vocabulary of {slow.vocab_size}")
        if self.codec.residual_codebook_size > fast.vocab_size:
            raise ValueError("residual_codebook_size is larger than the fast vocabulary")
        return self


class EngineConfig(_Settings):
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


def tiny() -> ModelConfig:
    """The smallest voice that exercises every rule; its weights are seeded, so it hums."""
    return ModelConfig(
        name="tiny",
        text_config=TransformerConfig(
            vocab_size=776,
            n_layer=2,
            dim=128,
            n_head=4,
            n_local_heads=2,
            head_dim=32,
            intermediate_size=256,
            max_seq_len=4096,
            attention_qk_norm=True,
        ),
        audio_decoder_config=TransformerConfig(
            vocab_size=512,
            n_layer=1,
            dim=128,
            n_head=4,
            n_local_heads=2,
            head_dim=32,
            intermediate_size=256,
            max_seq_len=5,
            attention_qk_norm=False,
        ),
        codec=CodecConfig(
            residual_codebook_size=128, latent_dim=32, rates=(8, 8, 8, 4), channels=(32, 32, 16, 4, 2), dilations=(1,)
        ),
        num_codebooks=4,
        im_start_id=256,
        im_end_id=257,
        voice_id=258,
        semantic_begin_id=264,
        stop_at_expected_length=True,
    )
