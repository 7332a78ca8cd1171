"""Fish's `config.json` of an S2 voice, as it lies in a checkpoint folder.

Owns which of its keys we read, which values we refuse, and what a missing one means.  Keys that change nothing at
inference (dropout, checkpointing, initialisers) are not read.  Called by `folder`.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slackwater_inference.config.model import TransformerConfig

_Dim = Annotated[int, Field(gt=0)]
_Length = Annotated[int, Field(gt=0, le=2**20)]  # tables of all positions are made; a slip of the pen would fill memory
_Id = Annotated[int, Field(ge=0)]
_No = Literal[False, None]
_FIELDS = set(TransformerConfig.model_fields)


class _Published(BaseModel):
    # The file is not ours: a key that we do not know is the writer's business.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class _Transformer(_Published):
    """What neither transformer may have: the published voices have none of it, so no test covers it."""

    vocab_size: _Dim
    n_layer: Annotated[int, Field(gt=0, le=1024)]
    attention_qkv_bias: _No = None
    attention_o_bias: _No = None
    use_moe: _No = None


class _Text(_Transformer):
    """The slow part.  Every dimension must be there: a default that is wrong would still make sound."""

    dim: _Dim
    n_head: _Dim
    n_local_heads: _Dim
    head_dim: _Dim
    intermediate_size: _Dim
    max_seq_len: _Length
    attention_qk_norm: bool
    rope_base: float
    norm_eps: float
    tie_word_embeddings: Literal[True] = True  # the head is the embedding table


class _AudioDecoder(_Transformer):
    """The fast part.  None, or a missing key, takes the slow part's value, as in the published loader.

    But `attention_qk_norm` must be there: S2 has it in the slow part only, so a missing key would silently become
    true.  A null there is a statement, and is taken as the published loader takes it.
    """

    num_codebooks: Annotated[int, Field(ge=2)]
    dim: _Dim | None = None
    n_head: _Dim | None = None
    n_local_heads: _Dim | None = None
    head_dim: _Dim | None = None
    intermediate_size: _Dim | None = None
    attention_qk_norm: bool | None
    rope_base: float | None = None
    norm_eps: float | None = None
    max_seq_len: _Length | None = None  # None: num_codebooks + 1
    text_dim: _Dim | None = None  # width of the slow hidden state; None: text_config.dim
    tie_word_embeddings: _No = None  # it has a head of its own


VERSION = 1


class WeightFormat(StrEnum):
    """How the layers' projections are stored where it is not as the other weights: the names of the kernels' forms."""

    BLOCKSCALE = "fp8_e4m3_128x128"  # E4M3 with an fp32 scale per 128 x 128
    MXFP8 = "mxfp8_e4m3_1x32"  # E4M3 with an E8M0 byte per 32 values of a row


class Quantization(_Published):
    """`quantization_config` as `slackwater engine quantize` writes it; a form that is not exactly known is refused."""

    format: Annotated[WeightFormat, Field(strict=False)]
    version: Literal[1]
    rule: Literal["rceil", "ocp_floor"] | None = None  # how MXFP8's exponents were chosen

    @model_validator(mode="after")
    def _only_mxfp8_has_a_rule(self) -> Self:
        if (self.rule is None) is (self.format is WeightFormat.MXFP8):
            raise ValueError(f"rule must be {'there' if self.rule is None else 'left out'} with format {self.format}")
        return self


class PublishedConfig(_Published):
    """The whole file.  The ids are claims, to be held against the tokenizer's."""

    model_type: Literal["fish_qwen3_omni"]
    text_config: _Text
    audio_decoder_config: _AudioDecoder
    eos_token_id: _Id | None = None
    pad_token_id: _Id | None = None
    audio_pad_token_id: _Id | None = None
    semantic_start_token_id: _Id | None = None
    semantic_end_token_id: _Id | None = None
    quantization_config: Quantization | None = None

    def slow(self) -> TransformerConfig:
        """The slow part's dimensions."""
        return TransformerConfig.model_validate(self.text_config.model_dump(include=_FIELDS))

    def fast(self) -> TransformerConfig:
        """The fast part's dimensions, with the slow part's where it has none of its own."""
        own = self.audio_decoder_config.model_dump(include=_FIELDS, exclude_none=True)
        fallback = self.text_config.model_dump(include=_FIELDS)
        fallback["max_seq_len"] = self.audio_decoder_config.num_codebooks + 1
        return TransformerConfig.model_validate(fallback | own)
