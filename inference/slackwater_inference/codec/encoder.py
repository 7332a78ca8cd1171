"""The codec's encode side: sound to codes.

Owns the order of the layers.  All of them are causal, so a long recording is encoded in pieces of bounded
memory, with the codes of encoding it at once.  Called by `codec`.
"""

from dataclasses import dataclass

from torch import Tensor

from slackwater_inference.codec.layers import Conv, Past, ResidualUnit, Snake
from slackwater_inference.codec.quantizer import Quantizer
from slackwater_inference.codec.transformer import WindowTransformer
from slackwater_inference.codec.weights import Weights
from slackwater_inference.config import CodecConfig


@dataclass(frozen=True, slots=True)
class _Level:
    units: tuple[ResidualUnit, ...]
    snake: Snake
    downsample: Conv
    transformer: WindowTransformer | None


@dataclass(frozen=True, slots=True)
class Encoder:
    """First convolution, one level a rate, last convolution, quantiser."""

    conv_in: Conv
    levels: tuple[_Level, ...]
    snake_out: Snake
    conv_out: Conv
    quantizer: Quantizer

    @classmethod
    def of(cls, weights: Weights, config: CodecConfig, num_codebooks: int) -> "Encoder":
        """Bakes what encoding needs."""
        num_units = len(config.dilations)

        def level(index: int, rate: int) -> _Level:
            block = f"encoder.block.{index + 1}.block."
            transformer = config.encoder_transformers[index]
            return _Level(
                tuple(ResidualUnit.of(weights, f"{block}{i}", dilation) for i, dilation in enumerate(config.dilations)),
                Snake.of(weights, f"{block}{num_units}"),
                Conv.of(weights, f"{block}{num_units + 1}.conv", stride=rate),
                None if transformer is None else WindowTransformer.of(weights, f"{block}{num_units + 2}.", transformer),
            )

        last = len(config.encoder_rates) + 1
        return cls(
            Conv.of(weights, "encoder.block.0.conv"),
            tuple(level(i, rate) for i, rate in enumerate(config.encoder_rates)),
            Snake.of(weights, f"encoder.block.{last}"),
            Conv.of(weights, f"encoder.block.{last + 1}.conv"),
            Quantizer.of(weights, config, num_codebooks),
        )

    def __call__(self, samples: Tensor, past: Past) -> Tensor:
        """int64 codes [num_codebooks, n] for fp32 samples [n * frame_samples]."""
        x = self.conv_in(samples[None, None], past)
        for level in self.levels:
            for unit in level.units:
                x = unit(x, past)
            x = level.downsample(level.snake(x), past)
            if level.transformer is not None:
                x = level.transformer(x, past)
        return self.quantizer(self.conv_out(self.snake_out(x), past), past)
