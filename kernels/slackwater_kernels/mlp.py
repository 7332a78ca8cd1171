"""The feed-forward block on FP8 weights: quantise, gate and up with SwiGLU and quantise, down.

Owns which launches the block is.  Owns no weight and no workspace.  Called by the model and by the bench, which put it
into a CUDA graph; each launch starts while the one in front still runs and asks for its weights first.
"""

from dataclasses import dataclass

from torch import Tensor

from slackwater_kernels.core import LayoutError
from slackwater_kernels.gemm import Workspace, bsgemm, can_fuse_swiglu, gate_up_swiglu
from slackwater_kernels.layout import Fp8Weight
from slackwater_kernels.plan import gates_at_once
from slackwater_kernels.quantize import quantize_activations, rmsnorm_quantize, swiglu_quantize


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """gate_up: [2 I, K], all gate rows above all up rows.   down: [N, I]."""

    gate_up: Fp8Weight
    down: Fp8Weight

    def __post_init__(self) -> None:
        if self.gate_up.n != 2 * self.down.k:
            raise LayoutError(
                f"gate_up must have {2 * self.down.k} rows for down [{self.down.n}, {self.down.k}], "
                f"got {self.gate_up.n}; put gate above up"
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
    """
    codes = quantize_activations(x) if norm is None else rmsnorm_quantize(x, norm.gain, norm.eps)
    if can_fuse_swiglu(weights.gate_up) and gates_at_once(x.shape[0]):
        hidden = gate_up_swiglu(codes, weights.gate_up, workspace)
    else:
        hidden = swiglu_quantize(bsgemm(codes, weights.gate_up, workspace))
    return bsgemm(hidden, weights.down, workspace, residual)
