"""MXFP8 pools and block tables as they are in the middle of serving: pages in no order, and what no row has harmful.

Owns the data that tests give to attention over MXFP8.  Owns no check.  Imported by nothing of the package.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slackwater_kernels.attention_layout import HEAD, PagedRows
from slackwater_kernels.core import E4M3_NAN
from slackwater_kernels.mx_attention_layout import MxKvPool
from slackwater_kernels.reference_mx_attention import quantize_kv_mx
from slackwater_kernels.testing import NO_PAGE


def heads_of_tokens(tokens: int, num_heads: int, *, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """bf16 [tokens, heads, 128]; each block of 32 has a size of its own, so that no scale is like another."""
    generator = torch.Generator(device).manual_seed(1000 * tokens + seed)
    x = torch.randn(tokens, num_heads, HEAD, generator=generator, device=device)
    sizes = torch.exp(0.7 * torch.randn(tokens, num_heads, 4, generator=generator, device=device))
    return (x * sizes.repeat_interleave(32, -1)).bfloat16()


def scattered_mx(
    lengths: Sequence[int],
    *,
    num_kv_heads: int,
    page_size: int,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    seed: int = 0,
) -> tuple[MxKvPool, PagedRows]:
    """A pool with these rows' tokens in shuffled pages, and the rows.

    A slot that no row has is NaN, and so are its scales.  max_length: the longest row's if None.
    """
    longest = max(*lengths, 1) if max_length is None else max_length
    width = -(-max(*lengths, longest) // page_size) + 1
    num_pages = sum(-(-length // page_size) for length in lengths) + 3
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    table = torch.tensor(NO_PAGE, dtype=torch.int32, device=device).repeat(len(lengths), width)[:, :width].contiguous()
    pool = MxKvPool.zeros(num_pages, num_kv_heads, page_size, device)
    for part, harm in ((pool.keys, E4M3_NAN), (pool.values, E4M3_NAN), (pool.key_scales, -1)):
        part.fill_(harm)
    pool.value_scales.fill_(torch.nan)
    taken = 0
    for b, length in enumerate(lengths):
        count = -(-length // page_size)
        table[b, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(length, device=device)
        place = table[b].long()[position // page_size], slice(None), position % page_size
        keys, values = (
            heads_of_tokens(length, num_kv_heads, device=device, seed=2 * b + part + 100 * seed) for part in range(2)
        )
        parts = pool.keys, pool.key_scales, pool.values, pool.value_scales
        for part, new in zip(parts, quantize_kv_mx(keys, values), strict=True):
            part[place] = new
    return pool, PagedRows(table, torch.tensor(lengths, dtype=torch.int32, device=device), longest)
