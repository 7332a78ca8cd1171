"""Attention over MXFP8 keys and values for Blackwell (sm_120a): one query a row, many, and all of a prompt at once.

Owns contracts and launches; where bytes lie is `mx_attention_layout`'s.  Owns no pool.  Deterministic: a query's bits
follow from its row's tokens and its position alone.  Called by the model inside a CUDA graph, once a layer.
"""

import math
from typing import Any

import torch
from torch import Tensor, float8_e4m3fn, uint8

from slackwater_kernels.attention_layout import HEAD, NewTokens, PagedRows, check_prefill, positive_scale
from slackwater_kernels.core import LayoutError
from slackwater_kernels.dispatch import mx_attention_sources, require_supported
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.mx_attention_layout import (
    MxKvPool,
    MxTokens,
    check_append_mx,
    check_append_tokens_mx,
    check_decode_mx,
    check_extend_mx,
    check_tokens_mx,
)
from slackwater_kernels.plan import AttentionLaunch, ExtendLaunch, append_tokens_each, attention_splits, flat_parts
from slackwater_kernels.quantize import launch_options

# By what fits registers and sm_120's 99 KB of shared memory, twice: no such GPU was at hand to measure on.
DECODE = AttentionLaunch(block=64, warps=4, stages=3, chunk=256)
TILES = ExtendLaunch(rows=64, block=64, warps=4, stages=3)


def append_kv_mx(keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows) -> None:
    """Put the last token of each row, at position length - 1, into its page; one launch.

    keys, values: bf16 [B, kv heads, 128], row-major, not changed.   The pool is mutated, quantised as
    `reference_mx_attention.quantize_kv_mx` does, bit for bit.  For an idle row, and where the table names a page that
    the pool has not, nothing is written.  Safe to capture in a CUDA graph.
    """
    check_append_mx(keys, values, pool, rows)
    require_supported("append_kv_mx", keys)
    run_append_kv_mx(mx_attention_sources(), keys, values, pool, rows)


def append_tokens_mx(keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens) -> None:
    """Put each row's new tokens, at positions length - count to length - 1, into their pages; one launch.

    keys, values: bf16 [T, kv heads, 128], row-major, not changed.   rows.lengths count the new tokens.   Nothing is
    written of tokens that no row has, of a row that is wrong as `extend_attention_mx` says, and of a token whose page
    the pool has not.  Safe to capture in a CUDA graph.
    """
    check_append_tokens_mx(keys, values, pool, rows, new)
    require_supported("append_tokens_mx", keys)
    run_append_tokens_mx(mx_attention_sources(), keys, values, pool, rows, new)


def decode_attention_mx(
    q: Tensor, pool: MxKvPool, rows: PagedRows, workspace: Workspace, scale: float | None = None
) -> Tensor:
    """softmax(q k * scale) v over each row's tokens, q and weights in MXFP8: bf16 [B, heads, 128], rounded once.

    q: bf16 [B, heads, 128], row-major; `heads` / kv heads neighbours share a head of keys, which is never expanded.
    scale: 1 / sqrt(128) if None; above 0.   Sums and softmax are fp32.  An idle row is zeros; a row that is longer than
    max_length or names a page that the pool has not is NaN.  A NaN among queries, keys or values makes NaN what it
    meets and nothing else.  Safe to capture in a CUDA graph once the workspace has its size: no length is read on the
    host, and the result is written whole.
    """
    check_decode_mx(q, pool, rows)
    require_supported("decode_attention_mx", q)
    return run_decode_attention_mx(mx_attention_sources(), q, pool, rows, workspace, scale)


def extend_attention_mx(
    q: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens, scale: float | None = None
) -> Tensor:
    """`decode_attention_mx` of many queries a row: bf16 [T, heads, 128].

    q: bf16 [T, heads, 128], row-major.   Query i of a row's `count` is at position length - count + i and attends to
    the row's tokens up to its own, which are in the pool already; rows.lengths count them.  All tokens of a wrong row
    are NaN and no other's: if `new` or its length makes it wrong (it has fewer tokens than new ones, or more than
    max_length) or if it names a page that the pool has not.  Tokens that no row has are zeros.   scale: above 0.   Safe
    to capture in a CUDA graph: no length is read on the host, and the result is written whole.
    """
    check_extend_mx(q, pool, rows, new)
    require_supported("extend_attention_mx", q)
    return run_extend_attention_mx(mx_attention_sources(), q, pool, rows, new, scale)


