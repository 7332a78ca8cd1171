"""The codec's causal transformers with a limited window, as they stand in the encoder and in the quantiser.

Owns attention over a stream's last keys and values, which lie in `Past`, and the positions, which go on from
chunk to chunk: the rotary table is rounded to bf16, so it is not quite relative, and a stream must turn its
keys by the same absolute positions as one pass over the whole would.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.codec.layers import Past
from slackwater_inference.codec.weights import Weights
from slackwater_inference.config.codec import CodecTransformerConfig


def turns(positions: Tensor, config: CodecTransformerConfig) -> Tensor:
    """complex64 [b, n, head_dim / 2]: cos + i sin, both rounded to bf16 as in the published table.

    positions: fp32 whole numbers [b, n].  Computed for what is needed, so a stream has no last position.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = positions[:, :, None] * (1.0 / config.rope_base**exponents)
    return torch.complex(angles.cos().bfloat16().float(), angles.sin().bfloat16().float())


def window_mask(positions: Tensor, window_size: int) -> Tensor:
    """bool [b, 1, n, window_size - 1 + n]: may the query at positions [b, n] look at this key?

    The keys are the last window_size - 1 of the chunks before, then the chunk's own.
    """
    reach = window_size - 1
    keys = torch.arange(-reach, positions.shape[1], device=positions.device)  # [L], relative to the first query
    distance = torch.arange(positions.shape[1], device=positions.device)[:, None] - keys  # [n, L]
    is_near = (distance >= 0) & (distance < window_size)
    exists = positions[:, :1] + keys >= 0  # [b, L]: not in front of the stream's beginning
    return (is_near & exists[:, None])[:, None]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One pre-norm layer with LayerScale."""

    wqkv: Tensor
    wo: Tensor
    attention_norm: Tensor
    attention_scale: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor
    ffn_norm: Tensor
    ffn_scale: Tensor

    @classmethod
    def of(cls, weights: Weights, name: str) -> "_Layer":
        return cls(
            wqkv=weights[f"{name}attention.wqkv.weight"].float(),
            wo=weights[f"{name}attention.wo.weight"].float(),
            attention_norm=weights[f"{name}attention_norm.weight"].float(),
            attention_scale=weights[f"{name}attention_layer_scale.gamma"].float(),
            w1=weights[f"{name}feed_forward.w1.weight"].float(),
            w2=weights[f"{name}feed_forward.w2.weight"].float(),
            w3=weights[f"{name}feed_forward.w3.weight"].float(),
            ffn_norm=weights[f"{name}ffn_norm.weight"].float(),
            ffn_scale=weights[f"{name}ffn_layer_scale.gamma"].float(),
        )


@dataclass(frozen=True, slots=True)
class WindowTransformer:
    """All layers and the final norm."""

    config: CodecTransformerConfig
    layers: tuple[_Layer, ...]
    norm: Tensor

    @classmethod
    def of(cls, weights: Weights, name: str, config: CodecTransformerConfig) -> "WindowTransformer":
        """The transformer under the prefix `name`, which ends in a dot."""
        layers = tuple(_Layer.of(weights, f"{name}layers.{i}.") for i in range(config.n_layer))
        return cls(config, layers, weights[f"{name}norm.weight"].float())

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """x: [b, dim, n]; same shape."""
        positions = past.advance(x)
        rotation = turns(positions, self.config)[:, :, None]  # [b, n, 1, head_dim / 2]
        mask = window_mask(positions, self.config.window_size)
        x = x.transpose(1, 2)  # [b, n, dim]
        for layer in self.layers:
            x = x + layer.attention_scale * self._attend(layer, x, rotation, mask, past)
            normed = self._normed(x, layer.ffn_norm)
            inner = F.silu(F.linear(normed, layer.w1)) * F.linear(normed, layer.w3)
            x = x + layer.ffn_scale * F.linear(inner, layer.w2)
        return self._normed(x, self.norm).transpose(1, 2)

    def _attend(self, layer: _Layer, x: Tensor, rotation: Tensor, mask: Tensor, past: Past) -> Tensor:
        c = self.config
        qkv = F.linear(self._normed(x, layer.attention_norm), layer.wqkv)
        q, k, v = qkv.view(*x.shape[:2], 3, c.n_head, c.head_dim).unbind(2)  # [b, n, heads, head_dim]
        keys_values = past.join(torch.stack((_rotate(k, rotation), v), 1), c.window_size - 1)  # [b, 2, L, heads, d]
        k, v = keys_values.transpose(2, 3).unbind(1)
        q = _rotate(q, rotation).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [b, heads, n, head_dim]
        return F.linear(out.transpose(1, 2).flatten(2), layer.wo)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn interleaved pairs (x0, x1), (x2, x3), ... of x [b, n, heads, head_dim]."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)
