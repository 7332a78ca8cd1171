"""What the Triton sources of attention share: rows and their pages, parts of a flat batch, chunks that are merged.

Owns the code of programs that is the same whatever form keys and values have, and no kernel.  Imported by those
sources alone.
"""

# mypy: ignore-errors
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing.

import triton
import triton.language as tl

from slackwater_kernels.triton_source import quantized

_PARTS = tl.constexpr(8)  # chunks that are merged at a time
_SEARCH = tl.constexpr(128)  # starts, or pages, that are looked at at a time
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def finite_top(top):
    """What is taken off before the exponential: a row of logits that are all -inf, too, has a difference then."""
    return tl.where(top == _LOWEST, 0.0, top)


@triton.jit
def pages_of(table, first, last, num_pages, PAGE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """(page of each block, or pages of each, int32; whether the pool has them all).

    Read before the loop: a load whose address another load of the loop gives is not asked for ahead.
    """
    token = first_tokens(first, PAGE, BLOCK, CHUNK)
    return checked_pages(tl.load(table + token // PAGE, token < last, 0), token < last, num_pages)


@triton.jit
def first_tokens(first, PAGE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The first token of each block of a chunk, or of each page of each block."""
    block = tl.arange(0, CHUNK // BLOCK)
    if BLOCK <= PAGE:
        token = first + block * BLOCK
    else:
        token = first + block[:, None] * BLOCK + tl.arange(0, BLOCK // PAGE)[None, :] * PAGE
    return token


@triton.jit
def checked_pages(pages, is_asked, num_pages):
    """(the pages, 0 for those that are not asked for or the pool has not; whether the pool has all that are asked)."""
    is_page = (pages >= 0) & (pages < num_pages)
    faults = tl.sum(tl.where(is_page | (is_asked == 0), 0, 1).reshape(pages.numel), axis=0)
    return tl.where(is_page & is_asked, pages, 0), faults == 0


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
def chunk_of(lengths_ptr, max_length, CHUNK: tl.constexpr):
    """(whether a row's length is wrong; how many chunks it has; first token of this one, and the one behind its last).

    The program's ids are a head of keys, a row and a chunk.
    """
    length = tl.load(lengths_ptr + tl.program_id(1))
    is_wrong = (length < 0) | (length > max_length)
    length = tl.where(is_wrong, 0, length)
    first = tl.program_id(2) * CHUNK
    return is_wrong, (length + CHUNK - 1) // CHUNK, first, tl.minimum(first + CHUNK, length)


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
