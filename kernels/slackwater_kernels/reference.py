"""Plain-torch references: slow, obviously right, and what every kernel is tested against.

Owns no storage and mutates nothing.  Called by tests, by the canary, and by whoever quantises where there is no GPU.
"""

import torch
from torch import Tensor

from slackwater_kernels.core import GROUP, MX_BLOCK, LayoutError, MxRule, padded
from slackwater_kernels.layout import CanonicalMx, CanonicalWeight, Fp8Activations, require_k
from slackwater_kernels.numerics import (
    activation_scale,
    e8m0_byte,
    e8m0_reciprocal,
    e8m0_value,
    finite,
    from_e4m3,
    to_e4m3,
    weight_scale,
)


def prev_tokens_shift(prev: Tensor, next_tokens: Tensor) -> Tensor:
    """The window after one shift, as a new tensor.

    prev: int32 [bs, W, cw].   next_tokens: int32 [bs, cw].   Returns int32 [bs, W, cw].
    """
    return torch.cat((prev[:, 1:], next_tokens[:, None]), dim=1)


def quantize_activations(x: Tensor) -> Fp8Activations:
    """Any float [M, K] to FP8, one fp32 scale per 128 values of a row.

    A group's multiplier is 448 / max(amax, 1e-10), its scale 1 / multiplier, its codes the nearest E4M3 of x times
    the multiplier.  Infinity counts as the largest finite number; a group that holds NaN is NaN throughout.
    """
    m, k = _rows("x", x)
    require_k("x", k)
    groups = finite(x).view(m, k // GROUP, GROUP)
    multiplier, scale = activation_scale(_amax(groups, -1))
    codes = to_e4m3(groups * multiplier[..., None])
    return Fp8Activations.pack(codes.view(m, k), scale)


def dequantize_activations(activations: Fp8Activations) -> Tensor:
    """The values that a handle stands for, fp64 [M, K]."""
    codes, scales = activations.logical()
    return from_e4m3(codes).double() * scales.double().repeat_interleave(GROUP, 1)


def quantize_weight(w: Tensor) -> CanonicalWeight:
    """Any float [N, K] to FP8, one fp32 scale per 128 x 128 block; the last blocks of N may be short.

    A block's scale is amax / 448 (1 for a zero block), its codes the nearest E4M3 of w / scale.  Infinity counts as
    the largest finite number; a block that holds NaN is NaN throughout.
    """
    n, k = _rows("w", w)
    require_k("w", k)
    rows = torch.zeros(padded(n, GROUP), k, dtype=torch.float32, device=w.device)
    rows[:n] = finite(w)
    blocks = rows.view(-1, GROUP, k // GROUP, GROUP)  # [N / 128, 128, K / 128, 128]
    scales = weight_scale(_amax(blocks, (1, 3)))
    codes = to_e4m3(blocks / scales[:, None, :, None])
    return CanonicalWeight(codes.view(-1, k)[:n].contiguous(), scales)


def dequantize_weight(weight: CanonicalWeight) -> Tensor:
    """The values that a canonical weight stands for, fp64 [N, K]."""
    scales = weight.scales.double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return from_e4m3(weight.codes).double() * scales[: weight.codes.shape[0]]


def quantize_mx(x: Tensor, rule: MxRule = MxRule.RCEIL) -> CanonicalMx:
    """Any float [rows, K] to MXFP8: one power of two per 32 values of a row.

    Infinity counts as the largest finite number; a block that holds NaN has byte 255 and NaN codes.
    """
    rows, k = _rows("x", x)
    require_k("x", k, MX_BLOCK)
    blocks = finite(x).view(rows, k // MX_BLOCK, MX_BLOCK)
    byte = e8m0_byte(_amax(blocks, -1), rule)
    codes = to_e4m3(blocks * e8m0_reciprocal(byte)[..., None])
    return CanonicalMx(codes.view(rows, k), byte, rule)


def dequantize_mx(mx: CanonicalMx) -> Tensor:
    """The values that a canonical MXFP8 tensor stands for, fp64 [rows, K]."""
    return from_e4m3(mx.codes).double() * e8m0_value(mx.scales).double().repeat_interleave(MX_BLOCK, 1)


def bsgemm(x: Fp8Activations, weight: CanonicalWeight) -> Tensor:
    """x times weight transposed from the dequantised values, fp64 [M, N]."""
    return dequantize_activations(x) @ dequantize_weight(weight).T


def swiglu(gate_up: Tensor) -> Tensor:
    """bf16 [M, 2 I], gate beside up, to bf16 [M, I]: silu(gate) * up in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(torch.bfloat16)


def rmsnorm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """bf16 [M, K] to bf16 [M, K]: x / rms(x), times gain, in fp32, rounded once.   gain: bf16 [K]."""
    values = x.float()
    rrms = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * rrms * gain.float()).to(torch.bfloat16)


def mlp(x: Tensor, gate_up: CanonicalWeight, down: CanonicalWeight) -> Tensor:
    """The block as its four steps, each rounded where the kernels round: bf16 [M, K] to fp64 [M, N]."""
    h = swiglu(bsgemm(quantize_activations(x), gate_up).to(torch.bfloat16))
    return bsgemm(quantize_activations(h), down)


def _amax(groups: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return groups.abs().amax(dim) if groups.numel() else groups.abs().sum(dim)


def _rows(name: str, x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or not x.is_floating_point():
        raise LayoutError(f"{name} must be float [rows, K], got {x.dtype} {list(x.shape)}; flatten what leads")
    return x.shape[0], x.shape[1]
