"""A frame's draws on the device: filter, temperature, repetition-aware second draw and counter-based noise, one launch.

Owns the contract and the launch.  Does not own the rules' values (the engine's) nor the window, which `prev_tokens`
moves.  Called by the engine inside a CUDA graph, once a codebook.
"""

from typing import Any

import torch
from torch import Tensor

from slackwater_kernels.dispatch import require_supported, sampling_sources
from slackwater_kernels.draws import MAX_RANKS, Draws, Repeats, check


def draw(logits: Tensor, draws: Draws, stage: int, repeats: Repeats | None = None) -> Tensor:
    """An index a row, int64 [b], of logits fp32 [b, V]; `reference.draw` but for the last bit of a probability.

    Ties go to the lower index.  Safe to capture in a CUDA graph: no synchronisation, and the result is written whole.
    """
    check(logits, draws, repeats)
    require_supported("draw", logits)
    return run_draw(sampling_sources(), logits, draws, stage, repeats)


def run_draw(kernels: Any, logits: Tensor, draws: Draws, stage: int, repeats: Repeats | None = None) -> Tensor:
    """`draw` with these kernels; tests give them interpreted."""
    check(logits, draws, repeats)
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        width = 0 if repeats is None else repeats.window.shape[1]
        padded = max(MAX_RANKS, 1 << (size - 1).bit_length())
        kernels.draw_kernel[(rows,)](
            logits,
            draws.seeds,
            draws.steps,
            draws.temperature,
            draws.top_p,
            draws.top_k,
            out if repeats is None else repeats.window,
            out if repeats is None else repeats.ids,
            out if repeats is None else repeats.is_first.view(torch.uint8),
            out,
            stage,
            0 if repeats is None else repeats.num_semantic,
            1.0 if repeats is None else repeats.temperature,
            1.0 if repeats is None else repeats.top_p,
            V=size,
            SIZE=padded,
            MAX_K=draws.max_top_k,
            W=width,
            CW=1 if repeats is None else repeats.window.shape[2],
            num_warps=8 if padded > 2048 else 4,
            enable_fp_fusion=True,
        )
    return out