def prefill_attention_mx(q: Tensor, keys: Tensor, values: Tensor, new: NewTokens, scale: float | None = None) -> Tensor:
    """`extend_attention_mx` of rows that have nothing before their new tokens, without a pool and with the same bits.

    keys, values: bf16 [T, kv heads, 128], row-major, quantised once by a launch in front: each tile of queries reads
    half the bytes then, and quantises nothing.
    """
    check_prefill(q, keys, values, new)
    require_supported("prefill_attention_mx", q)
    return run_prefill_attention_mx(mx_attention_sources(), q, keys, values, new, scale)


def describe_mx_attention(max_length: int, max_new: int | None = None) -> dict[str, object]:
    """What attention over rows of up to `max_length` tokens does: with one query a row, or with up to `max_new`.

    The batch is no argument: with it the number of CTAs grows and nothing else.  Decoding goes through chunks that are
    merged, many queries go through all blocks in one: their bits differ.  Chunked prefill, prefill at once and
    `prefill_attention_mx` have the same bits.
    """
    told: dict[str, object] = {"form": "mxfp8", "batch_invariant": True}
    if max_new is None:
        return told | {
            "launches": 1,
            "block": DECODE.block,
            "chunk": DECODE.chunk,
            "split": attention_splits(max_length, DECODE),
            "warps": DECODE.warps,
            "stages": DECODE.stages,
            "sum": f"blocks of {DECODE.block} tokens in order in chunks of {DECODE.chunk}, chunks in order",
        }
    return told | {
        "launches": "1, and 1 that quantises keys and values where they are in no pool",
        "rows": TILES.rows,
        "block": TILES.block,
        "split": 1,
        "warps": TILES.warps,
        "stages": TILES.stages,
        "sum": f"blocks of {TILES.block} tokens in order from a row's first token on",
    }


def run_append_kv_mx(
    kernels: Any, keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows, *, pdl: bool = True
) -> None:
    """`append_kv_mx` with these kernels; tests give them interpreted, or widened on a GPU without the instruction."""
    check_append_mx(keys, values, pool, rows)
    _append(kernels, keys, values, pool, rows, None, pdl)


def run_append_tokens_mx(
    kernels: Any, keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens, *, pdl: bool = True
) -> None:
    """`append_tokens_mx` with these kernels."""
    check_append_tokens_mx(keys, values, pool, rows, new)
    if keys.shape[0]:
        _append(kernels, keys, values, pool, rows, new, pdl)


def run_decode_attention_mx(
    kernels: Any,
    q: Tensor,
    pool: MxKvPool,
    rows: PagedRows,
    workspace: Workspace,
    scale: float | None = None,
    *,
    pdl: bool = True,
    chosen: AttentionLaunch = DECODE,
) -> Tensor:
    """`decode_attention_mx` with these kernels and this launch."""
    sharers = check_decode_mx(q, pool, rows)
    if workspace.device != q.device:
        raise LayoutError(f"q is on {q.device} but the workspace on {workspace.device}; keep all on one device")
    factor, out, span = _in_log2(scale), torch.empty_like(q), _power(sharers)
    splits, pairs = attention_splits(rows.max_length, chosen), rows.num_rows * pool.num_kv_heads
    parts = pairs * splits * span if splits > 1 else 0
    partials, counters = workspace.take(parts * (HEAD + 2), pairs if parts else 0)
    kernels.decode_mx_kernel[(pool.num_kv_heads, rows.num_rows, splits)](
        q,
        *_parts(pool),
        rows.table,
        rows.lengths,
        out,
        partials,
        partials[parts * HEAD :],
        counters,
        factor,
        rows.max_length,
        pool.num_pages,
        rows.width,
        HEADS=pool.num_kv_heads,
        SHARERS=sharers,
        ROWS=span,
        PAGE=pool.page_size,
        BLOCK=chosen.block,
        CHUNK=chosen.chunk,
        STAGES=chosen.stages,
        PDL=pdl,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        maxnreg=chosen.registers,
        **launch_options(pdl),
    )
    return out


