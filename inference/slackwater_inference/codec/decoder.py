"""The codec's decode side: codes to sound, a few frames at a time.

Owns the order of the layers.  All of them are causal, so nothing is held back and a stream's end needs no
flushing beyond its last frames.  Called by `codec`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slackwater_inference.codec.layers import Conv, Past, ResidualUnit, Snake, TransposedConv
from slackwater_inference.codec.quantizer import Dequantizer
from slackwater_inference.codec.weights import Weights
from slackwater_inference.config import CodecConfig


@dataclass(frozen=True, slots=True)
class _Level:
    snake: Snake
    upsample: TransposedConv
    units: tuple[ResidualUnit, ...]


@dataclass(frozen=True, slots=True)
class Decoder:
    """De-quantiser, first convolution, one level a rate, last convolution."""

    dequantizer: Dequantizer
    conv_in: Conv
    levels: tuple[_Level, ...]
    snake_out: Snake
    conv_out: Conv

    @classmethod
    def of(cls, weights: Weights, config: CodecConfig, num_codebooks: int) -> "Decoder":
        """Bakes what decoding needs; touches no tensor of the encode side."""

        def level(index: int, rate: int) -> _Level:
            block = f"decoder.model.{index + 1}.block."
            return _Level(
                Snake.of(weights, f"{block}0"),
                TransposedConv.of(weights, f"{block}1.conv", stride=rate),
                tuple(
                    ResidualUnit.of(weights, f"{block}{i + 2}", dilation) for i, dilation in enumerate(config.dilations)
                ),
            )

        last = len(config.decoder_rates) + 1
        return cls(
            Dequantizer.of(weights, config, num_codebooks),
            Conv.of(weights, "decoder.model.0.conv"),
            tuple(level(i, rate) for i, rate in enumerate(config.decoder_rates)),
            Snake.of(weights, f"decoder.model.{last}"),
            Conv.of(weights, f"decoder.model.{last + 1}.conv"),
        )

    def __call__(self, codes: Tensor, past: Past) -> Tensor:
        """Samples in [-1, 1], fp32 [b, n * frame_samples], for int64 codes [b, num_codebooks, n]."""
        x = self.conv_in(self.dequantizer(codes, past), past)
        for level in self.levels:
            x = level.upsample(level.snake(x), past)
            for unit in level.units:
                x = unit(x, past)
        return torch.tanh(self.conv_out(self.snake_out(x), past)).squeeze(1)
