"""Dimensions of the codec.  Owns names and checks, no tensor."""

import math
from typing import Self

from pydantic import Field, model_validator

from slackwater_inference.config.settings import Positive, Settings


class CodecConfig(Settings):
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
