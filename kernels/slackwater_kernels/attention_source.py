"""The Triton sources of attention: a step's keys and values put into their pages, and one query a row over its pages.

Owns the code that runs on the GPU and nothing of its launch, which is `attention`'s, and what attention of many queries
a row shares with it.  Imported lazily, since Triton is not everywhere.  Tests load it a second time under Triton's
interpreter.

A program takes one chunk of one row's tokens for the query heads that share a head of keys, so keys and values are
read once and never expanded.  The last program of a row and head merges the chunks in their order: what a row gets
depends on its own length and on nothing beside it.  FP8 codes are widened to f16, which holds each of them exactly;
scales never meet a code, a key's goes into the logits and a value's into the weights.
"""

# mypy: ignore-errors
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slackwater_kernels.triton_source import quantized

_ROWS = tl.constexpr(16)  # the tensor core's least tile: the query heads of a head of keys, and zeros
_PARTS = tl.constexpr(8)  # chunks that are merged at a time
_SEARCH = tl.constexpr(128)  # starts, or pages, that are looked at at a time
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def without_power(q):
    """bf16 [rows, 128] to (f16 [rows, 128] of magnitude under 2, a power of two a row) whose product it is.

    Exact, but for what is under 2^-16 of the row's largest, which is rounded at 2^-25 of it.
    """
    q = q.to(tl.float32)
    exponent = tl.minimum(tl.max(tl.abs(q), axis=1).to(tl.int32, bitcast=True) >> 23, 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q * down[:, None]).to(tl.float16), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite_top(top):
    """What is taken off before the exponential: a row of logits that are all -inf, too, has a difference then."""
    return tl.where(top == _LOWEST, 0.0, top)


