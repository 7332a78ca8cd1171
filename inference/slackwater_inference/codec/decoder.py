"""The codec's decoder: codes to sound, a few frames at a time.

Owns the network, its seeded weights and the state that a stream carries from chunk to chunk, which
is exact: any split of a stream's frames gives the sound of decoding them at once.  All convolutions
are causal, so nothing is held back and a stream's end needs no flushing beyond its last frames.
Does not own when a chunk is due.  Called by the engine.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.config import CodecConfig

# What one stream carries: the last inputs of each convolution, in the order of the forward pass.
CodecState = list[Tensor]
_KERNEL = 7
_ROUGH_LEVEL = 1


@dataclass(frozen=True, slots=True)
class _Conv:
    """A causal convolution.  weight: [out, in, k].  It looks back `reach` inputs."""

    weight: Tensor
    bias: Tensor
    dilation: int = 1

    @property
    def reach(self) -> int:
        return (self.weight.shape[2] - 1) * self.dilation

    def __call__(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((state, x), dim=2)
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation), x[:, :, x.shape[2] - self.reach :]


@dataclass(frozen=True, slots=True)
class _Upsample:
    """A causal transposed convolution with a kernel of two strides.  weight: [in, out, 2 * stride]."""

    weight: Tensor
    bias: Tensor
    stride: int

    def __call__(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        # Each input reaches into the next one's samples, so the last input of the chunk before comes along.
        num_samples = x.shape[2] * self.stride
        x = torch.cat((state, x), dim=2)
        out = F.conv_transpose1d(x, self.weight, self.bias, stride=self.stride)
        return out[:, :, self.stride : self.stride + num_samples], x[:, :, -1:]


@dataclass(frozen=True, slots=True)
class _Level:
    upsample: _Upsample
    units: tuple[tuple[_Conv, _Conv], ...]


def _snake(x: Tensor) -> Tensor:
    return x + torch.sin(x).square()


def _bump(length: int) -> Tensor:
    """A raised cosine; copies of it half a length apart add up to 1."""
    return torch.sin(torch.pi * (torch.arange(length) + 0.5) / length).square()


class CodecDecoder:
    """Decodes batches of streams; holds no stream's state itself."""

    def __init__(self, config: CodecConfig, num_codebooks: int, num_semantic: int, seed: int) -> None:
        self.config = config
        g = torch.Generator().manual_seed(seed)

        def randn(*shape: int, std: float) -> Tensor:
            return torch.randn(shape, generator=g) * std

        # Raised-cosine kernels only smooth and interpolate.  One level alone has a random kernel: it repeats
        # with every input of that level, which makes a hum of that frequency, and no hiss.
        def conv(channels_in: int, channels_out: int, kernel: int, dilation: int = 1, gain: float = 1.0) -> _Conv:
            mix = randn(channels_out, channels_in, 1, std=gain * channels_in**-0.5)
            return _Conv(mix * _bump(kernel) / _bump(kernel).sum(), randn(channels_out, std=0.1 * gain), dilation)

        def upsample(level: int) -> _Upsample:
            channels_in, channels_out = config.channels[level : level + 2]
            stride = config.rates[level]
            is_rough = level == _ROUGH_LEVEL
            mix = randn(channels_in, channels_out, 2 * stride if is_rough else 1, std=channels_in**-0.5)
            if is_rough:
                mix = 2.0 * (mix - mix.mean(2, keepdim=True))  # no rumble
            return _Upsample(mix * _bump(2 * stride), torch.zeros(channels_out), stride)

        sizes = [num_semantic] + [config.residual_codebook_size] * (num_codebooks - 1)
        self._tables = [
            randn(size, config.codebook_dim, std=1.0) @ randn(config.codebook_dim, config.latent_dim, std=0.2)
            for size in sizes
        ]
        self._conv_in = conv(config.latent_dim, config.channels[0], 3)
        self._levels = tuple(
            _Level(
                upsample(level),
                tuple(
                    (conv(width, width, _KERNEL, dilation), conv(width, width, 1, gain=0.5))
                    for dilation in config.dilations
                ),
            )
            for level, width in enumerate(config.channels[1:])
        )
        self._conv_out = conv(config.channels[-1], 1, _KERNEL, gain=0.25)
        # Snake lifts every channel alike; weights that cancel over the channels keep that out of the sound.
        self._conv_out.weight.sub_(self._conv_out.weight.mean(1, keepdim=True))

    def new_state(self) -> CodecState:
        """The state before a stream's first frame: silence."""
        state = [torch.zeros(1, self.config.latent_dim, self._conv_in.reach)]
        for level in self._levels:
            state.append(torch.zeros(1, level.upsample.weight.shape[0], 1))
            state += [torch.zeros(1, wide.weight.shape[1], wide.reach) for wide, _ in level.units]
        state.append(torch.zeros(1, self.config.channels[-1], self._conv_out.reach))
        return state

    def decode(self, codes: Tensor, states: list[CodecState]) -> tuple[Tensor, list[CodecState]]:
        """Samples in (-1, 1), fp32 [b, n * frame_samples], and the states to carry on with.

        codes: int64 [b, num_codebooks, n >= 1].   states: one for each of the b streams; not mutated.
        """
        before = [torch.cat(parts) for parts in zip(*states, strict=True)]
        after: list[Tensor] = []

        def run(part: _Conv | _Upsample, x: Tensor) -> Tensor:
            out, carried = part(x, before[len(after)])
            after.append(carried)
            return out

        rows = [F.embedding(codes[:, i], table) for i, table in enumerate(self._tables)]
        x = torch.stack(rows).sum(0).transpose(1, 2)  # [b, latent_dim, n]
        x = run(self._conv_in, x)
        for level in self._levels:
            x = run(level.upsample, _snake(x))
            for wide, narrow in level.units:
                inner = run(wide, _snake(x))
                x = x + F.conv1d(_snake(inner), narrow.weight, narrow.bias)
        x = torch.tanh(run(self._conv_out, _snake(x)))
        # A clone: a view would keep the whole batch's memory alive for one stream.
        return x.squeeze(1), [[part[i : i + 1].clone() for part in after] for i in range(len(states))]
