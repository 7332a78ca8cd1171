"""The feed-forward block on FP8 weights: quantise, gate and up with SwiGLU and quantise, down.

Owns which launches the block is: one for few rows where the weights are there in that form, else three or four, each
of which starts while the one in front still runs and asks for its weights first.  Owns no weight and no workspace.
Called by the model and by the bench, which put it into a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slackwater_kernels.block import mlp_block
from slackwater_kernels.block_layout import HIDDEN, BlockWeights, K, N
from slackwater_kernels.core import LayoutError
from slackwater_kernels.gemm import Workspace, bsgemm, can_fuse_swiglu, gate_up_swiglu
from slackwater_kernels.layout import CanonicalWeight, Fp8Weight
from slackwater_kernels.plan import BLOCK_ROWS, gates_at_once
from slackwater_kernels.quantize import quantize_activations, rmsnorm_quantize, swiglu_quantize


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """gate_up: [2 I, K], all gate rows above all up rows.   down: [N, I].

    block: both once more, for the form in one launch; without it every row count goes through the separate launches,
    which takes 74.7 MB less and gives a row the same bits at every M.
    """

    gate_up: Fp8Weight
    down: Fp8Weight
    block: BlockWeights | None = None

    def __post_init__(self) -> None:
        if self.gate_up.n != 2 * self.down.k:
            raise LayoutError(
                f"gate_up must have {2 * self.down.k} rows for down [{self.down.n}, {self.down.k}], "
                f"got {self.gate_up.n}; put gate above up"
            )
        if self.block is not None and (self.gate_up.k, self.down.k, self.down.n) != (K, HIDDEN, N):
            raise LayoutError(f"a block in one launch is [{N}, {HIDDEN}] on [{2 * HIDDEN}, {K}]; prepare without it")

    @classmethod
    def prepare(
        cls, gate_up: CanonicalWeight, down: CanonicalWeight, device: torch.device | str, *, block: bool = True
    ) -> "MlpWeights":
        """Lay both weights out on a device; also for one launch, where that is asked for and exists for the size."""
        fits = tuple(gate_up.codes.shape) == (2 * HIDDEN, K) and tuple(down.codes.shape) == (N, HIDDEN)
        return cls(
            Fp8Weight.prepare(gate_up, device),
            Fp8Weight.prepare(down, device),
            BlockWeights.prepare(gate_up, down, device) if block and fits else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """The norm in front of a block.   gain: bf16 [K]."""

    gain: Tensor
    eps: float


def mlp(
    x: Tensor, weights: MlpWeights, workspace: Workspace, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """down(silu(gate(x)) * up(x)) of bf16 [M, K], behind a norm and with a residual where given: bf16 [M, N].

    The hidden values are rounded to bf16 and then to FP8; the sum with the residual is rounded once.
    `dispatch.describe_mlp` says which form this is.  A norm is a launch of its own in both.
    """
    if weights.block is not None and x.shape[0] <= BLOCK_ROWS:
        rows = x if norm is None else rmsnorm_quantize(x, norm.gain, norm.eps)
        return mlp_block(rows, weights.block, workspace, residual)
    codes = quantize_activations(x) if norm is None else rmsnorm_quantize(x, norm.gain, norm.eps)
    if can_fuse_swiglu(weights.gate_up) and gates_at_once(x.shape[0]):
        hidden = gate_up_swiglu(codes, weights.gate_up, workspace)
    else:
        hidden = swiglu_quantize(bsgemm(codes, weights.gate_up, workspace))
    return bsgemm(hidden, weights.down, workspace, residual)
