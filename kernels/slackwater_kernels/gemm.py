"""The block-scaled FP8 product: activations [M, K] times a weight [N, K] transposed, bf16 out.

Owns contracts, workspace and launches; the order of the sum is `plan`'s.  Deterministic, and a row's bits do not depend
on M.  Called by `mlp`, by the canary and by the model.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, bfloat16, float8_e4m3fn

from slackwater_kernels.core import GROUP, ROW_PAD, LayoutError, padded
from slackwater_kernels.dispatch import require_supported, sources
from slackwater_kernels.layout import Fp8Activations, Fp8Weight, require_residual
from slackwater_kernels.plan import Launch, SumTree, Take, gated_launch, launch, splits, sum_tree
from slackwater_kernels.quantize import empty, launch_options


class Workspace:
    """What the parts of split sums go through: partial sums, and counters that each launch leaves at 0.

    For one stream at a time: two products that run at once need two.  It grows as needed, except while a CUDA graph
    is captured: run the largest product once before.  What it outgrew is kept, since graphs may point there.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._outgrown: list[Tensor] = []
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self.device = self._partials.device  # with its index, where `device` has none
        self._counters = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._words = torch.zeros(0, dtype=torch.int64, device=self.device)

    def take(self, partials: int, counters: int) -> tuple[Tensor, Tensor]:
        """(partials fp32, counters int32, all 0) of at least these sizes."""
        if partials > self._partials.numel() or counters > self._counters.numel():
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise LayoutError(
                    f"the workspace holds {self._partials.numel()} partial sums and this product needs {partials}; "
                    "run the largest product once before capturing a graph"
                )
            self._outgrown += [self._partials, self._counters]
            size = max(partials, self._partials.numel())
            self._partials = torch.empty(size, dtype=torch.float32, device=self.device)
            size = max(counters, self._counters.numel())
            self._counters = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._partials, self._counters

    def words(self, count: int) -> Tensor:
        """int64 [count], 0 at first: what passes between the CTAs of a launch, each word with the launch's number.

        Always the same words, so that no launch takes an earlier one's for its own.
        """
        if self._words.numel() != count:
            if self._words.numel():
                raise LayoutError(f"the workspace holds {self._words.numel()} words and {count} are asked for")
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise LayoutError("the workspace was not used yet; run the block once before capturing a graph")
            self._words = torch.zeros(count, dtype=torch.int64, device=self.device)
        return self._words


def bsgemm(x: Fp8Activations, weight: Fp8Weight, workspace: Workspace, residual: Tensor | None = None) -> Tensor:
    """x times weight transposed, plus residual: bf16 [M, N], rounded once.   residual: bf16 [M, N], not changed.

    Safe to capture in a CUDA graph once the workspace has its size.
    """
    _check(x, weight, workspace)
    require_supported("bsgemm", x.codes)
    return run_bsgemm(sources(), x, weight, workspace, residual)


def gate_up_swiglu(x: Fp8Activations, weight: Fp8Weight, workspace: Workspace) -> Fp8Activations:
    """silu(gate) * up of x times weight transposed, quantised for down; gate above up in the weight: [M, N / 2].

    Gate, up and their SwiGLU are each rounded to bf16 on the way, so this equals `bsgemm` and `swiglu_quantize` one
    after the other bit for bit.
    """
    _check(x, weight, workspace)
    require_supported("gate_up_swiglu", x.codes)
    return run_gate_up_swiglu(sources(), x, weight, workspace)


def can_fuse_swiglu(weight: Fp8Weight) -> bool:
    """Whether `gate_up_swiglu` takes this weight: N alone keeps the card busy, and gate ends where a tile ends."""
    return weight.n % (2 * GROUP) == 0 and sum_tree(weight.n, weight.k).leaves == 1


def run_bsgemm(
    kernels: Any,
    x: Fp8Activations,
    weight: Fp8Weight,
    workspace: Workspace,
    residual: Tensor | None = None,
    *,
    pdl: bool = True,
    chosen: Launch | None = None,
) -> Tensor:
    """`bsgemm` with these kernels and this launch; tests give interpreted kernels and launches of every form."""
    _check(x, weight, workspace)
    require_residual(residual, (x.m, weight.n), x.codes.device)
    out = torch.empty(x.m, weight.n, dtype=bfloat16, device=x.codes.device)
    if x.m:
        tree = sum_tree(weight.n, weight.k)
        _launch(kernels, x, weight, workspace, residual, out, tree, chosen or launch(weight.n, weight.k, x.m), pdl)
    return out


