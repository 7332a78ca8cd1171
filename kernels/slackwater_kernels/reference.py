"""Plain-torch references: slow, obviously right, and what every kernel is tested against.

Owns no storage and mutates nothing but a pool that it is told to append to.  Called by tests, by the canary, and by
whoever quantises where there is no GPU.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from slackwater_kernels.attention_layout import (
    HEAD,
    KvPool,
    NewTokens,
    PagedRows,
    Pool,
    check_append,
    check_append_tokens,
    check_decode,
    check_extend,
    check_prefill,
)
from slackwater_kernels.core import GROUP, MX_BLOCK, LayoutError, MxRule, padded
from slackwater_kernels.draws import Draws, Repeats, check
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

_MASK = 0xFFFFFFFF


def prev_tokens_shift(prev: Tensor, next_tokens: Tensor) -> Tensor:
    """The window after one shift, as a new tensor.

    prev: int32 [bs, W, cw].   next_tokens: int32 [bs, cw].   Returns int32 [bs, W, cw].
    """
    return torch.cat((prev[:, 1:], next_tokens[:, None]), dim=1)


def noise(seeds: Tensor, steps: Tensor, stage: int, max_top_k: int) -> Tensor:
    """Uniforms in (0, 1), fp32 [b, max_top_k], counted from a row's seed and step and from the stage alone."""
    row = _mixed(_mixed(seeds & _MASK) ^ (seeds >> 32))
    row = _mixed(row + steps * 0x9E3779B1)
    counter = (torch.arange(1, max_top_k + 1, device=seeds.device) + stage * max_top_k) * 0x85EBCA77
    bits = _mixed(_mixed(row[:, None] + counter))
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit finaliser in int64, where both products stay below 2**63."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def draw(logits: Tensor, draws: Draws, stage: int, repeats: Repeats | None = None) -> Tensor:
    """An index a row, int64 [b], of logits fp32 [b, V].

    The best `max_top_k` are looked at, ties going to the lower index.  The token with which the mass crosses top_p
    goes, and so do those from rank top_k on; the best always stays.  Then the temperature, and an exponential race.
    A row that would repeat a semantic token of its window takes the draw of the next stage, with the settings for that.
    """
    check(logits, draws, repeats)
    best, index = torch.sort(logits, dim=-1, descending=True, stable=True)
    best, index = best[:, : draws.max_top_k], index[:, : draws.max_top_k]
    mass = logits.softmax(-1).gather(-1, index).cumsum(-1)

    def drawn(temperature: Tensor, top_p: Tensor, stage: int) -> Tensor:
        rank = torch.arange(best.shape[1], device=best.device)
        is_out = ((mass > top_p[:, None]) | (rank >= draws.top_k[:, None])) & (rank > 0)
        scaled = (best / temperature[:, None].clamp_min(1e-5)).masked_fill(is_out, -torch.inf)
        uniforms = noise(draws.seeds, draws.steps, stage, draws.max_top_k)[:, : best.shape[1]]
        won = (scaled.softmax(-1) / -uniforms.log()).argmax(-1, keepdim=True)
        return index.gather(1, won).squeeze(1)

    first = drawn(draws.temperature, draws.top_p, stage)
    if repeats is None:
        return first
    temperature = torch.full_like(draws.temperature, repeats.temperature)
    second = drawn(temperature, torch.full_like(draws.top_p, repeats.top_p), stage + 1)
    again = (repeats.window[:, :, 0] == repeats.ids[first][:, None]).any(-1)
    return torch.where(again & (first < repeats.num_semantic) & ~repeats.is_first, second, first)


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


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Any float [..., 128] to (codes uint8 [..., 128], scales fp32 [...]), by the rule of `quantize_activations`."""
    heads = finite(x)
    multiplier, scale = activation_scale(heads.abs().amax(-1))
    return to_e4m3(heads * multiplier[..., None]), scale


def append_kv(keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows) -> None:
    """Put each row's last token, keys and values [B, kv heads, 128], into its page, in place."""
    check_append(keys, values, pool, rows)
    for b, length in enumerate(rows.lengths.tolist()):
        if 0 < length <= rows.width * pool.page_size:
            _put(keys[b], values[b], pool, rows, b, length - 1)


def append_tokens(keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows, new: NewTokens) -> None:
    """Put each row's new tokens, of keys and values [T, kv heads, 128], into their pages, in place.

    A row that `new` or its length makes wrong is left out.
    """
    check_append_tokens(keys, values, pool, rows, new)
    for b, begin, end, is_right in _rows_of(new, keys.shape[0]):
        length = int(rows.lengths[b])
        if is_right and end - begin <= length <= rows.max_length:
            for token in range(begin, end):
                _put(keys[token], values[token], pool, rows, b, length - end + token)


