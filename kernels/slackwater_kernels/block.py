"""The feed-forward block of up to 16 rows as one launch of a kernel that streams all its weights.

Owns the kernel's contract, its arguments and its shared memory.  Deterministic, and a row's bits depend neither on M
nor on the other rows; they are not those of the separate launches, whose sums have another order.  Called by `mlp`.
"""

import ctypes

import torch
from torch import Tensor, bfloat16

from slackwater_kernels.block_layout import CTA_SCALES, CTAS, HIDDEN, SPLITS, TILE_ROWS, BlockWeights, K, N
from slackwater_kernels.core import GROUP, LayoutError
from slackwater_kernels.cuda.driver import kernel
from slackwater_kernels.dispatch import require_supported
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import Fp8Activations, require, require_residual
from slackwater_kernels.plan import BLOCK_ROWS

CUBIN = "mlp.sm_90a.cubin"
THREADS = 416
SLOTS = {1: 20, 2: 20, 4: 20, 8: 18, 16: 16}  # rows that a kernel has room for -> units of weights in its ring
_HIDDEN_WORDS = BLOCK_ROWS * HIDDEN // 2
_PART_WORDS = CTAS * BLOCK_ROWS * TILE_ROWS
WORDS = _HIDDEN_WORDS + _PART_WORDS + CTAS // 2


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
        ("m", ctypes.c_int),
    )


def mlp_block(
    x: Tensor | Fp8Activations, weights: BlockWeights, workspace: Workspace, residual: Tensor | None = None
) -> Tensor:
    """down(silu(gate(x)) * up(x)) plus residual: bf16 [M, 2560], rounded once, M up to 16.

    x: bf16 [M, 2560], quantised by the kernel itself, or what a quantiser made of it; the result has the same bits.
    Safe to capture in a CUDA graph once the workspace was used.  The CTAs wait for one another, so of all streams of a
    device only one may run it at a time; beside kernels that end by themselves it runs whenever there is room.
    """
    _check(x, weights, workspace, residual)
    codes = x.codes if isinstance(x, Fp8Activations) else x
    require_supported("mlp_block", codes)
    m = codes.shape[0]
    out = torch.empty(m, N, dtype=bfloat16, device=codes.device)
    if m:
        words = workspace.words(WORDS).data_ptr()
        room = next(size for size in SLOTS if m <= size)
        arguments = _Arguments(
            weights.codes.data_ptr(),
            weights.scales.data_ptr(),
            codes.data_ptr(),
            x.scales.data_ptr() if isinstance(x, Fp8Activations) else None,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            words,
            words + _HIDDEN_WORDS * 8,
            words + (_HIDDEN_WORDS + _PART_WORDS) * 8,
            m,
        )
        kernel(CUBIN, f"mlp_{room}", CTAS, THREADS, shared_bytes(room), codes.get_device()).launch(arguments)
    return out


def shared_bytes(room: int) -> int:
    """Shared memory of the kernel for so many rows; it refuses to run with less.  As `Shared` in the source."""
    slot = TILE_ROWS * 64
    ring = SLOTS[room] * slot + 768
    rows = room * (10 * GROUP + 3 * (TILE_ROWS + 4) * 4)
    scales = (K // GROUP + 10) * max(room, 8) * 4 + (CTA_SCALES + 12) // 4 * 16
    return ring + rows + scales + SLOTS[room] * 16 + 16


def _check(x: Tensor | Fp8Activations, weights: BlockWeights, workspace: Workspace, residual: Tensor | None) -> None:
    if not isinstance(weights, BlockWeights):
        raise LayoutError(f"weights must be BlockWeights, got {type(weights).__name__}; call BlockWeights.prepare")
    if isinstance(x, Fp8Activations):
        codes = x.codes
        if x.k != K:
            raise LayoutError(f"x has K = {x.k} and the block {K}; they must agree in K")
    elif isinstance(x, Tensor):
        codes = x
        require("x", x, bfloat16, (x.shape[0] if x.dim() else 0, K), "cast it to bf16 where it is produced")
    else:
        raise LayoutError(f"x must be bf16 [M, {K}] or Fp8Activations, got {type(x).__name__}")
    m = codes.shape[0]
    if m > BLOCK_ROWS:
        raise LayoutError(f"the block in one launch takes up to {BLOCK_ROWS} rows, got {m}; use the separate launches")
    require_residual(residual, (m, N), codes.device)
    others = {"weights": weights.codes.device, "the workspace": workspace.device}
    for name, device in others.items():
        if device != codes.device:
            raise LayoutError(f"x is on {codes.device} but {name} on {device}; keep all on one device")
    if not codes.is_meta and codes.data_ptr() % 16:
        raise LayoutError("x must start at a multiple of 16 bytes; was it sliced? clone it")


assert SPLITS * N == CTAS * TILE_ROWS
