"""Plain-torch references of attention over MXFP8, and by how much a kernel may differ from them, element by element.

Owns no storage and mutates nothing but a pool that it is told to append to.  Called by tests, and by whoever attends
where there is no Blackwell GPU.

Attention has two forms.  The exact one takes stored keys and values as they are; its bound is what quantising queries
and weights may move.  The other one goes through the blocks as a kernel does and quantises what it quantises; its bound
is what sums in fp32 may move, so that a wrong scale cannot pass for an error of quantisation.  Both sum in fp64.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from slackwater_kernels.attention_layout import HEAD, NewTokens, PagedRows, check_prefill, positive_scale
from slackwater_kernels.core import MX_BLOCK, MxRule
from slackwater_kernels.layout import CanonicalMx
from slackwater_kernels.mx_attention_layout import (
    MxKvPool,
    check_append_mx,
    check_append_tokens_mx,
    check_decode_mx,
    check_extend_mx,
)
from slackwater_kernels.numerics import e8m0_byte, e8m0_reciprocal, e8m0_value, from_e4m3, to_e4m3
from slackwater_kernels.reference import dequantize_mx, quantize_kv, quantize_mx

_LOGIT = 2.0**-18  # what a sum of 128 products in fp32 may lose, of the sum of their magnitudes
_WEIGHT = 2.0**-16  # what the approximate exponential and the sums over tokens may
_MOST = 30.0  # a displacement of logits above which a bound says nothing
_E4M3, _LEAST = 2.0**-4, 2.0**-10  # half a step of a code: of its value, and where that is below 2^-6


@dataclass(frozen=True, slots=True)
class Steps:
    """How a kernel goes through a row's tokens: blocks in order in chunks, chunks in order; with None there is one."""

    block: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """What a row has stored, fp64.

    keys, codes: [kv heads, tokens, 128], codes of values; scales: [kv heads, tokens].
    """

    keys: Tensor
    codes: Tensor
    scales: Tensor


_Attend = Callable[[Tensor, _Row, Tensor], Tensor]
"""Queries bf16 [n, heads, 128], a row and positions [n] to (values, bound), fp64 [2, n, heads, 128]."""


