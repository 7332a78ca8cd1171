"""Attention of many queries a row, over pages or over keys beside them, and the new tokens of all rows put into pages.

Owns contracts and launches; how queries and keys are divided is `plan`'s, where bytes lie `attention_layout`'s.  Owns
no pool.  Deterministic; a query's bits follow from its position and the tokens up to it: not from the other rows, nor
from the launch, nor from how many of its row's tokens are new.  So a prompt in chunks has the bits of a prompt at once.
Called by the model inside a CUDA graph, once a layer.
"""

import math
from typing import Any

import torch
from torch import Tensor, float8_e4m3fn

from slackwater_kernels.attention_layout import (
    NewTokens,
    PagedRows,
    Pool,
    check_append_tokens,
    check_extend,
    check_prefill,
    positive_scale,
    scales_of,
)
from slackwater_kernels.core import KvForm
from slackwater_kernels.dispatch import extend_sources, require_supported
from slackwater_kernels.plan import ExtendLaunch, append_tokens_each, extend_launch, flat_parts
from slackwater_kernels.quantize import launch_options

_LOG2E = math.log2(math.e)


def append_tokens(keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows, new: NewTokens) -> None:
    """Put each row's new tokens, its last ones, into their pages; one launch.

    keys, values: bf16 [T, kv heads, 128], row-major, not changed.   The pool is mutated as `append_kv` does it.  Tokens
    that are nobody's, or of a row that `new` or its length makes wrong, or whose page the pool has not, are not
    written.  `rows.lengths` counts the new tokens.  Safe to capture in a CUDA graph.
    """
    check_append_tokens(keys, values, pool, rows, new)
    require_supported("append_tokens", keys)
    run_append_tokens(extend_sources(), keys, values, pool, rows, new)


def extend_attention(q: Tensor, pool: Pool, rows: PagedRows, new: NewTokens, scale: float | None = None) -> Tensor:
    """softmax(q k * scale) v of each new token over its row's tokens up to itself: bf16 [T, heads, 128], rounded once.

    q: bf16 [T, heads, 128], row-major; `heads` / kv heads neighbours share a head of keys, which is never expanded.
    The new tokens are in the pool already, and `rows.lengths` counts them.   scale: 1 / sqrt(128) if None; above 0.
    The sum is fp32.  Nobody's tokens are zeros.  A row is NaN, and no other, if `new` or its length makes it wrong (it
    has fewer tokens than new ones, or more than max_length) or if it names a page that the pool has not.  A value that
    is no finite number makes NaN the heads that attend to it and nothing else.  Safe to capture in a CUDA graph: no
    length is read on the host, and the result is written whole.
    """
    check_extend(q, pool, rows, new, scale)
    require_supported("extend_attention", q)
    return run_extend_attention(extend_sources(), q, pool, rows, new, scale)


def prefill_attention(q: Tensor, keys: Tensor, values: Tensor, new: NewTokens, scale: float | None = None) -> Tensor:
    """`extend_attention` of rows that have no token before their new ones, with their keys and values beside them.

    keys, values: bf16 [T, kv heads, 128], row-major, in the same flat batch as q.  The bits are those that
    `extend_attention` has where these are appended to a bf16 pool.
    """
    check_prefill(q, keys, values, new, scale)
    require_supported("prefill_attention", q)
    return run_prefill_attention(extend_sources(), q, keys, values, new, scale)


def run_append_tokens(
    kernels: Any,
    keys: Tensor,
    values: Tensor,
    pool: Pool,
    rows: PagedRows,
    new: NewTokens,
    *,
    pdl: bool = True,
) -> None:
    """`append_tokens` with these kernels; tests give them interpreted, without dependent launch."""
    check_append_tokens(keys, values, pool, rows, new)
    num_tokens = keys.shape[0]
    if num_tokens == 0:
        return
    tokens = append_tokens_each(pool.num_kv_heads)
    key_scales, value_scales = scales_of(pool)
    kernels.append_tokens_kernel[(flat_parts(num_tokens, rows.num_rows, tokens),)](
        keys,
        values,
        pool.keys,
        pool.values,
        key_scales,
        value_scales,
        rows.table,
        rows.lengths,
        new.starts,
        num_tokens,
        rows.num_rows,
        new.max_new,
        rows.max_length,
        pool.num_pages,
        rows.width,
        HEADS=pool.num_kv_heads,
        ROWS=1 << (pool.num_kv_heads - 1).bit_length(),
        TOKENS=tokens,
        PAGE=pool.page_size,
        FP8=pool.form is KvForm.FP8,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )


def run_extend_attention(
    kernels: Any,
    q: Tensor,
    pool: Pool,
    rows: PagedRows,
    new: NewTokens,
    scale: float | None = None,
    *,
    pdl: bool = True,
    chosen: ExtendLaunch | None = None,
) -> Tensor:
    """`extend_attention` with these kernels and this launch."""
    sharers = check_extend(q, pool, rows, new, scale)
    launch = chosen or extend_launch(fp8=pool.form is KvForm.FP8)
    return _launch(kernels, q, pool.keys, pool.values, (pool, rows), new, scale, sharers, pdl, launch)


def run_prefill_attention(
    kernels: Any,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    new: NewTokens,
    scale: float | None = None,
    *,
    pdl: bool = True,
    chosen: ExtendLaunch | None = None,
) -> Tensor:
    """`prefill_attention` with these kernels and this launch."""
    sharers = check_prefill(q, keys, values, new, scale)
    return _launch(kernels, q, keys, values, None, new, scale, sharers, pdl, chosen or extend_launch(fp8=False))


def _launch(
    kernels: Any,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    paged: tuple[Pool, PagedRows] | None,
    new: NewTokens,
    scale: float | None,
    sharers: int,
    pdl: bool,
    launch: ExtendLaunch,
) -> Tensor:
    """keys, values: those of the pages; contiguous ones where `paged` is None."""
    out = torch.empty_like(q)
    num_tokens, num_kv_heads = q.shape[0], keys.shape[1]
    if num_tokens == 0:
        return out
    key_scales, value_scales = (keys, values) if paged is None else scales_of(paged[0])
    table, lengths = (new.starts, new.starts) if paged is None else (paged[1].table, paged[1].lengths)
    fp8 = keys.dtype is torch.uint8
    parts = flat_parts(num_tokens, new.num_rows, launch.queries(sharers))
    kernels.extend_kernel[(parts * num_kv_heads,)](
        q,
        keys.view(float8_e4m3fn) if fp8 else keys,
        values.view(float8_e4m3fn) if fp8 else values,
        key_scales,
        value_scales,
        table,
        lengths,
        new.starts,
        out,
        positive_scale(scale) * _LOG2E,
        num_tokens,
        new.num_rows,
        new.max_new,
        0 if paged is None else paged[1].max_length,
        0 if paged is None else paged[0].num_pages,
        0 if paged is None else paged[1].width,
        HEADS=num_kv_heads,
        SHARERS=sharers,
        ROWS=launch.rows,
        PAGE=launch.block if paged is None else paged[0].page_size,
        BLOCK=launch.block,
        STAGES=launch.stages,
        FP8=fp8,
        PAGED=paged is not None,
        PDL=pdl,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(pdl),
    )
    return out
