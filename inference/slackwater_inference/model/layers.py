"""What both transformers are made of: RMSNorm, rotary positions, the attention's projections, SwiGLU.

Owns the arithmetic of one layer except how keys and values are stored.  Called by `slow` and `fast`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.config import TransformerConfig
from slackwater_inference.model.weights import Weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32, round to x's dtype, then scale: the published model's order."""
    if x.dtype is torch.float32:  # nothing to round, so one operation
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of queries and keys, which the published model rounds once, after the scale."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rope_table(config: TransformerConfig) -> Tensor:
    """complex64 [max_seq_len, head_dim / 2]: cos + i sin, both rounded to bf16 as the model was trained with."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    # One over the power, not a negative power: at position 30,000 the last bit of a frequency is seen in bf16.
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), 1.0 / config.rope_base**exponents)
    return torch.complex(angles.cos().bfloat16().float(), angles.sin().bfloat16().float())


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate interleaved pairs (x0, x1), (x2, x3), ... in fp32.

    x: [b, n, heads, head_dim].   turns: complex64, broadcastable to [b, n, 1, head_dim / 2].
    A pair as one complex number makes the rotation one multiplication.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """One pre-norm layer's weights, with the parts of it that need no cache."""

    config: TransformerConfig
    wqkv: Tensor
    wo: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_norm: Tensor
    ffn_norm: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor

    def project(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys, and values of x [b, n, dim]: each [b, n, heads, head_dim]."""
        c = self.config
        normed = rms_norm(x, self.attention_norm, c.norm_eps)
        heads = F.linear(normed, self.wqkv).view(*x.shape[:-1], -1, c.head_dim)  # [b, n, q + k + v heads, head_dim]
        q, k, v = torch.split(heads, [c.n_head, c.n_local_heads, c.n_local_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q = head_norm(q, self.q_norm, c.norm_eps)
            k = head_norm(k, self.k_norm, c.norm_eps)
        return rotate(q, turns), rotate(k, turns), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Grouped-query attention.  q: [b, n, heads, d]; k, v: [b, L, kv heads, d]; mask adds to [b, 1, n, L].

        Returns [b, n, dim], projected by wo.
        """
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return F.linear(out.transpose(1, 2).flatten(-2), self.wo)

    def feed_forward(self, x: Tensor) -> Tensor:
        """SwiGLU of the normed x."""
        normed = rms_norm(x, self.ffn_norm, self.config.norm_eps)
        return F.linear(F.silu(F.linear(normed, self.w1)) * F.linear(normed, self.w3), self.w2)


def layers_of(weights: Weights, prefix: str, config: TransformerConfig) -> tuple[Layer, ...]:
    """The layers under `prefix`, first to last."""

    def layer(i: int) -> Layer:
        name = f"{prefix}layers.{i}."
        return Layer(
            config=config,
            wqkv=weights[f"{name}attention.wqkv.weight"],
            wo=weights[f"{name}attention.wo.weight"],
            q_norm=weights[f"{name}attention.q_norm.weight"] if config.attention_qk_norm else None,
            k_norm=weights[f"{name}attention.k_norm.weight"] if config.attention_qk_norm else None,
            attention_norm=weights[f"{name}attention_norm.weight"],
            ffn_norm=weights[f"{name}ffn_norm.weight"],
            w1=weights[f"{name}feed_forward.w1.weight"],
            w2=weights[f"{name}feed_forward.w2.weight"],
            w3=weights[f"{name}feed_forward.w3.weight"],
        )

    return tuple(layer(i) for i in range(config.n_layer))
