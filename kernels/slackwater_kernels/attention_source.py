"""The Triton sources of attention over bf16: one query a row over its pages; and a step's token put into its page.

Owns the code that runs on the GPU and nothing of its launch, which is `attention`'s.  Imported lazily, since Triton is
not everywhere.  Tests load it a second time under Triton's interpreter.

A program takes one chunk of one row's tokens for the query heads that share a head of keys, so keys and values are
read once and never expanded.  The last program of a row and head merges the chunks in their order: what a row gets
depends on its own length and on nothing beside it.  Tokens are put into pages of either form.
"""

# mypy: ignore-errors
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slackwater_kernels.paged_source import chunk_of, finish_chunk, finite_top, pages_of
from slackwater_kernels.triton_source import quantized

_ROWS = tl.constexpr(16)  # the tensor core's least tile: the query heads of a head of keys, and zeros
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    table,
    b,
    head,
    first,
    last,
    scale,
    num_pages,
    HEADS: tl.constexpr,
    SHARERS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(weighted values [16, 128], largest logit [16], sum of weights [16]) of tokens first to last; scale: in log2."""
    row, n, d = tl.arange(0, _ROWS), tl.arange(0, BLOCK), tl.arange(0, 128)
    q_offsets = ((b * HEADS + head) * SHARERS + row)[:, None] * 128 + d[None, :]
    q = tl.load(q_ptr + q_offsets, (row < SHARERS)[:, None], 0.0)
    pages, are_pages = pages_of(table, first, last, num_pages, PAGE, BLOCK, CHUNK)
    total = tl.zeros((_ROWS, 128), tl.float32)
    norm = tl.full((_ROWS,), 0.0, tl.float32) + tl.where(are_pages, 0.0, float("nan"))
    top = tl.full((_ROWS,), _LOWEST, tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        is_live = start + n < last
        is_block = tl.arange(0, CHUNK // BLOCK) == (start - first) // BLOCK
        if BLOCK <= PAGE:
            page = tl.sum(tl.where(is_block, pages, 0), axis=0)
            place = ((page * HEADS + head) * PAGE + start % PAGE).to(tl.int64)
            k_tile, v_tile = k_ptr + place * 128, v_ptr + place * 128
            slot = n
        else:
            page = tl.sum(tl.where(is_block[:, None], pages, 0), axis=0)
            slot = ((page * HEADS + head) * PAGE)[:, None] + tl.arange(0, PAGE)[None, :]
            slot = slot.reshape(BLOCK).to(tl.int64)
            k_tile, v_tile = k_ptr, v_ptr
        # Slots behind the last token may hold anything, a NaN too: they are neither read nor multiplied.
        offsets = slot[:, None] * 128 + d[None, :]
        k = tl.load(k_tile + offsets, is_live[:, None], 0.0)
        v = tl.load(v_tile + offsets, is_live[:, None], 0.0)
        s = tl.where(is_live[None, :], tl.dot(q, tl.trans(k)) * scale, _LOWEST)
        highest = tl.maximum(top, tl.max(s, axis=1))
        weights = tl.exp2(s - finite_top(highest)[:, None])
        shrink = tl.exp2(top - finite_top(highest))
        norm = norm * shrink + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(tl.bfloat16), v, total * shrink[:, None])
        top = highest
    return total, top, norm


@triton.jit(do_not_specialize=["scale", "max_length", "num_pages", "width", "MP"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    out_scales_ptr,
    partials_ptr,
    stats_ptr,
    counters_ptr,
    scale,
    max_length,
    num_pages,
    width,
    MP,
    HEADS: tl.constexpr,
    SHARERS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of a row and head of keys.  ROWS: the power of two from SHARERS up."""
    head, b, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # the kernel in front writes the step's token, and the lengths change in a graph
    is_wrong, live, first, last = chunk_of(lengths_ptr, max_length, CHUNK)
    if chunk < tl.maximum(live, 1):
        total, top, norm = attend(
            q_ptr,
            k_ptr,
            v_ptr,
            table_ptr + b * width,
            b,
            head,
            first,
            last,
            scale,
            num_pages,
            HEADS,
            SHARERS,
            PAGE,
            BLOCK,
            CHUNK,
            STAGES,
        )
        finish_chunk(
            total,
            top,
            norm,
            live,
            is_wrong,
            out_ptr,
            out_scales_ptr,
            partials_ptr,
            stats_ptr,
            counters_ptr,
            MP,
            HEADS,
            SHARERS,
            _ROWS,
            ROWS,
            QUANTISE,
        )


@triton.jit
def append_heads(
    x_ptr, pool_ptr, scales_ptr, source, place, mask, PAGE: tl.constexpr, FP8: tl.constexpr, TURNED: tl.constexpr
):
    """Put the heads `source` of x, 128 numbers each, to the slots `place` of a pool.   TURNED: turned, without NaN."""
    d = tl.arange(0, 128)
    x = tl.load(x_ptr + source[:, None] * 128 + d[None, :], mask[:, None], 0.0)
    if TURNED:
        offsets = (place // PAGE * (PAGE * 128) + place % PAGE)[:, None] + d[None, :] * PAGE
    else:
        offsets = place[:, None] * 128 + d[None, :]
    if FP8:
        codes, scale, has_nan = quantized(x.to(tl.float32))
        NO_CODE: tl.constexpr = 0 if TURNED else 0x7F
        codes = tl.where(has_nan[:, None], NO_CODE, codes.to(tl.uint8, bitcast=True))
        tl.store(pool_ptr + offsets, codes, mask[:, None])
        tl.store(scales_ptr + place, scale, mask)
    else:
        tl.store(pool_ptr + offsets, x, mask[:, None])


@triton.jit(do_not_specialize=["num_pages", "width"])
def append_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    lengths_ptr,
    num_pages,
    width,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last token of row b: all its heads.  Where the row is idle or its page is none of the pool's: nothing."""
    b = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    heads = tl.arange(0, ROWS)
    position = tl.load(lengths_ptr + b) - 1
    is_kept = (position >= 0) & (position < width * PAGE)
    position = tl.where(is_kept, position, 0)
    page = tl.load(table_ptr + b * width + position // PAGE)
    mask = heads < tl.where(is_kept & (page >= 0) & (page < num_pages), HEADS, 0)
    place = (page.to(tl.int64) * HEADS + heads) * PAGE + position % PAGE
    append_heads(k_ptr, k_pool_ptr, k_scales_ptr, b * HEADS + heads, place, mask, PAGE, FP8, False)
    append_heads(v_ptr, v_pool_ptr, v_scales_ptr, b * HEADS + heads, place, mask, PAGE, FP8, FP8)
