"""Attention of one query a row over keys and values in pages, bf16 or FP8, and the step's token put into its page.

Owns contracts and launches; what a chunk is, is `plan`'s, where bytes lie `attention_layout`'s.  Owns no pool.
Deterministic, and a row's bits depend neither on the other rows nor on how long rows may become.  Called by the model
inside a CUDA graph, once a layer.
"""

import math
from typing import Any

import torch
from torch import Tensor, float8_e4m3fn

from slackwater_kernels.attention_layout import (
    HEAD,
    KvPool,
    PagedRows,
    Pool,
    check_append,
    check_decode,
    scales_of,
)
from slackwater_kernels.core import ROW_PAD, KvForm, LayoutError, padded
from slackwater_kernels.dispatch import attention_sources, fp8_attention_sources, require_supported
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import Fp8Activations
from slackwater_kernels.plan import AttentionLaunch, attention_launch, attention_splits
from slackwater_kernels.quantize import empty, launch_options

_LOG2E = math.log2(math.e)


def append_kv(keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows) -> None:
    """Put the last token of each row, at position length - 1, into its page; one launch.

    keys, values: bf16 [B, kv heads, 128], row-major, not changed.   The pool is mutated: copied to in bf16, in FP8
    quantised as `reference.append_kv` does it, bit for bit.  For an idle row, and where the table names a page that the
    pool has not, nothing is written.  Safe to capture in a CUDA graph.
    """
    check_append(keys, values, pool, rows)
    require_supported("append_kv", keys)
    run_append_kv(attention_sources(), keys, values, pool, rows)


def decode_attention(
    q: Tensor, pool: Pool, rows: PagedRows, workspace: Workspace, scale: float | None = None
) -> Tensor:
    """softmax(q k * scale) v over each row's tokens: bf16 [B, heads, 128], rounded once.

    q: bf16 [B, heads, 128], row-major; `heads` / kv heads neighbours share a head of keys, which is never expanded.
    scale: 1 / sqrt(128) if None.   The sum is fp32.  An idle row is zeros; a row that is longer than max_length or
    names a page that the pool has not is NaN.  Safe to capture in a CUDA graph once the workspace has its size: no
    length is read on the host, and the result is written whole.
    """
    check_decode(q, pool, rows)
    require_supported("decode_attention", q)
    return run_decode_attention(_sources(pool), q, pool, rows, workspace, scale)


def decode_attention_quantize(
    q: Tensor, pool: Pool, rows: PagedRows, workspace: Workspace, scale: float | None = None
) -> Fp8Activations:
    """`decode_attention` and `quantize_activations` of its [B, heads * 128] in one launch, with the same bits."""
    check_decode(q, pool, rows)
    require_supported("decode_attention_quantize", q)
    return run_decode_attention_quantize(_sources(pool), q, pool, rows, workspace, scale)


def run_append_kv(kernels: Any, keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows, *, pdl: bool = True) -> None:
    """`append_kv` with these kernels; tests give them interpreted, without dependent launch."""
    check_append(keys, values, pool, rows)
    key_scales, value_scales = scales_of(pool)
    kernels.append_kernel[(rows.num_rows,)](
        keys,
        values,
        pool.keys,
        pool.values,
        key_scales,
        value_scales,
        rows.table,
        rows.lengths,
        pool.num_pages,
        rows.width,
        HEADS=pool.num_kv_heads,
        ROWS=_power(pool.num_kv_heads),
        PAGE=pool.page_size,
        FP8=pool.form is KvForm.FP8,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def run_decode_attention(
    kernels: Any,
    q: Tensor,
    pool: Pool,
    rows: PagedRows,
    workspace: Workspace,
    scale: float | None = None,
    *,
    pdl: bool = True,
    chosen: AttentionLaunch | None = None,
) -> Tensor:
    """`decode_attention` with these kernels and this launch."""
    sharers = check_decode(q, pool, rows)
    out = torch.empty_like(q)
    _launch(kernels, q, pool, rows, workspace, scale, sharers, out, out, pdl, chosen)
    return out


def run_decode_attention_quantize(
    kernels: Any,
    q: Tensor,
    pool: Pool,
    rows: PagedRows,
    workspace: Workspace,
    scale: float | None = None,
    *,
    pdl: bool = True,
    chosen: AttentionLaunch | None = None,
) -> Fp8Activations:
    """`decode_attention_quantize` with these kernels and this launch."""
    sharers = check_decode(q, pool, rows)
    out = empty(rows.num_rows, q.shape[1] * HEAD, q.device)
    _launch(kernels, q, pool, rows, workspace, scale, sharers, out.codes, out.scales, pdl, chosen)
    return out


def _launch(
    kernels: Any,
    q: Tensor,
    pool: Pool,
    rows: PagedRows,
    workspace: Workspace,
    scale: float | None,
    sharers: int,
    out: Tensor,
    out_scales: Tensor,
    pdl: bool,
    chosen: AttentionLaunch | None,
) -> None:
    if workspace.device != q.device:
        raise LayoutError(f"q is on {q.device} but the workspace on {workspace.device}; keep all on one device")
    launch = chosen or attention_launch(pool.form)
    splits, rows_of_tile = attention_splits(rows.max_length, launch), _power(sharers)
    pairs = rows.num_rows * pool.num_kv_heads
    parts = pairs * splits * rows_of_tile if splits > 1 else 0
    partials, counters = workspace.take(parts * (HEAD + 2), pairs if parts else 0)
    kernels.decode_kernel[(pool.num_kv_heads, rows.num_rows, splits)](
        q,
        *_stored(pool),
        rows.table,
        rows.lengths,
        out,
        out_scales,
        partials,
        partials[parts * HEAD :],
        counters,
        (HEAD**-0.5 if scale is None else scale) * _LOG2E,
        rows.max_length,
        pool.num_pages,
        rows.width,
        padded(rows.num_rows, ROW_PAD),
        HEADS=pool.num_kv_heads,
        SHARERS=sharers,
        ROWS=rows_of_tile,
        PAGE=pool.page_size,
        BLOCK=launch.block,
        CHUNK=launch.chunk,
        STAGES=launch.stages,
        QUANTISE=out.dtype is torch.uint8,
        PDL=pdl,
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        **launch_options(pdl),
    )


def _sources(pool: Pool) -> Any:
    return fp8_attention_sources() if pool.form is KvForm.FP8 else attention_sources()


def _stored(pool: Pool) -> tuple[Tensor, ...]:
    """What the decode kernel of the pool's form reads."""
    if isinstance(pool, KvPool):
        return pool.keys, pool.values
    return pool.keys.view(float8_e4m3fn), pool.values.view(float8_e4m3fn), pool.key_scales, pool.value_scales


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
