"""Dimensions of the codec, Fish's modified DAC; the defaults are those of the codec that S2-Pro ships.

Owns names and checks, no tensor.  Called wherever a codec is built, planned or checked.
"""

import math
from typing import Self

from pydantic import Field, model_validator

from slackwater_inference.config.settings import Positive, Settings


class CodecTransformerConfig(Settings):
    """A causal transformer that looks back `window_size` positions, its own one included.

    Its width is that of its place in the codec.  Keys and values have as many heads as queries.
    """

    n_layer: int = Positive
    n_head: int = Positive
    head_dim: int = Field(default=64, gt=0, multiple_of=2)
    intermediate_size: int = Positive
    window_size: int = Field(ge=2)
    rope_base: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)


_MODULE = CodecTransformerConfig(n_layer=8, n_head=16, intermediate_size=3072, window_size=128)
_ENCODER_TOP = CodecTransformerConfig(n_layer=4, n_head=16, intermediate_size=3072, window_size=512)


class CodecConfig(Settings):
    """Encoder, down-sampling quantiser and decoder of one causal codec."""

    sample_rate_hz: int = Field(default=44_100, gt=0)
    latent_dim: int = Field(default=1024, gt=0)
    """Channels between encoder, quantiser and decoder."""
    encoder_dim: int = Field(default=64, gt=0)
    """Channels behind the encoder's first convolution; they double at each rate."""
    encoder_rates: tuple[int, ...] = Field(default=(2, 4, 8, 8), min_length=1)
    encoder_transformers: tuple[CodecTransformerConfig | None, ...] = (None, None, None, _ENCODER_TOP)
    """What follows each rate of the encoder."""
    downsample_factors: tuple[int, ...] = (2, 2)
    """By what the quantiser goes below the encoder's rate, and the decode side up again."""
    pre_module: CodecTransformerConfig = _MODULE
    """In front of the codebooks; only encoding needs it."""
    post_module: CodecTransformerConfig = _MODULE
    """Behind the codebooks; only decoding needs it."""
    codebook_dim: int = Field(default=8, gt=0)
    """Dimensions that codes are looked up in."""
    residual_codebook_size: int = Field(default=1024, gt=0)
    """Entries that exist; fast logits above it are masked."""
    decoder_dim: int = Field(default=1536, gt=0)
    """Channels behind the decoder's first convolution; they halve at each rate."""
    decoder_rates: tuple[int, ...] = Field(default=(8, 8, 4, 2), min_length=1)
    dilations: tuple[int, ...] = Field(default=(1, 3, 9), min_length=1)
    """One residual unit each, at every rate of encoder and decoder."""

    @property
    def frame_samples(self) -> int:
        """Samples of one frame."""
        return math.prod(self.decoder_rates) * math.prod(self.downsample_factors)

    @property
    def frame_rate_hz(self) -> float:
        """Frames of one second of audio."""
        return self.sample_rate_hz / self.frame_samples

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        """Channels behind the encoder's first convolution and behind each rate."""
        return tuple(self.encoder_dim * 2**i for i in range(len(self.encoder_rates) + 1))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        """Channels behind the decoder's first convolution and behind each rate."""
        return tuple(self.decoder_dim // 2**i for i in range(len(self.decoder_rates) + 1))

    def codebook_sizes(self, num_codebooks: int, num_semantic: int) -> tuple[int, ...]:
        """Entries of each codebook, the semantic one first."""
        return (num_semantic, *[self.residual_codebook_size] * (num_codebooks - 1))

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if math.prod(self.encoder_rates) != math.prod(self.decoder_rates):
            raise ValueError(
                f"encoder_rates {self.encoder_rates} and decoder_rates {self.decoder_rates} must have equal products"
            )
        if len(self.encoder_transformers) != len(self.encoder_rates):
            raise ValueError(
                f"encoder_transformers must have {len(self.encoder_rates)} entries, one a rate (null for none), "
                f"got {len(self.encoder_transformers)}"
            )
        if self.decoder_dim % 2 ** len(self.decoder_rates):
            raise ValueError(
                f"decoder_dim {self.decoder_dim} must halve evenly {len(self.decoder_rates)} times, once a rate"
            )
        if min(*self.encoder_rates, *self.decoder_rates, *self.downsample_factors, *self.dilations) < 1:
            raise ValueError("rates, downsample_factors and dilations must be 1 or more")
        return self
