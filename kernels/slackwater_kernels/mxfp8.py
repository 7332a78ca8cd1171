"""The MXFP8 operations: quantisers in one launch, alone or behind a norm or SwiGLU, and the product with a weight.

Owns contracts, launches and their choice; the order of the sum is `plan`'s, so a row's bits do not depend on M.
Written for Blackwell's block-scaled instructions (sm_120a, sm_103a).  Called by the canary and by the model.
"""

from typing import Any

import torch
from torch import Tensor, bfloat16, float8_e4m3fn

from slackwater_kernels.core import GROUP, ROW_PAD, LayoutError, MxRule, padded
from slackwater_kernels.dispatch import BLACKWELL, DATA_CENTRE, arch, mx_sources, require_supported
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import MxWeight, MxWords, require, require_k, require_residual, require_rows
from slackwater_kernels.plan import Launch, Take, described, splits, sum_tree
from slackwater_kernels.quantize import launch_options

_BLOCKS_PER_CTA = 4  # 128-blocks of one row
_SPLIT_M = 256  # above it the partial sums would cost more traffic than the split saves time


def quantize_mx(x: Tensor, rule: MxRule = MxRule.RCEIL) -> MxWords:
    """bf16 [M, K], row-major, to MXFP8 with its bytes packed; `reference.quantize_mx` bit for bit.

    Safe to capture in a CUDA graph: no synchronisation, and the result is written whole each time.
    """
    require_supported("quantize_mx", x)
    return run_quantize_mx(mx_sources(), x, rule)


def rmsnorm_quantize_mx(x: Tensor, gain: Tensor, eps: float, rule: MxRule = MxRule.RCEIL) -> MxWords:
    """bf16 [M, K] over its root mean square, times gain bf16 [K], rounded to bf16 and quantised; x is not changed."""
    require_supported("rmsnorm_quantize_mx", x)
    return run_rmsnorm_quantize_mx(mx_sources(), x, gain, eps, rule)


def swiglu_quantize_mx(gate_up: Tensor, rule: MxRule = MxRule.RCEIL) -> MxWords:
    """bf16 [M, 2 I], gate beside up, to silu(gate) * up, rounded to bf16 and quantised: [M, I]."""
    require_supported("swiglu_quantize_mx", gate_up)
    return run_swiglu_quantize_mx(mx_sources(), gate_up, rule)


def mxgemm(x: MxWords, weight: MxWeight, workspace: Workspace, residual: Tensor | None = None) -> Tensor:
    """x times weight transposed, plus residual: bf16 [M, N], rounded once.   residual: bf16 [M, N], not changed.

    Safe to capture in a CUDA graph once the workspace has its size.
    """
    _check(x, weight, workspace)
    require_supported("mxgemm", x.codes)
    return run_mxgemm(mx_sources(), x, weight, workspace, residual)


def mx_launch(m: int, on: str = BLACKWELL) -> Launch:
    """The launch for M rows on an architecture.

    By what its instruction takes (sm_103's wants 128 rows of the weight, with fewer Triton widens to bf16) and by what
    fits registers and sm_120's 99 KB of shared memory: neither GPU was at hand to measure on.
    """
    tokens = next(size for size in (16, 32, 64) if m <= size or size == 64)
    take = Take.GROUP if m <= _SPLIT_M else Take.ALL
    rows, warps = (128, 8) if on == DATA_CENTRE else (64, 4)
    return Launch(take, rows, tokens, warps, 4, tma=False, ahead=0, early=True)


def describe(n: int, k: int, m: int, on: str = BLACKWELL) -> dict[str, object]:
    """What a product of [M, K] with a weight [N, K] does on an architecture, as `dispatch.describe` has it."""
    return described(sum_tree(n, k), mx_launch(m, on))


def run_quantize_mx(kernels: Any, x: Tensor, rule: MxRule = MxRule.RCEIL, *, pdl: bool = True) -> MxWords:
    """`quantize_mx` with these kernels; tests give them interpreted, or emulated on a GPU without the instruction."""
    m, k = require_rows("x", x)
    return _by_blocks(kernels.quantize_mx_kernel, x, m, k, rule, pdl)


