"""What encoder, quantiser and decoder are made of: causal convolutions, Snake, residual units, ConvNeXt.

Owns their arithmetic, and `Past`: what a stream carries from one chunk to the next, so that any split of it
gives what one pass over the whole would.  All tensors are fp32, [b, channels, time] unless said otherwise.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.codec.weights import Weights, bake


class Past:
    """What a batch of streams carries, read and renewed in the order of one forward pass.

    values: [b, size], each stream's numbers behind each other, not mutated; None before all streams' first chunk.
    Nothing is carried then but zeros, which is the zero padding of the published network.
    """

    def __init__(self, values: Tensor | None) -> None:
        self._values = values
        self._offset = 0
        self._kept: list[Tensor] = []

    def join(self, x: Tensor, reach: int) -> Tensor:
        """x [b, c, time, ...] behind the last `reach` entries of the chunk before; keeps the last ones for the next."""
        if reach == 0:
            return x
        before = self._take(x, (x.shape[1], reach, *x.shape[3:]))
        joined = torch.cat((before, x), 2)
        self._kept.append(joined[:, :, joined.shape[2] - reach :].flatten(1))
        return joined

    def advance(self, x: Tensor) -> Tensor:
        """[b, time]: the positions of x [b, c, time], which continue those of the chunk before.

        Whole numbers in fp32, exact for the first 2**24: nine days of sound.
        """
        before = self._take(x, (1,))
        self._kept.append(before + x.shape[2])
        return before + torch.arange(x.shape[2], device=x.device)

    def renewed(self) -> Tensor:
        """[b, size]: what to carry on with, after the pass."""
        if self._values is not None:
            assert self._offset == self._values.shape[1], "the state and the network must have one layout"
        return torch.cat(self._kept, 1)

    def _take(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._values is None:
            return like.new_zeros(like.shape[0], *shape)
        start, self._offset = self._offset, self._offset + math.prod(shape)
        return self._values[:, start : self._offset].view(-1, *shape)


@dataclass(frozen=True, slots=True)
class Conv:
    """A causal convolution; a chunk must be a multiple of `stride` long.  weight: [out, in / groups, k]."""

    weight: Tensor
    bias: Tensor
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @classmethod
    def of(cls, weights: Weights, name: str, *, stride: int = 1, dilation: int = 1, groups: int = 1) -> "Conv":
        """The convolution under `name`, weight-norm baked."""
        return cls(bake(weights, name), weights[f"{name}.bias"].float(), stride, dilation, groups)

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """[b, out, time / stride]."""
        reach = (self.weight.shape[2] - 1) * self.dilation + 1 - self.stride
        x = past.join(x, reach)
        return F.conv1d(x, self.weight, self.bias, self.stride, dilation=self.dilation, groups=self.groups)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A convolution of one tap.  A matrix product, which on a CPU takes a fiftieth of its time.  weight: [out, in]."""

    weight: Tensor
    bias: Tensor  # [out, 1]

    @classmethod
    def of(cls, weights: Weights, name: str) -> "Pointwise":
        """The convolution under `name`, weight-norm baked."""
        return cls(bake(weights, name).squeeze(2), weights[f"{name}.bias"].float()[:, None])

    def __call__(self, x: Tensor) -> Tensor:
        """[b, out, time]."""
        return torch.matmul(self.weight, x).add_(self.bias)


@dataclass(frozen=True, slots=True)
class TransposedConv:
    """A causal transposed convolution with a kernel of one or two strides.

    Computed as a convolution that makes all `stride` samples of an input at once, which is several times as fast.
    weight: [out * stride, in, k / stride], taps from the oldest input to the newest.
    """

    weight: Tensor
    bias: Tensor
    stride: int

    @classmethod
    def of(cls, weights: Weights, name: str, *, stride: int) -> "TransposedConv":
        """The convolution under `name`, weight-norm baked; its weight there is [in, out, k]."""
        weight = bake(weights, name)
        channels_in, channels_out, kernel = weight.shape
        taps = weight.view(channels_in, channels_out, kernel // stride, stride).flip(2)  # [in, out, tap, phase]
        phases = taps.permute(1, 3, 0, 2).reshape(channels_out * stride, channels_in, -1).contiguous()
        return cls(phases, weights[f"{name}.bias"].float().repeat_interleave(stride), stride)

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """[b, out, time * stride]; the published network cuts off at the right what the next input would add to."""
        # An input of a two-stride kernel reaches into the next one's samples, so the last one comes along.
        out = F.conv1d(past.join(x, self.weight.shape[2] - 1), self.weight, self.bias)  # [b, out * stride, time]
        return out.view(len(x), -1, self.stride, x.shape[2]).transpose(2, 3).flatten(2)


@dataclass(frozen=True, slots=True)
class Snake:
    """x + sin(alpha x)^2 / alpha.  alpha: [1, channels, 1]."""

    alpha: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, weights: Weights, name: str) -> "Snake":
        """The activation under `name`."""
        alpha = weights[f"{name}.alpha"].float()
        return cls(alpha, (alpha + 1e-9).reciprocal())

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape; x is not mutated."""
        wave = (x * self.alpha).sin_()
        return torch.addcmul(x, wave * self.inverse, wave, out=wave)


@dataclass(frozen=True, slots=True)
class ResidualUnit:
    """Snake, wide convolution, Snake, pointwise convolution, added to the input."""

    snake_in: Snake
    wide: Conv
    snake_mid: Snake
    narrow: Pointwise

    @classmethod
    def of(cls, weights: Weights, name: str, dilation: int) -> "ResidualUnit":
        """The unit under `name`."""
        return cls(
            Snake.of(weights, f"{name}.block.0"),
            Conv.of(weights, f"{name}.block.1.conv", dilation=dilation),
            Snake.of(weights, f"{name}.block.2"),
            Pointwise.of(weights, f"{name}.block.3.conv"),
        )

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """Same shape."""
        return self.narrow(self.snake_mid(self.wide(self.snake_in(x), past))).add_(x)


@dataclass(frozen=True, slots=True)
class ConvNeXt:
    """Depthwise convolution, LayerNorm, two linear layers with GELU between, scaled and added to the input."""

    depthwise: Conv
    norm: tuple[Tensor, Tensor]
    expand: tuple[Tensor, Tensor]
    contract: tuple[Tensor, Tensor]
    gamma: Tensor

    @classmethod
    def of(cls, weights: Weights, name: str) -> "ConvNeXt":
        """The block under `name`."""

        def affine(part: str) -> tuple[Tensor, Tensor]:
            return weights[f"{name}.{part}.weight"].float(), weights[f"{name}.{part}.bias"].float()

        gamma = weights[f"{name}.gamma"].float()
        depthwise = Conv.of(weights, f"{name}.dwconv.conv", groups=len(gamma))
        return cls(depthwise, affine("norm"), affine("pwconv1"), affine("pwconv2"), gamma)

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """Same shape."""
        inner = self.depthwise(x, past).transpose(1, 2)  # [b, time, channels]
        inner = F.layer_norm(inner, (inner.shape[2],), *self.norm, eps=1e-6)
        inner = F.linear(F.gelu(F.linear(inner, *self.expand)), *self.contract)
        return x + (self.gamma * inner).transpose(1, 2)
