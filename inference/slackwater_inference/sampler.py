"""How a token is drawn from logits.

Owns the filter order, repetition-aware sampling and the counter-based noise.  Does not own the
window's storage.  Called by the model runner; every rule is engine-api.md section 1.7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TOP_K = 30
RAS_TEMPERATURE = 1.0
RAS_TOP_P = 0.9
WINDOW_FRAMES = 10

# Stages of one frame, each with noise of its own.  Both draws happen at every step.
STAGE_NORMAL = 0
STAGE_HIGH = 1  # the draw taken instead when the normal one repeats
_FIRST_CODEBOOK_STAGE = 2

_MASK = 0xFFFFFFFF


def codebook_stage(codebook: int) -> int:
    """The stage that draws residual codebook `codebook` (1 is the first)."""
    return _FIRST_CODEBOOK_STAGE + codebook - 1


def noise(seeds: Tensor, steps: Tensor, num_stages: int) -> Tensor:
    """Uniforms in (0, 1), fp32 [b, num_stages, MAX_TOP_K], for seeds and steps int64 [b].

    A counter-based generator: row r depends on its own seed and step only, not on the rows beside it,
    on the batch's size or on anything drawn before.
    """
    row = _mix(_mix(seeds & _MASK) ^ (seeds >> 32))
    row = _mix(row + steps * 0x9E3779B1)
    counter = torch.arange(1, num_stages * MAX_TOP_K + 1) * 0x85EBCA77
    bits = _mix(_mix(row[:, None] + counter))
    # 23 bits: with more, fp32 would round the largest value up to 1, whose logarithm is 0.
    return ((bits >> 9).float() + 0.5).mul_(2.0**-23).view(-1, num_stages, MAX_TOP_K)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift, multiply) in int64, where both products stay below 2**63."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The MAX_TOP_K best of each row, best first.  logits, mass: fp32 [b, k]; index: int64 [b, k].

    mass: cumulative probability, of the softmax over the whole row without temperature.
    """

    logits: Tensor
    index: Tensor
    mass: Tensor


def candidates(logits: Tensor) -> Candidates:
    """Sort out the best of logits fp32 [b, v].  Whatever cannot be spoken must be masked or cut before."""
    top, index = torch.topk(logits, min(MAX_TOP_K, logits.shape[-1]))
    mass = logits.softmax(-1).gather(-1, index).cumsum(-1)
    return Candidates(top, index, mass)


def draw(from_: Candidates, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniforms: Tensor) -> Tensor:
    """One index a row, int64 [b].

    temperature, top_p: fp32 [b, 1].   top_k: int64 [b, 1].   uniforms: fp32 [b, MAX_TOP_K].
    The filter comes before the temperature; the token that crosses top_p goes, too; the best always stays.
    """
    k = from_.logits.shape[-1]
    removed = (from_.mass > top_p) | (torch.arange(k) >= top_k)
    removed[:, 0] = False
    scaled = (from_.logits / temperature.clamp_min(1e-5)).masked_fill_(removed, float("-inf"))
    # An exponential race: p / -log(u) is largest at i with probability p_i.
    winner = (scaled.softmax(-1) / -uniforms[:, :k].log()).argmax(-1, keepdim=True)
    return from_.index.gather(1, winner).squeeze(1)


def repeats(token_ids: Tensor, window: Tensor, is_semantic: Tensor) -> Tensor:
    """Which rows would repeat a semantic token of their window: bool [b].

    token_ids: int64 [b].   window: int32 [b, W, cw]; only the ids (column 0) are compared.
    """
    return (window[:, :, 0] == token_ids[:, None]).any(-1) & is_semantic