def run_swiglu_quantize_mx(kernels: Any, gate_up: Tensor, rule: MxRule = MxRule.RCEIL, *, pdl: bool = True) -> MxWords:
    """`swiglu_quantize_mx` with these kernels."""
    m, both = require_rows("gate_up", gate_up)
    require_k("gate_up", both, 2 * GROUP)
    return _by_blocks(kernels.swiglu_quantize_mx_kernel, gate_up, m, both // 2, rule, pdl)


def run_rmsnorm_quantize_mx(
    kernels: Any, x: Tensor, gain: Tensor, eps: float, rule: MxRule = MxRule.RCEIL, *, pdl: bool = True
) -> MxWords:
    """`rmsnorm_quantize_mx` with these kernels."""
    m, k = require_rows("x", x)
    require("gain", gain, bfloat16, (k,), "one gain per column of x")
    if gain.device != x.device:
        raise LayoutError(f"x is on {x.device} but gain on {gain.device}; keep both on one device")
    out = _empty(m, k, rule, x.device)
    if m:
        blocks = k // GROUP
        kernels.rmsnorm_quantize_mx_kernel[(padded(m, ROW_PAD), 1)](
            x,
            gain,
            out.codes,
            out.scales.view(torch.uint8),
            m,
            padded(m, ROW_PAD),
            eps,
            BLOCKS=blocks,
            PER=1 << (blocks - 1).bit_length(),
            FLOOR=rule is MxRule.OCP_FLOOR,
            PDL=pdl,
            num_warps=8,
            **launch_options(pdl),
        )
    return out


def run_mxgemm(
    kernels: Any,
    x: MxWords,
    weight: MxWeight,
    workspace: Workspace,
    residual: Tensor | None = None,
    *,
    pdl: bool = True,
    chosen: Launch | None = None,
) -> Tensor:
    """`mxgemm` with these kernels and this launch."""
    _check(x, weight, workspace)
    m, n = x.rows, weight.n
    require_residual(residual, (m, n), x.codes.device)
    out = torch.empty(m, n, dtype=bfloat16, device=x.codes.device)
    if m == 0:
        return out
    launch, tree = chosen or mx_launch(m, arch(x.codes.device)), sum_tree(n, weight.k)
    split = splits(tree, launch.take)
    grid = (-(-n // launch.rows), split, -(-m // launch.tokens))
    partials, counters = workspace.take(split * m * n if split > 1 else 0, grid[0] * grid[2] if split > 1 else 0)
    kernels.mx_kernel[grid](
        weight.codes.view(float8_e4m3fn),
        weight.scales.view(torch.uint8),
        x.codes.view(float8_e4m3fn),
        x.scales.view(torch.uint8),
        out if residual is None else residual,
        out,
        partials,
        counters,
        m,
        padded(m, ROW_PAD),
        N=n,
        BLOCKS=tree.blocks,
        LEAF=tree.leaf,
        GROUP=tree.group,
        ALL=launch.take is Take.ALL,
        ROWS=launch.rows,
        TOKENS=launch.tokens,
        STAGES=launch.stages,
        RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(pdl),
    )
    return out


def _by_blocks(kernel: Any, source: Tensor, m: int, k: int, rule: MxRule, pdl: bool) -> MxWords:
    """[m, k], some 128-blocks of one row a CTA."""
    out = _empty(m, k, rule, source.device)
    if m:
        rows, blocks = padded(m, ROW_PAD), k // GROUP
        kernel[(rows, -(-blocks // _BLOCKS_PER_CTA))](
            source,
            out.codes,
            out.scales.view(torch.uint8),
            m,
            rows,
            BLOCKS=blocks,
            PER=_BLOCKS_PER_CTA,
            FLOOR=rule is MxRule.OCP_FLOOR,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out


def _empty(m: int, k: int, rule: MxRule, device: torch.device) -> MxWords:
    """A handle whose bytes a kernel is about to write."""
    codes = torch.empty(m, k, dtype=torch.uint8, device=device)
    words = torch.empty(k // GROUP * padded(m, ROW_PAD), dtype=torch.int32, device=device)
    return MxWords(m, k, codes, words, rule)


def _check(x: MxWords, weight: MxWeight, workspace: Workspace) -> None:
    if not isinstance(x, MxWords):
        raise LayoutError(f"x must be MxWords, got {type(x).__name__}; call quantize_mx")
    if not isinstance(weight, MxWeight):
        raise LayoutError(f"weight must be an MxWeight, got {type(weight).__name__}; call MxWeight.prepare")
    if x.k != weight.k:
        raise LayoutError(f"x has K = {x.k} and weight [{weight.n}, {weight.k}]; they must agree in K")
    for name, device in (("weight", weight.codes.device), ("the workspace", workspace.device)):
        if device != x.codes.device:
            raise LayoutError(f"x is on {x.codes.device} but {name} on {device}; keep all on one device")