def decode_attention(q: Tensor, pool: Pool, rows: PagedRows, scale: float | None = None) -> Tensor:
    """softmax(q k * scale) v from the stored values, fp64 [B, heads, 128]; q: bf16 [B, heads, 128].

    An idle row is zeros; one that is longer than max_length or names a page that the pool has not is NaN.
    """
    check_decode(q, pool, rows)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b, length in enumerate(rows.lengths.tolist()):
        if length == 0:
            continue
        pages = rows.table[b, : -(-length // pool.page_size)].long()
        if not 0 < length <= rows.max_length or pages.min() < 0 or pages.max() >= pool.num_pages:
            out[b] = torch.nan
            continue
        out[b] = _attended(q[b], *_tokens(pool, pages), length, scale)
    return out


def extend_attention(q: Tensor, pool: Pool, rows: PagedRows, new: NewTokens, scale: float | None = None) -> Tensor:
    """softmax(q k * scale) v over the row's tokens up to each new one, fp64 [T, heads, 128]; q: bf16 [T, heads, 128].

    Nobody's tokens are zeros; those of a row that `new`, its length or its pages make wrong are NaN.
    """
    check_extend(q, pool, rows, new, scale)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b, begin, end, is_right in _rows_of(new, q.shape[0]):
        if begin == end:
            continue
        length = int(rows.lengths[b])
        pages = rows.table[b, : -(-length // pool.page_size)].long()
        is_right = is_right and end - begin <= length <= rows.max_length
        if not is_right or pages.min() < 0 or pages.max() >= pool.num_pages:
            out[begin:end] = torch.nan
            continue
        keys, values = _tokens(pool, pages)
        for token in range(begin, end):
            out[token] = _attended(q[token], keys, values, length - end + token + 1, scale)
    return out


def prefill_attention(q: Tensor, keys: Tensor, values: Tensor, new: NewTokens, scale: float | None = None) -> Tensor:
    """softmax(q k * scale) v over the row's new tokens up to each of them, fp64 [T, heads, 128].

    q: bf16 [T, heads, 128].   keys, values: bf16 [T, kv heads, 128].  Nobody's tokens and wrong rows as
    `extend_attention` has them.
    """
    check_prefill(q, keys, values, new, scale)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for _, begin, end, is_right in _rows_of(new, q.shape[0]):
        if not is_right:
            out[begin:end] = torch.nan
            continue
        own_keys, own_values = (part[begin:end].double().transpose(0, 1) for part in (keys, values))
        for token in range(begin, end):
            out[token] = _attended(q[token], own_keys, own_values, token - begin + 1, scale)
    return out


def _attended(q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float | None) -> Tensor:
    """fp64 [heads, 128] of one query [heads, 128] over the first tokens of keys and values [kv heads, tokens, 128]."""
    queries = q.double().view(keys.shape[0], -1, HEAD)
    logits = queries @ keys[:, :length].transpose(1, 2) * (HEAD**-0.5 if scale is None else scale)
    return (logits.softmax(-1) @ values[:, :length]).view(-1, HEAD)


def _rows_of(new: NewTokens, num_tokens: int) -> Iterator[tuple[int, int, int, bool]]:
    """(row, its first token, the one behind its last, whether it is as `NewTokens` has it) of each row."""
    starts = new.starts.tolist()
    begin = min(max(starts[0], 0), num_tokens)
    for b, (start, stop) in enumerate(pairwise(starts)):
        end = max(begin, min(stop, num_tokens))
        yield b, begin, end, start == begin and start <= stop <= num_tokens and stop - start <= new.max_new
        begin = end


def _put(keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows, b: int, position: int) -> None:
    """One token's keys and values [kv heads, 128] to its place, where the pool has its page."""
    page, slot = int(rows.table[b, position // pool.page_size]), position % pool.page_size
    if not 0 <= page < pool.num_pages:
        return
    place = page, slice(None), slot
    if isinstance(pool, KvPool):
        pool.keys[place], pool.values[place] = keys, values
        return
    pool.keys[place], pool.key_scales[place] = quantize_kv(keys)
    codes, pool.value_scales[place] = quantize_kv(values)
    pool.turned[page, :, :, slot] = torch.where(pool.value_scales[place].isnan()[:, None], 0, codes)


def _tokens(pool: Pool, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of these pages one after the other, fp64 [kv heads, tokens, 128]."""
    if isinstance(pool, KvPool):
        keys, values = pool.keys[pages].double(), pool.values[pages].double()
    else:
        codes = pool.turned[pages].transpose(2, 3)
        keys = from_e4m3(pool.keys[pages]).double() * pool.key_scales[pages].double()[..., None]
        values = from_e4m3(codes).double() * pool.value_scales[pages].double()[..., None]
    shape = pool.num_kv_heads, -1, HEAD
    return keys.transpose(0, 1).reshape(shape), values.transpose(0, 1).reshape(shape)


def _amax(groups: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return groups.abs().amax(dim) if groups.numel() else groups.abs().sum(dim)


def _rows(name: str, x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or not x.is_floating_point():
        raise LayoutError(f"{name} must be float [rows, K], got {x.dtype} {list(x.shape)}; flatten what leads")
    return x.shape[0], x.shape[1]
