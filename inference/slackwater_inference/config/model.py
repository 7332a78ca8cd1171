"""Dimensions of a DualAR voice; names are those of Fish's S2 `config.json` (`text_config`, `audio_decoder_config`).

Owns names, defaults and checks, no tensor.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from slackwater_inference.config.codec import CodecConfig
from slackwater_inference.config.settings import Positive, Settings


class TransformerConfig(Settings):
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
    rope_base: float = Field(default=1_000_000.0, gt=0, allow_inf_nan=False)
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> Self:
        if self.n_head % self.n_local_heads:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_local_heads {self.n_local_heads}")
        return self


class ModelConfig(Settings):
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

    @property
    def has_project_in(self) -> bool:
        """True if the slow hidden state must be brought to the fast part's width."""
        return self.text_config.dim != self.audio_decoder_config.dim

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        slow, fast = self.text_config, self.audio_decoder_config
        if fast.max_seq_len < self.num_codebooks:
            raise ValueError(f"fast max_seq_len {fast.max_seq_len} must hold {self.num_codebooks} codebooks")
        if self.semantic_begin_id + self.num_semantic > slow.vocab_size:
            end = self.semantic_begin_id + self.num_semantic
            raise ValueError(f"semantic ids end at {end}, past the vocabulary of {slow.vocab_size}")
        for name in ("im_start_id", "im_end_id", "voice_id"):
            special_id = getattr(self, name)
            if special_id >= slow.vocab_size or 0 <= special_id - self.semantic_begin_id < self.num_semantic:
                raise ValueError(f"{name} {special_id} must be in the vocabulary and no semantic id")
        if self.codec.residual_codebook_size > fast.vocab_size:
            raise ValueError("residual_codebook_size is larger than the fast vocabulary")
        return self
