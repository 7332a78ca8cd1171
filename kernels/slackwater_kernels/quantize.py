"""Quantisers in one launch: bf16 rows to FP8 codes and packed scales, alone or behind a norm or SwiGLU.

Owns the contracts and launches.  Weights are quantised once, by `reference.quantize_weight`, on any device.  Called by
`mlp` and by the model.
"""

from typing import Any

import torch
from torch import Tensor, bfloat16

from slackwater_kernels.core import GROUP, ROW_PAD, LayoutError, padded
from slackwater_kernels.dispatch import require_supported, sources
from slackwater_kernels.layout import Fp8Activations, require, require_k, require_rows

_GROUPS_PER_CTA = 4


def quantize_activations(x: Tensor) -> Fp8Activations:
    """bf16 [M, K], row-major, to FP8 with a scale per 128 values; `reference.quantize_activations` bit for bit.

    Safe to capture in a CUDA graph: no synchronisation, and the result is written whole each time.
    """
    require_supported("quantize_activations", x)
    return run_quantize(sources(), x)


def rmsnorm_quantize(x: Tensor, gain: Tensor, eps: float) -> Fp8Activations:
    """bf16 [M, K] over its root mean square, times gain bf16 [K], rounded to bf16 and quantised; x is not changed."""
    require_supported("rmsnorm_quantize", x)
    return run_rmsnorm_quantize(sources(), x, gain, eps)


def swiglu_quantize(gate_up: Tensor) -> Fp8Activations:
    """bf16 [M, 2 I], gate beside up, to silu(gate) * up, rounded to bf16 and quantised: [M, I]."""
    require_supported("swiglu_quantize", gate_up)
    return run_swiglu_quantize(sources(), gate_up)


def run_quantize(kernels: Any, x: Tensor, *, pdl: bool = True) -> Fp8Activations:
    """`quantize_activations` with these kernels; tests give them interpreted, without dependent launch."""
    m, k = require_rows("x", x)
    return _by_groups(kernels.quantize_kernel, x, m, k, pdl)


def run_swiglu_quantize(kernels: Any, gate_up: Tensor, *, pdl: bool = True) -> Fp8Activations:
    """`swiglu_quantize` with these kernels."""
    m, both = require_rows("gate_up", gate_up)
    require_k("gate_up", both, 2 * GROUP)
    return _by_groups(kernels.swiglu_quantize_kernel, gate_up, m, both // 2, pdl)


def run_rmsnorm_quantize(kernels: Any, x: Tensor, gain: Tensor, eps: float, *, pdl: bool = True) -> Fp8Activations:
    """`rmsnorm_quantize` with these kernels."""
    m, k = require_rows("x", x)
    require("gain", gain, bfloat16, (k,), "one gain per column of x")
    if gain.device != x.device:
        raise LayoutError(f"x is on {x.device} but gain on {gain.device}; keep both on one device")
    out = empty(m, k, x.device)
    if m:
        groups = k // GROUP
        kernels.rmsnorm_quantize_kernel[(padded(m, ROW_PAD), 1)](
            x,
            gain,
            out.codes,
            out.scales,
            m,
            padded(m, ROW_PAD),
            eps,
            BLOCKS=groups,
            PER=1 << (groups - 1).bit_length(),
            PDL=pdl,
            num_warps=8,
            **launch_options(pdl),
        )
    return out


def launch_options(pdl: bool) -> dict[str, bool]:
    """The launch's own options.  Products and sums are fused as they always were: Triton's default is to change."""
    return {"launch_pdl": pdl, "enable_fp_fusion": True}


def empty(m: int, k: int, device: torch.device) -> Fp8Activations:
    """A handle whose bytes a kernel is about to write."""
    codes = torch.empty(m, k, dtype=torch.uint8, device=device)
    scales = torch.empty(k // GROUP * padded(m, ROW_PAD), dtype=torch.float32, device=device)
    return Fp8Activations(m, k, codes, scales)


def _by_groups(kernel: Any, source: Tensor, m: int, k: int, pdl: bool) -> Fp8Activations:
    """[m, k], some groups of one row a CTA."""
    out = empty(m, k, source.device)
    if m:
        rows, groups = padded(m, ROW_PAD), k // GROUP
        kernel[(rows, -(-groups // _GROUPS_PER_CTA))](
            source,
            out.codes,
            out.scales,
            m,
            rows,
            BLOCKS=groups,
            PER=_GROUPS_PER_CTA,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out