@triton.jit
def pages_of(table, first, last, num_pages, PAGE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """(page of each block, or pages of each, int32; whether the pool has them all).

    Read before the loop: a load whose address another load of the loop gives is not asked for ahead.
    """
    block = tl.arange(0, CHUNK // BLOCK)
    if BLOCK <= PAGE:
        token = first + block * BLOCK
    else:
        token = first + block[:, None] * BLOCK + tl.arange(0, BLOCK // PAGE)[None, :] * PAGE
    pages = tl.load(table + token // PAGE, token < last, 0)
    is_page = (pages >= 0) & (pages < num_pages)
    faults = tl.sum(tl.where(is_page, 0, 1).reshape(pages.numel), axis=0)
    return tl.where(is_page, pages, 0), faults == 0


@triton.jit
def part_of(starts_ptr, slot, num_rows, T, max_new, PART: tl.constexpr):
    """(row, its first token, the one behind its last, the part's first, whether the row's starts are wrong) of a slot.

    A flat batch of T tokens lies in parts of up to PART, each of one row.  Row -1 has what is in front of starts[0],
    row `num_rows` what is behind the last row; a start that falls back counts as the highest before it.  So each token
    is in one part and only one, whatever starts hold, and T // PART + num_rows + 2 slots are enough.  A slot whose part
    begins at or behind the end has none.
    """
    i = tl.arange(0, _SEARCH)
    after = num_rows + 1  # the row behind the slot's, whose own slots begin at start // PART + row + 1
    for first in range(0, num_rows + 1, _SEARCH):
        row = first + i
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + row, row <= num_rows, 0), 0), T)
        reached = tl.where(row <= num_rows, tl.maximum(row, slot - start // PART), after)
        after = tl.minimum(after, tl.min(reached, axis=0))
    b = after - 1
    begin = 0
    for first in range(0, b + 1, _SEARCH):
        start = tl.load(starts_ptr + first + i, first + i <= b, 0)
        begin = tl.maximum(begin, tl.max(tl.minimum(start, T), axis=0))
    start = tl.load(starts_ptr + b, b >= 0, 0)
    stop = tl.load(starts_ptr + b + 1, b < num_rows, T)
    end = tl.maximum(begin, tl.minimum(stop, T))
    is_wrong = (start != begin) | (stop < start) | (stop > T) | (stop - start > max_new)
    token = begin + (slot - begin // PART - b - 1) * PART
    return b, begin, end, token, is_wrong & (b >= 0) & (b < num_rows)


@triton.jit
def has_pages(table, count, num_pages):
    """Whether the pool has each of the first `count` pages of a row's table."""
    i = tl.arange(0, _SEARCH)
    faults = 0
    for first in range(0, count, _SEARCH):
        page = tl.load(table + first + i, first + i < count, 0)
        faults = tl.maximum(faults, tl.max(tl.where((page >= 0) & (page < num_pages), 0, 1), axis=0))
    return faults == 0


@triton.jit
def both_of(pairs):
    """int16 of two E4M3 codes to their f16 values, of the low byte and of the high one.

    Pairs are taken because the tensor core wants two tokens side by side, and only what has 16 bits is turned so on the
    way from shared memory; single codes would be read one by one.
    """
    low = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
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
    FP8: tl.constexpr,
):
    """(weighted values [16, 128], largest logit [16], sum of weights [16]) of tokens first to last; scale: in log2."""
    row, n, d = tl.arange(0, _ROWS), tl.arange(0, BLOCK), tl.arange(0, 128)
    q_offsets = ((b * HEADS + head) * SHARERS + row)[:, None] * 128 + d[None, :]
    q = tl.load(q_ptr + q_offsets, (row < SHARERS)[:, None], 0.0)
    if FP8:
        q, power = without_power(q)
        power *= scale
    pages, are_pages = pages_of(table, first, last, num_pages, PAGE, BLOCK, CHUNK)
    V_WIDTH: tl.constexpr = 64 if FP8 else 128
    total = tl.zeros((_ROWS, 128), tl.float32)
    even = tl.zeros((_ROWS, 64), tl.float32)  # in FP8 the columns of a pair of codes are summed apart
    odd = tl.zeros((_ROWS, 64), tl.float32)
    norm = tl.full((_ROWS,), 0.0, tl.float32) + tl.where(are_pages, 0.0, float("nan"))
    top = tl.full((_ROWS,), _LOWEST, tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        is_live = start + n < last
        is_block = tl.arange(0, CHUNK // BLOCK) == (start - first) // BLOCK
        if BLOCK <= PAGE:
            page = tl.sum(tl.where(is_block, pages, 0), axis=0)
            place = ((page * HEADS + head) * PAGE + start % PAGE).to(tl.int64)
            k_tile, v_tile = k_ptr + place * 128, v_ptr + place * V_WIDTH
            k_scale_tile, v_scale_tile = k_scales_ptr + place, v_scales_ptr + place
            slot = n
        else:
            page = tl.sum(tl.where(is_block[:, None], pages, 0), axis=0)
            slot = ((page * HEADS + head) * PAGE)[:, None] + tl.arange(0, PAGE)[None, :]
            slot = slot.reshape(BLOCK).to(tl.int64)
            k_tile, v_tile, k_scale_tile, v_scale_tile = k_ptr, v_ptr, k_scales_ptr, v_scales_ptr
        # Slots behind the last token may hold anything, a NaN too: they are neither read nor multiplied.
        k = tl.load(k_tile + slot[:, None] * 128 + d[None, :], is_live[:, None], 0.0)
        v_column = tl.arange(0, V_WIDTH)
        v = tl.load(v_tile + slot[:, None] * V_WIDTH + v_column[None, :], is_live[:, None], 0)
        if FP8:
            k_scale = tl.load(k_scale_tile + slot, is_live, 0.0)
            v_scale = tl.load(v_scale_tile + slot, is_live, 0.0)
            s = tl.dot(q, tl.trans(k.to(tl.float16))) * power[:, None] * k_scale[None, :]
        else:
            s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(is_live[None, :], s, _LOWEST)
        highest = tl.maximum(top, tl.max(s, axis=1))
        weights = tl.exp2(s - finite_top(highest)[:, None])
        shrink = tl.exp2(top - finite_top(highest))
        norm = norm * shrink + tl.sum(weights, axis=1)
        if FP8:
            # The weights carry the scales of the values, over the block's largest: f16 keeps 11 bits of them so.
            largest = tl.max(v_scale, axis=0)
            carried = (weights * (v_scale / tl.maximum(largest, 1e-37))[None, :]).to(tl.float16)
            v_even, v_odd = both_of(v)
            even = even * shrink[:, None] + tl.dot(carried, v_even) * largest
            odd = odd * shrink[:, None] + tl.dot(carried, v_odd) * largest
        else:
            total = tl.dot(weights.to(tl.bfloat16), v, total * shrink[:, None])
        top = highest
    if FP8:
        total = tl.join(even, odd).reshape(_ROWS, 128)
    return total, top, norm


@triton.jit
def store_heads(
    total,
    norm,
    fill,
    is_filled,
    out_ptr,
    out_scales_ptr,
    b,
    head,
    MP,
    HEADS: tl.constexpr,
    SHARERS: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """The one rounding to bf16; QUANTISE: then to FP8 as `quantize_activations` does, a head being a group."""
    row, d = tl.arange(0, ROWS), tl.arange(0, 128)
    rounded = tl.where(is_filled, fill, total / norm[:, None]).to(tl.bfloat16)
    of_query = head * SHARERS + row
    offsets = (b * (HEADS * SHARERS) + of_query)[:, None] * 128 + d[None, :]
    is_head = row < SHARERS
    if QUANTISE:
        codes, scale, has_nan = quantized(rounded.to(tl.float32))
        tl.store(
            out_ptr + offsets, tl.where(has_nan[:, None], 0x7F, codes.to(tl.uint8, bitcast=True)), is_head[:, None]
        )
        tl.store(out_scales_ptr + of_query * MP + b, scale, is_head)
        if b == tl.num_programs(1) - 1:
            pad = b + 1 + tl.arange(0, 4)  # the rows that pad the batch hold scale 0
            tl.store(
                out_scales_ptr + of_query[:, None] * MP + pad[None, :], 0.0, is_head[:, None] & (pad < MP)[None, :]
            )
    else:
        tl.store(out_ptr + offsets, rounded, is_head[:, None])


@triton.jit
def merged(partials, stats, live, ROWS: tl.constexpr):
    """(weighted values [ROWS, 128], sum of weights [ROWS]) of the chunks, in their order."""
    row, d, i = tl.arange(0, ROWS), tl.arange(0, 128), tl.arange(0, _PARTS)
    total = tl.zeros((ROWS, 128), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    for first in range(0, live, _PARTS):
        part = first + i
        is_live = part < live
        of_stat = stats + part[:, None] * (2 * ROWS) + row[None, :]
        tops = tl.load(of_stat, is_live[:, None], _LOWEST, cache_modifier=".cg")
        norms = tl.load(of_stat + ROWS, is_live[:, None], 0.0, cache_modifier=".cg")
        of_part = partials + part[:, None, None] * (ROWS * 128) + row[None, :, None] * 128 + d[None, None, :]
        totals = tl.load(of_part, is_live[:, None, None], 0.0, cache_modifier=".cg")
        highest = tl.maximum(top, tl.max(tops, axis=0))
        weights = tl.exp2(tops - finite_top(highest)[None, :])
        shrink = tl.exp2(top - finite_top(highest))
        norm = norm * shrink + tl.sum(weights * norms, axis=0)
        total = total * shrink[:, None] + tl.sum(weights[:, :, None] * totals, axis=0)
        top = highest
    return total, norm


@triton.jit
def finish_chunk(
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
    HEADS: tl.constexpr,
    SHARERS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """Store a row's heads if it has one chunk, else this chunk's part; who ends last of `live` chunks merges them.

    The program's ids are a head of keys, a row and a chunk.   total: fp32 [TILE, 128], of which ROWS count.
    """
    head, b, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if live <= 1:
        fill = tl.where(is_wrong, float("nan"), 0.0)
        store_heads(total, norm, fill, live == 0, out_ptr, out_scales_ptr, b, head, MP, HEADS, SHARERS, TILE, QUANTISE)
    else:
        row, d = tl.arange(0, TILE), tl.arange(0, 128)
        pair = b * HEADS + head
        splits = tl.num_programs(2)
        partials = partials_ptr + pair.to(tl.int64) * splits * (ROWS * 128)
        stats = stats_ptr + pair * splits * (2 * ROWS)
        is_row = row < ROWS
        tl.store(partials + chunk * (ROWS * 128) + row[:, None] * 128 + d[None, :], total, is_row[:, None])
        tl.store(stats + chunk * (2 * ROWS) + row, top, is_row)
        tl.store(stats + chunk * (2 * ROWS) + ROWS + row, norm, is_row)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        arrived = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu")
        if arrived == live - 1:
            whole, weight = merged(partials, stats, live, ROWS)
            store_heads(whole, weight, 0.0, False, out_ptr, out_scales_ptr, b, head, MP, HEADS, SHARERS, ROWS, QUANTISE)
            tl.store(counters_ptr + pair, 0)  # ready for the next launch


@triton.jit(do_not_specialize=["scale", "max_length", "num_pages", "width", "MP"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
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
    FP8: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of a row and head of keys.  ROWS: the power of two from SHARERS up."""
    head, b, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # the kernel in front writes the step's token, and the lengths change in a graph
    length = tl.load(lengths_ptr + b)
    is_wrong = (length < 0) | (length > max_length)
    length = tl.where(is_wrong, 0, length)
    live = (length + CHUNK - 1) // CHUNK
    if chunk < tl.maximum(live, 1):
        first = chunk * CHUNK
        total, top, norm = attend(
            q_ptr,
            k_ptr,
            v_ptr,
            k_scales_ptr,
            v_scales_ptr,
            table_ptr + b * width,
            b,
            head,
            first,
            tl.minimum(first + CHUNK, length),
            scale,
            num_pages,
            HEADS,
            SHARERS,
            PAGE,
            BLOCK,
            CHUNK,
            STAGES,
            FP8,
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
    x_ptr, pool_ptr, scales_ptr, source, place, mask, FP8: tl.constexpr, PAGE: tl.constexpr, CHANNEL: tl.constexpr
):
    """Put the heads `source` of x, 128 values each, to the slots `place` of a pool.   CHANNEL: turned, without NaN."""
    d = tl.arange(0, 128)
    x = tl.load(x_ptr + source[:, None] * 128 + d[None, :], mask[:, None], 0.0)
    if CHANNEL:
        offsets = (place // PAGE * (PAGE * 128) + place % PAGE)[:, None] + d[None, :] * PAGE
    else:
        offsets = place[:, None] * 128 + d[None, :]
    if FP8:
        codes, scale, has_nan = quantized(x.to(tl.float32))
        NO_CODE: tl.constexpr = 0 if CHANNEL else 0x7F
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
    CHANNEL: tl.constexpr,
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
    append_heads(k_ptr, k_pool_ptr, k_scales_ptr, b * HEADS + heads, place, mask, FP8, PAGE, False)
    append_heads(v_ptr, v_pool_ptr, v_scales_ptr, b * HEADS + heads, place, mask, FP8, PAGE, CHANNEL)
