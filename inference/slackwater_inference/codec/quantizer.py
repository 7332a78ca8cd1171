"""The down-sampling residual quantiser: latents to codes, and codes to latents.

Owns the codebooks and what stands around them.  The first codebook is the semantic one; the others quantise
what it leaves over.  Called by the encoder and the decoder, which need different halves of it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.codec.layers import Conv, ConvNeXt, Past, TransposedConv
from slackwater_inference.codec.shapes import DOWNSAMPLE, POST_MODULE, PRE_MODULE, UPSAMPLE, codebook_name
from slackwater_inference.codec.transformer import WindowTransformer
from slackwater_inference.codec.weights import Weights, bake
from slackwater_inference.config import CodecConfig


def table(weights: Weights, index: int) -> Tensor:
    """[entries, latent_dim]: what each code of codebook `index` adds to the latent, its projection baked in."""
    name = codebook_name(index)
    projection = bake(weights, f"{name}out_proj").squeeze(2)  # [latent_dim, codebook_dim]
    return F.linear(weights[f"{name}codebook.weight"].float(), projection, weights[f"{name}out_proj.bias"].float())


@dataclass(frozen=True, slots=True)
class Dequantizer:
    """Codes to latents at the encoder's rate: look-up, post module, up-sampling."""

    tables: tuple[Tensor, ...]
    post_module: WindowTransformer
    upsample: tuple[tuple[TransposedConv, ConvNeXt], ...]

    @classmethod
    def of(cls, weights: Weights, config: CodecConfig, num_codebooks: int) -> "Dequantizer":
        """The decode half of the quantiser."""
        return cls(
            tuple(table(weights, i) for i in range(num_codebooks)),
            WindowTransformer.of(weights, POST_MODULE, config.post_module),
            tuple(
                (
                    TransposedConv.of(weights, f"{UPSAMPLE}{i}.0.conv", stride=factor),
                    ConvNeXt.of(weights, f"{UPSAMPLE}{i}.1"),
                )
                for i, factor in enumerate(reversed(config.downsample_factors))
            ),
        )

    def __call__(self, codes: Tensor, past: Past) -> Tensor:
        """fp32 [b, latent_dim, n * factors] for int64 codes [b, num_codebooks, n], which are not mutated.

        A code past its codebook's end counts as its last entry, as published; there the caller's codes change, too.
        """
        rows = [F.embedding(codes[:, i].clamp(0, len(table) - 1), table) for i, table in enumerate(self.tables)]
        x = torch.stack(rows).sum(0).transpose(1, 2)  # [b, latent_dim, n]
        x = self.post_module(x, past)
        for conv, block in self.upsample:
            x = block(conv(x, past), past)
        return x


@dataclass(frozen=True, slots=True)
class _Codebook:
    """One codebook on the encode side."""

    in_proj: Tensor
    in_bias: Tensor
    directions: Tensor  # [entries, codebook_dim], each of length 1
    table: Tensor

    @classmethod
    def of(cls, weights: Weights, index: int) -> "_Codebook":
        name = codebook_name(index)
        return cls(
            bake(weights, f"{name}in_proj").squeeze(2),
            weights[f"{name}in_proj.bias"].float(),
            F.normalize(weights[f"{name}codebook.weight"].float()),
            table(weights, index),
        )

    def __call__(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [n] and their latents [n, latent_dim] for what is left over, [n, latent_dim]."""
        direction = F.normalize(F.linear(residual, self.in_proj, self.in_bias))
        # Between vectors of length 1, the nearest is the one with the largest cosine.
        codes = (direction @ self.directions.T).argmax(1)
        return codes, self.table[codes]


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Latents at the encoder's rate to codes: down-sampling, pre module, then one codebook after the other."""

    downsample: tuple[tuple[Conv, ConvNeXt], ...]
    pre_module: WindowTransformer
    codebooks: tuple[_Codebook, ...]

    @classmethod
    def of(cls, weights: Weights, config: CodecConfig, num_codebooks: int) -> "Quantizer":
        """The encode half of the quantiser."""
        return cls(
            tuple(
                (
                    Conv.of(weights, f"{DOWNSAMPLE}{i}.0.conv", stride=factor),
                    ConvNeXt.of(weights, f"{DOWNSAMPLE}{i}.1"),
                )
                for i, factor in enumerate(config.downsample_factors)
            ),
            WindowTransformer.of(weights, PRE_MODULE, config.pre_module),
            tuple(_Codebook.of(weights, i) for i in range(num_codebooks)),
        )

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """int64 codes [num_codebooks, n] for latents [1, latent_dim, n * factors]."""
        for conv, block in self.downsample:
            x = block(conv(x, past), past)
        residual = self.pre_module(x, past)[0].T  # [n, latent_dim]
        rows = []
        for codebook in self.codebooks:
            codes, latent = codebook(residual)
            rows.append(codes)
            residual = residual - latent
        return torch.stack(rows)
