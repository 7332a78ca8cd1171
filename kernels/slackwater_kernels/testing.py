"""Pools and block tables as they are in the middle of serving: pages in no order, and what no row reads made harmful.

Owns the data that tests and the bench give to attention, and one bound of its tests.  Owns no check.  Imported by
nothing of the package.
"""

from collections.abc import Sequence

import torch

from slackwater_kernels.attention_layout import HEAD, Fp8KvPool, KvPool, NewTokens, PagedRows, Pool
from slackwater_kernels.core import E4M3_NAN
from slackwater_kernels.reference import _tokens, quantize_kv

NO_PAGE = (-7, 1 << 30)  # behind a row's last page; to read there would be seen, or end the process


def scattered(
    lengths: Sequence[int],
    *,
    num_kv_heads: int,
    page_size: int,
    fp8: bool,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    seed: int = 0,
) -> tuple[Pool, PagedRows]:
    """A pool with these rows' tokens in shuffled pages, and the rows.

    Each token and head has a size of its own, so that no scale is like another.  A slot that no row has is NaN, and so
    is its scale; values in FP8 are the largest number there, as their pool has no NaN.  max_length: the longest row's
    if None.
    """
    generator = torch.Generator(device).manual_seed(seed)
    longest = max(*lengths, 1) if max_length is None else max_length
    width = -(-max(*lengths, longest) // page_size) + 1
    num_pages = sum(-(-length // page_size) for length in lengths) + 3
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    table = torch.tensor(NO_PAGE, dtype=torch.int32, device=device).repeat(len(lengths), width)[:, :width].contiguous()
    pool = (Fp8KvPool if fp8 else KvPool).zeros(num_pages, num_kv_heads, page_size, device)
    for part in (pool.keys, pool.values) if isinstance(pool, KvPool) else (pool.key_scales, pool.value_scales):
        part.fill_(torch.nan)
    if isinstance(pool, Fp8KvPool):
        pool.keys.fill_(E4M3_NAN)
        pool.values.fill_(E4M3_NAN - 1)
    taken = 0
    for b, length in enumerate(lengths):
        count = -(-length // page_size)
        table[b, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(length, device=device)
        page, slot, every = table[b].long()[position // page_size], position % page_size, slice(None)
        for is_key in (True, False):
            shape = length, num_kv_heads, HEAD
            x = torch.randn(shape, generator=generator, device=device)
            x *= torch.exp(0.5 * torch.randn((*shape[:2], 1), generator=generator, device=device))
            if isinstance(pool, KvPool):
                (pool.keys if is_key else pool.values)[page, every, slot] = x.bfloat16()
            elif is_key:
                pool.keys[page, every, slot], pool.key_scales[page, every, slot] = quantize_kv(x)
            else:
                pool.turned[page, every, every, slot], pool.value_scales[page, every, slot] = quantize_kv(x)
    return pool, PagedRows(table, torch.tensor(lengths, dtype=torch.int32, device=device), longest)


def ragged(
    counts: Sequence[int],
    *,
    ahead: int = 0,
    behind: int = 0,
    max_new: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[NewTokens, int]:
    """Rows with so many new tokens each, one after the other, and how many tokens the flat batch has.

    ahead, behind: tokens in front of the rows' and behind them that are nobody's.   max_new: the most of a row if None.
    """
    ends = torch.tensor([0, *counts]).cumsum(0) + ahead
    starts = ends.to(device=device, dtype=torch.int32)
    return NewTokens(starts, max(*counts, 1) if max_new is None else max_new), int(ends[-1]) + behind


def vectors(rows: int, num_heads: int, *, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    """bf16 [rows, heads, 128], each head of a size of its own; the same for the same rows and seed."""
    generator = torch.Generator(device).manual_seed(rows + seed)
    sizes = torch.exp(torch.randn(rows, num_heads, 1, generator=generator, device=device))
    return (torch.randn(rows, num_heads, HEAD, generator=generator, device=device) * sizes).bfloat16()


def awkward_lengths(rows: int, longest: int) -> list[int]:
    """Lengths up to the longest: it, those beside the boundaries of pages, blocks and chunks, an idle row, others."""
    beside = [edge + by for edge in (16, 256, 64, 512, 1024) for by in (-1, 0, 1)]
    some = [longest, 1, 7, *beside[:9], 0, *beside[9:]]
    return [min(some[b], longest) if b < len(some) else 1 + b * 7919 % longest for b in range(rows)]


def lost_of_small_weights(pool: Pool, rows: PagedRows) -> torch.Tensor:
    """fp64 [rows, kv heads]: what a row's smallest weights can lose in all.

    A weight under 2^-14 of the largest is kept to 2^-25 of it: a subnormal number of f16, or the last of three FP8
    parts.  It is seen where a token of large weight has the value 0 and so next to nothing is left of the result.
    """
    lost = torch.zeros(rows.num_rows, pool.num_kv_heads, dtype=torch.float64, device=pool.keys.device)
    for b, length in enumerate(rows.lengths.tolist()):
        if length:
            _, values = _tokens(pool, rows.table[b, : -(-length // pool.page_size)].long())
            lost[b] = length * values[:, :length].abs().amax((1, 2)) * 2.0**-25
    return lost