def run_extend_attention_mx(
    kernels: Any,
    q: Tensor,
    pool: MxKvPool,
    rows: PagedRows,
    new: NewTokens,
    scale: float | None = None,
    *,
    pdl: bool = True,
    chosen: ExtendLaunch = TILES,
) -> Tensor:
    """`extend_attention_mx` with these kernels and this launch."""
    sharers = check_extend_mx(q, pool, rows, new)
    return _tiles(kernels, q, pool, rows, new, scale, sharers, pdl, chosen)


def run_prefill_attention_mx(
    kernels: Any,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    new: NewTokens,
    scale: float | None = None,
    *,
    pdl: bool = True,
    chosen: ExtendLaunch = TILES,
) -> Tensor:
    """`prefill_attention_mx` with these kernels and this launch."""
    sharers = check_prefill(q, keys, values, new)
    tokens = run_quantize_tokens_mx(kernels, keys, values, pdl=pdl)
    return _tiles(kernels, q, tokens, None, new, scale, sharers, pdl, chosen)


def run_quantize_tokens_mx(kernels: Any, keys: Tensor, values: Tensor, *, pdl: bool = True) -> MxTokens:
    """Keys and values of a flat batch in the form in which tiles of queries read them."""
    check_tokens_mx(keys, values)
    num_tokens, num_kv_heads = keys.shape[:2]
    out, per = MxTokens.empty(num_kv_heads, num_tokens, keys.device), append_tokens_each(num_kv_heads)
    if num_tokens:
        kernels.quantise_tokens_kernel[(-(-num_tokens // per),)](
            keys,
            values,
            out.keys,
            out.key_scales.view(uint8),
            out.values,
            out.value_scales,
            num_tokens,
            HEADS=num_kv_heads,
            SPAN=_power(num_kv_heads),
            TOKENS=per,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out


def _append(
    kernels: Any, keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens | None, pdl: bool
) -> None:
    tokens = 1 if new is None else append_tokens_each(pool.num_kv_heads)
    parts = rows.num_rows if new is None else flat_parts(keys.shape[0], rows.num_rows, tokens)
    kernels.append_mx_kernel[(parts,)](
        keys,
        values,
        pool.keys,
        pool.key_scales.view(uint8),
        pool.values,
        pool.value_scales,
        rows.table,
        rows.lengths,
        rows.lengths if new is None else new.starts,
        keys.shape[0],
        rows.num_rows,
        1 if new is None else new.max_new,
        rows.max_length,
        pool.num_pages,
        rows.width,
        HEADS=pool.num_kv_heads,
        SPAN=_power(pool.num_kv_heads),
        TOKENS=tokens,
        PAGE=pool.page_size,
        RAGGED=new is not None,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def _tiles(
    kernels: Any,
    q: Tensor,
    stored: MxKvPool | MxTokens,
    rows: PagedRows | None,
    new: NewTokens,
    scale: float | None,
    sharers: int,
    pdl: bool,
    launch: ExtendLaunch,
) -> Tensor:
    factor, out = _in_log2(scale), torch.empty_like(q)
    if q.shape[0] == 0:
        return out
    parts = flat_parts(q.shape[0], new.num_rows, launch.queries(sharers))
    kernels.tiles_mx_kernel[(parts * stored.num_kv_heads,)](
        q,
        *_parts(stored),
        new.starts if rows is None else rows.table,
        new.starts if rows is None else rows.lengths,
        new.starts,
        out,
        factor,
        q.shape[0],
        new.num_rows,
        new.max_new,
        0 if rows is None else rows.max_length,
        stored.num_pages if isinstance(stored, MxKvPool) else 0,
        0 if rows is None else rows.width,
        HEADS=stored.num_kv_heads,
        SHARERS=sharers,
        ROWS=launch.rows,
        PAGE=stored.page_size if isinstance(stored, MxKvPool) else launch.block,
        BLOCK=launch.block,
        STAGES=launch.stages,
        PAGED=rows is not None,
        PDL=pdl,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(pdl),
    )
    return out


def _parts(stored: MxKvPool | MxTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, their words, values, their scales, as the kernels read them."""
    keys, values = stored.keys.view(float8_e4m3fn), stored.values.view(torch.int16)
    return keys, stored.key_scales, values, stored.value_scales


def _in_log2(scale: float | None) -> float:
    return positive_scale(scale) * math.log2(math.e)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