def run_gate_up_swiglu(
    kernels: Any,
    x: Fp8Activations,
    weight: Fp8Weight,
    workspace: Workspace,
    *,
    pdl: bool = True,
    chosen: Launch | None = None,
) -> Fp8Activations:
    """`gate_up_swiglu` with these kernels and this launch."""
    _check(x, weight, workspace)
    if not can_fuse_swiglu(weight):
        raise LayoutError(
            f"gate_up_swiglu takes weights whose N = {weight.n} is a multiple of 256 and needs no split of K; "
            "use bsgemm and swiglu_quantize"
        )
    half = weight.n // 2
    out = empty(x.m, half, x.codes.device)
    if x.m:
        hidden = torch.empty(x.m, half, dtype=bfloat16, device=x.codes.device)
        tree = sum_tree(weight.n, weight.k)
        _launch(kernels, x, weight, workspace, None, hidden, tree, chosen or gated_launch(x.m), pdl, gated=out)
    return out


def _launch(
    kernels: Any,
    x: Fp8Activations,
    weight: Fp8Weight,
    workspace: Workspace,
    residual: Tensor | None,
    out: Tensor,
    tree: SumTree,
    chosen: Launch,
    pdl: bool,
    gated: Fp8Activations | None = None,
) -> None:
    m, n, k = x.m, weight.n, weight.k
    split = splits(tree, chosen.take)
    grid = (-(-n // chosen.rows), split, -(-m // chosen.tokens))
    counted = split > 1 or gated is not None
    partials, counters = workspace.take(split * m * n if split > 1 else 0, grid[0] * grid[2] if counted else 0)
    codes, x_codes = weight.codes.view(float8_e4m3fn), x.codes.view(float8_e4m3fn)
    added = out if residual is None else residual
    shared: dict[str, Any] = {
        "N": n,
        "BLOCKS": k // GROUP,
        "LEAF": tree.leaf,
        "GROUP": tree.group,
        "ROWS": chosen.rows,
        "TOKENS": chosen.tokens,
        "RESIDUAL": residual is not None,
        "PDL": pdl,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
        **launch_options(pdl),
    }
    mp = padded(m, ROW_PAD)
    if chosen.take is Take.LEAF:
        kernels.stream_kernel[grid](
            codes, weight.scales, x_codes, x.scales, added, out, partials, counters, m, mp, **shared
        )
        return
    boxes = _boxes(codes, x_codes, x.scales, chosen) if chosen.tma else (None, None, None)
    kernels.loop_kernel[grid](
        codes,
        boxes[0],
        weight.scales,
        x_codes,
        boxes[1],
        x.scales,
        boxes[2],
        added,
        out if gated is None else gated.codes,
        x.scales if gated is None else gated.scales,
        out,
        partials,
        counters,
        m,
        mp,
        ALL=chosen.take is Take.ALL,
        STAGES=chosen.stages,
        TMA=chosen.tma,
        AHEAD=min(chosen.ahead, tree.blocks) if pdl else 0,
        EARLY=chosen.early,
        GATED=gated is not None,
        **shared,
    )


def _boxes(codes: Tensor, x_codes: Tensor, x_scales: Tensor, chosen: Launch) -> tuple[Any, Any, Any]:
    """Descriptors for the tensor memory accelerator: weights as rows of 128 bytes, activations, their scales."""
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return (
        descriptor.from_tensor(codes.view(-1, GROUP), [chosen.rows, GROUP]),
        descriptor.from_tensor(x_codes, [chosen.tokens, GROUP]),
        descriptor.from_tensor(x_scales, [chosen.tokens]) if chosen.tokens >= 32 else None,
    )


def _check(x: Fp8Activations, weight: Fp8Weight, workspace: Workspace) -> None:
    if not isinstance(x, Fp8Activations):
        raise LayoutError(f"x must be Fp8Activations, got {type(x).__name__}; call quantize_activations")
    if not isinstance(weight, Fp8Weight):
        raise LayoutError(f"weight must be an Fp8Weight, got {type(weight).__name__}; call Fp8Weight.prepare")
    if x.k != weight.k:
        raise LayoutError(f"x has K = {x.k} and weight [{weight.n}, {weight.k}]; they must agree in K")
    for name, device in (("weight", weight.codes.device), ("the workspace", workspace.device)):
        if device != x.codes.device:
            raise LayoutError(f"x is on {x.codes.device} but {name} on {device}; keep all on one device")