def quantize_kv_mx(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Any float [..., 128] each to what a pool holds: codes of keys, their words, codes of values, their scales.

    Keys as `quantize_mx` does by rceil, values as `quantize_kv`; values with a NaN have codes 0 beside their scale NaN.
    """
    mx = quantize_mx(keys.reshape(-1, HEAD))
    codes, scales = quantize_kv(values)
    codes = torch.where(scales.isnan()[..., None], torch.zeros_like(codes), codes)
    return mx.codes.view(keys.shape), mx.scales.view(torch.int32).view(keys.shape[:-1]), codes, scales


def append_kv_mx(keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows) -> None:
    """Put each row's last token, keys and values [B, kv heads, 128], into its page, in place."""
    check_append_mx(keys, values, pool, rows)
    for b, length in enumerate(rows.lengths.tolist()):
        if 0 < length <= rows.width * pool.page_size:
            _put(keys[b], values[b], pool, rows, b, length - 1)


def append_tokens_mx(keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens) -> None:
    """Put each row's new tokens, of keys and values [T, kv heads, 128], into their pages, in place."""
    check_append_tokens_mx(keys, values, pool, rows, new)
    lengths = rows.lengths.tolist()
    for b, begin, end, is_wrong in _rows(new, keys.shape[0]):
        if is_wrong or not end - begin <= lengths[b] <= rows.max_length:
            continue
        for token in range(begin, end):
            _put(keys[token], values[token], pool, rows, b, lengths[b] - end + token)


def decode_attention(q: Tensor, pool: MxKvPool, rows: PagedRows, scale: float | None = None) -> Tensor:
    """softmax(q k * scale) v from the stored values, fp64 [B, heads, 128]; q: bf16 [B, heads, 128].

    An idle row is zeros; one that is longer than max_length or names a page that the pool has not is NaN.
    """
    return decode_bounded(q, pool, rows, scale)[0]


def decode_bounded(
    q: Tensor, pool: MxKvPool, rows: PagedRows, scale: float | None = None, steps: Steps | None = None
) -> tuple[Tensor, Tensor]:
    """`decode_attention`, or what a kernel of these steps computes, and the bound; bf16's one rounding comes on top."""
    check_decode_mx(q, pool, rows)
    attend = _attend(scale, steps)
    out = torch.zeros(2, *q.shape, dtype=torch.float64, device=q.device)
    for b, length in enumerate(rows.lengths.tolist()):
        if length:
            row = _stored(pool, rows, b, length)
            at = torch.tensor([length - 1], device=q.device)
            out[:, b : b + 1] = torch.nan if row is None else attend(q[b : b + 1], row, at)
    return out[0], out[1]


def extend_attention(q: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens, scale: float | None = None) -> Tensor:
    """The same of each new token over its row's tokens up to itself, fp64 [T, heads, 128].

    Tokens that no row has are zeros, those of a wrong row NaN.
    """
    return extend_bounded(q, pool, rows, new, scale)[0]


def extend_bounded(
    q: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens, scale: float | None = None, steps: Steps | None = None
) -> tuple[Tensor, Tensor]:
    """`extend_attention`, or what a kernel of these steps computes, and the bound."""
    check_extend_mx(q, pool, rows, new)
    attend, lengths = _attend(scale, steps), rows.lengths.tolist()
    out = torch.zeros(2, *q.shape, dtype=torch.float64, device=q.device)
    for b, begin, end, is_wrong in _rows(new, q.shape[0]):
        if begin == end:
            continue
        row = None if is_wrong or lengths[b] < end - begin else _stored(pool, rows, b, lengths[b])
        positions = torch.arange(begin, end, device=q.device) - end + lengths[b]
        out[:, begin:end] = torch.nan if row is None else attend(q[begin:end], row, positions)
    return out[0], out[1]


def prefill_attention(q: Tensor, keys: Tensor, values: Tensor, new: NewTokens, scale: float | None = None) -> Tensor:
    """`extend_attention` of rows with nothing before their new tokens; keys, values: bf16 [T, kv heads, 128]."""
    return prefill_bounded(q, keys, values, new, scale)[0]


def prefill_bounded(
    q: Tensor, keys: Tensor, values: Tensor, new: NewTokens, scale: float | None = None, steps: Steps | None = None
) -> tuple[Tensor, Tensor]:
    """`prefill_attention`, or what a kernel of these steps computes, and the bound."""
    check_prefill(q, keys, values, new)
    attend = _attend(scale, steps)
    parts = quantize_kv_mx(keys, values)
    out = torch.zeros(2, *q.shape, dtype=torch.float64, device=q.device)
    for _, begin, end, is_wrong in _rows(new, q.shape[0]):
        if begin == end:
            continue
        row = _row(*(part[begin:end].transpose(0, 1) for part in parts))
        positions = torch.arange(end - begin, device=q.device)
        out[:, begin:end] = torch.nan if is_wrong else attend(q[begin:end], row, positions)
    return out[0], out[1]


def _attend(scale: float | None, steps: Steps | None) -> _Attend:
    factor = positive_scale(scale)
    if steps is None:
        return lambda q, row, positions: _exact(q, row, positions, factor)
    return lambda q, row, positions: _stepwise(q, row, positions, factor, steps)


def _exact(q: Tensor, row: _Row, positions: Tensor, scale: float) -> Tensor:
    is_seen = _is_seen(row, positions)
    logits, moved = (_products(part, row) * scale for part in (q.double(), _quantised_queries(q)))
    weights = logits.masked_fill(~is_seen, -torch.inf).softmax(-1)
    carried = torch.where(is_seen, weights * row.scales[:, None], 0.0)
    # If no logit moves by more than d, no weight does by more than e^(2 d).  Then comes half a step of its code, which
    # for the least of 32 is 2^-10 of at most a 224th of the largest.
    displaced = torch.where(is_seen, (moved - logits).abs(), 0.0).amax(-1, keepdim=True)
    grown = torch.exp(2 * displaced.clamp(max=_MOST))
    least = carried.amax(-1, keepdim=True) * (_LEAST / 224) * is_seen
    bound = _summed(carried, row.codes.abs()) * (grown * (1 + _E4M3) - 1) + _summed(least, row.codes.abs()) * grown
    return torch.stack((_summed(carried, row.codes), bound)).reshape(2, *q.shape)


def _stepwise(q: Tensor, row: _Row, positions: Tensor, scale: float, steps: Steps) -> Tensor:
    queries, is_seen = _quantised_queries(q), _is_seen(row, positions)
    logits = _products(queries, row).masked_fill(~is_seen, -torch.inf) * (scale * math.log2(math.e))
    magnitudes = torch.where(is_seen, _products(queries.abs(), replace(row, keys=row.keys.abs())), 0.0)
    loss = 2 * magnitudes.amax(-1, keepdim=True) * (scale * _LOGIT) + _WEIGHT
    tokens = row.keys.shape[1]
    chunks: list[tuple[Tensor, Tensor, Tensor]] = []
    for first in range(0, tokens, steps.chunk or tokens):
        top, norm, total = torch.tensor(-torch.inf), torch.tensor(0.0), torch.tensor(0.0)
        for start in range(first, min(first + (steps.chunk or tokens), tokens), steps.block):
            block = slice(start, min(start + steps.block, tokens))
            highest = torch.maximum(top, logits[..., block].amax(-1, keepdim=True))
            taken = torch.where(highest == -torch.inf, 0.0, highest)
            weights, shrink = torch.exp2(logits[..., block] - taken), torch.exp2(top - taken)
            carried = torch.where(is_seen[..., block], weights * row.scales[:, None, block], 0.0)
            stored, spread = _quantised_weights(carried, loss)
            codes = row.codes[:, block]
            added = _summed(stored, codes), _summed(spread, codes.abs()), _summed(carried, codes.abs())
            norm, total = norm * shrink + weights.sum(-1, keepdim=True), total * shrink + torch.stack(added)
            top = highest
        chunks.append((top, norm, total))
    tops, norms, sums = (torch.stack(part) for part in zip(*chunks, strict=True))
    parts = torch.exp2(tops - tops.amax(0))
    out, spread, size = (parts[:, None] * sums).sum(0) / (parts * norms).sum(0)
    return torch.stack((out, spread + size * 2 * loss)).reshape(2, *q.shape)


def _quantised_queries(q: Tensor) -> Tensor:
    """fp64 [n, heads, 128] of queries that went through MXFP8."""
    return dequantize_mx(quantize_mx(q.reshape(-1, HEAD))).view(q.shape)


def _quantised_weights(carried: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """(the values that weights [..., tokens] have in MXFP8, how far apart they are if the weights lose this share)."""
    tokens = carried.shape[-1]
    groups = torch.nn.functional.pad(carried, (0, -tokens % MX_BLOCK))
    groups = groups.view(*groups.shape[:-1], -1, MX_BLOCK)
    ends = groups * (1 - loss[..., None]), groups * (1 + loss[..., None])
    possible = torch.stack([_in_mx(x, under) for x in ends for under in ends])
    stored, spread = _in_mx(groups, groups), possible.amax(0) - possible.amin(0)
    return stored.flatten(-2)[..., :tokens], spread.flatten(-2)[..., :tokens]


def _in_mx(groups: Tensor, under: Tensor) -> Tensor:
    """fp64 [..., 32] as E4M3 under the exponents that other values of this shape would give."""
    byte = e8m0_byte(under.amax(-1).float(), MxRule.RCEIL)
    codes = to_e4m3(groups.float() * e8m0_reciprocal(byte)[..., None])
    return from_e4m3(codes).double() * e8m0_value(byte).double()[..., None]


def _products(q: Tensor, row: _Row) -> Tensor:
    """Of queries [n, heads, 128] with all tokens: [n, kv heads, sharers, tokens]."""
    grouped = q.reshape(q.shape[0], row.keys.shape[0], -1, HEAD)
    return torch.einsum("nhsd,htd->nhst", grouped, row.keys)


def _summed(weights: Tensor, codes: Tensor) -> Tensor:
    """[n, kv heads, sharers, tokens] with [kv heads, tokens, 128]."""
    return torch.einsum("nhst,htd->nhsd", weights, codes)


def _is_seen(row: _Row, positions: Tensor) -> Tensor:
    """[n, 1, 1, tokens]: whether a query has a token."""
    tokens = torch.arange(row.keys.shape[1], device=positions.device)
    return (tokens <= positions[:, None])[:, None, None]


def _stored(pool: MxKvPool, rows: PagedRows, b: int, length: int) -> _Row | None:
    """What a row has stored; None if its length is wrong or the pool has not all of its pages."""
    if not 0 < length <= rows.max_length:
        return None
    pages = rows.table[b, : -(-length // pool.page_size)].long()
    if pages.min() < 0 or pages.max() >= pool.num_pages:
        return None
    parts = (part[pages].transpose(0, 1).flatten(1, 2)[:, :length] for part in _parts(pool))
    return _row(*parts)


def _row(keys: Tensor, words: Tensor, codes: Tensor, scales: Tensor) -> _Row:
    """From [kv heads, tokens, 128], and [kv heads, tokens] of words and scales."""
    num_heads, tokens = scales.shape
    octets = words.contiguous().view(num_heads * tokens, 1).view(torch.uint8)
    mx = CanonicalMx(keys.contiguous().view(-1, HEAD), octets, MxRule.RCEIL)
    values = from_e4m3(codes.contiguous()).double()
    return _Row(dequantize_mx(mx).view(num_heads, tokens, HEAD), values, scales.double())


def _rows(new: NewTokens, num_tokens: int) -> Iterator[tuple[int, int, int, bool]]:
    """(row, its first token, the one behind its last, whether its starts are wrong), as `NewTokens` says."""
    starts = new.starts.tolist()
    begin = 0
    for b, (start, stop) in enumerate(pairwise(starts)):
        begin = max(begin, min(start, num_tokens))
        is_wrong = start != begin or stop < start or stop > num_tokens or stop - start > new.max_new
        yield b, begin, max(begin, min(stop, num_tokens)), is_wrong


def _put(keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows, b: int, position: int) -> None:
    """Put a token's heads into their page, if the pool has it."""
    page = int(rows.table[b, position // pool.page_size])
    if 0 <= page < pool.num_pages:
        for part, new in zip(_parts(pool), quantize_kv_mx(keys, values), strict=True):
            part[page, :, position % pool.page_size] = new


def _parts(pool: MxKvPool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pool.keys, pool.key_scales, pool.values, pool.value_scales
