"""The Triton sources of attention with many queries a row: over pages and over contiguous keys, and tokens into pages.

Owns the code that runs on the GPU and nothing of its launch, which is `extend`'s.  Imported lazily, since Triton is not
everywhere.  Tests load it a second time under Triton's interpreter.

A program takes a part of a row's queries for the query heads that share a head of keys: queries times sharers are the
rows of the tensor core's tile, so keys and values are read once a part and never expanded.  Blocks of keys begin at
position 0 of the row whatever the part, and go by in order; a block behind a query's position leaves its sums as they
are.  One code does every block, and products and sums that could be fused in more than one way say which one they are.
So a query's bits follow from its position and the tokens up to it, wherever its part begins and however many of the
tokens are new.  FP8 codes are widened to f16, which holds each of them exactly; scales never meet a code, a key's goes
into the logits and a value's into the weights.

A weight of 0 does not hide a value that is no finite number.  In FP8 its scale tells of it, and makes NaN the logits of
that token.  Where one in bf16 came into a part's sums, the part is done again with such values taken out, and what
attends to them is NaN.
"""

# mypy: ignore-errors
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slackwater_kernels.attention_source import append_heads
from slackwater_kernels.paged_source import finite_top, has_pages, part_of

_LOWEST = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))
_LEAST = tl.constexpr(2.0**-126)


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
def pages_at(table, start, last, PAGE: tl.constexpr, BLOCK: tl.constexpr, PAGED: tl.constexpr):
    """The page of the block of keys from `start` on, or its pages, if there is such a block."""
    if not PAGED:
        page = start
    elif BLOCK <= PAGE:
        page = tl.load(table + start // PAGE, start < last, 0)
    else:
        token = start + tl.arange(0, BLOCK // PAGE) * PAGE
        page = tl.load(table + token // PAGE, token < last, 0)
    return page


@triton.jit
def places(
    page,
    begin,
    start,
    head,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
):
    """(int64, [BLOCK]): where the keys from `start` on lie, and their values, in heads of 128; the sum of both."""
    n = tl.arange(0, BLOCK)
    if not PAGED:
        base = (begin + start).to(tl.int64) * HEADS + head
        slot = n * HEADS
    elif BLOCK <= PAGE:
        base = ((page * HEADS + head) * PAGE + tl.multiple_of(start % PAGE, BLOCK)).to(tl.int64)
        slot = n
    else:
        base = tl.zeros((), tl.int64)
        slot = ((page * HEADS + head) * PAGE)[:, None] + tl.arange(0, PAGE)[None, :]
        slot = tl.max_contiguous(tl.multiple_of(slot.reshape(BLOCK).to(tl.int64), PAGE), PAGE)
    return base, slot


@triton.jit
def turned_places(page, start, head, HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """(int64, [BLOCK]): where the first number of the FP8 values from `start` on lies; the sum of both.

    The next number of a value is PAGE further on.
    """
    if BLOCK <= PAGE:
        base = (page * HEADS + head).to(tl.int64) * (PAGE * 128) + tl.multiple_of(start % PAGE, BLOCK)
        column = tl.arange(0, BLOCK)
    else:
        base = tl.zeros((), tl.int64)
        column = ((page * HEADS + head).to(tl.int64) * (PAGE * 128))[:, None] + tl.arange(0, PAGE)[None, :]
        column = tl.max_contiguous(tl.multiple_of(column.reshape(BLOCK), PAGE), PAGE)
    return base, column


@triton.jit
def power_of(scale):
    """What is added to a logit in log2 where the largest scale of the values is this one, not negative."""
    return tl.maximum((scale.to(tl.int32, bitcast=True) >> 23) - 127, -64).to(tl.float32) - 14.0


@triton.jit
def attend_keys(
    q,
    power,
    position,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table,
    begin,
    head,
    first,
    last,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    PAGED: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """(weighted values [ROWS, 128], sum of weights [ROWS]) of the keys up to each row's position, which are under last.

    first: the least position.   power: what a row's logits are multiplied by, in log2.   CAREFUL: take values out that
    are no finite numbers; in FP8 no pass is.
    """
    n, d = tl.arange(0, BLOCK), tl.arange(0, 128)
    total = tl.zeros((ROWS, 128), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    # Looked up one step before: what a load of the same step has for an address is not asked for ahead.
    page = pages_at(table, 0, last, PAGE, BLOCK, PAGED)
    for start in tl.range(0, last, BLOCK, num_stages=STAGES):
        is_live = start + n < last
        base, slot = places(page, begin, start, head, HEADS, PAGE, BLOCK, PAGED)
        if FP8:
            v_base, column = turned_places(page, start, head, HEADS, PAGE, BLOCK)
        page = pages_at(table, start + BLOCK, last, PAGE, BLOCK, PAGED)
        offsets = slot[:, None] * 128 + d[None, :]
        if FP8:
            # Slots behind the last token have scales that may be anything, and codes that are numbers: their keys make
            # logits that are not looked at, their values meet the weight 0.
            k = tl.load(k_ptr + base * 128 + offsets)
            v = tl.load(v_ptr + v_base + d[:, None] * PAGE + column[None, :])
            k_scale = tl.load(k_scales_ptr + base + slot)
            v_scale = tl.load(v_scales_ptr + base + slot)
            # A value's scale that is no number makes NaN its token's logit, so what attends to it, and nothing else.
            is_number = tl.abs(v_scale) < _INFINITY
            k_scale = tl.where(is_number, k_scale, float("nan"))
            v_scale = tl.where(is_number, v_scale, 0.0)
            s = tl.dot(q, tl.trans(k.to(tl.float16))) * k_scale[None, :]
            v = tl.trans(v.to(tl.float16))
        else:
            k = tl.load(k_ptr + base * 128 + offsets, is_live[:, None], 0.0)
            s = tl.dot(q, tl.trans(k))
            v = tl.load(v_ptr + base * 128 + offsets, is_live[:, None], 0.0)
        if CAREFUL:
            is_finite = tl.abs(v.to(tl.float32)) < _INFINITY
            v = tl.where(is_finite, v, 0.0)
            is_clean = tl.min(is_finite.to(tl.int32), axis=1) > 0
            is_seen = (start + n)[None, :] <= position[:, None]
            norm += tl.sum(tl.where(is_seen & (is_clean == 0)[None, :], float("nan"), 0.0), axis=1)
        size = tl.zeros((ROWS,), tl.float32)
        if FP8:
            size += power_of(tl.max(v_scale, axis=0))
        if start + BLOCK > first + 1:
            # A key behind a query is one that it has not: it may be a NaN, and its value's scale does not count.
            is_seen = (start + n)[None, :] <= position[:, None]
            s = tl.where(is_seen, s, _LOWEST)
            if FP8:
                size = power_of(tl.max(tl.where(is_seen, v_scale[None, :], 0.0), axis=1))
        # In FP8 the weights carry the scales of the values: both together are under 2^15, of which f16 keeps 11 bits
        # down to 2^-14.  The top has the powers of two in it for that, and they fall out when the sums are divided.
        highest = tl.maximum(top, tl.fma(tl.max(s, axis=1), power, size))
        taken = finite_top(highest)
        weights = tl.exp2(tl.fma(s, power[:, None], -taken[:, None]))
        shrink = tl.exp2(top - taken)
        norm = tl.fma(norm, shrink, tl.sum(weights, axis=1))
        top = highest
        carried = (weights * v_scale[None, :]).to(tl.float16) if FP8 else weights.to(tl.bfloat16)
        total = tl.dot(carried, v, total * shrink[:, None])
    return total, norm


@triton.jit(do_not_specialize=["scale", "T", "num_rows", "max_new", "max_length", "num_pages", "width"])
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    scale,
    T,
    num_rows,
    max_new,
    max_length,
    num_pages,
    width,
    HEADS: tl.constexpr,
    SHARERS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    PAGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one row's queries, for a head of keys.  PAGED: keys lie in pages, else beside the queries in T."""
    QUERIES: tl.constexpr = ROWS // SHARERS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # the kernel in front writes the new tokens, and the lengths change in a graph
    # A row's last part has most keys: it starts first.
    slot = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEADS
    head = tl.program_id(0) % HEADS
    b, begin, end, token, is_wrong = part_of(starts_ptr, slot, num_rows, T, max_new, QUERIES)
    if token < end:
        row, d = tl.arange(0, ROWS), tl.arange(0, 128)
        query = row // SHARERS
        is_query = (query < QUERIES) & (token + query < end)
        base = (token.to(tl.int64) * HEADS + head) * (SHARERS * 128)
        offsets = (query * (HEADS * SHARERS) + row % SHARERS)[:, None] * 128 + d[None, :]
        q = tl.load(q_ptr + base + offsets, is_query[:, None], 0.0)  # under way while length and pages are looked at
        is_own = (b >= 0) & (b < num_rows)
        length = end - begin
        table = table_ptr
        if PAGED:
            length = tl.load(lengths_ptr + b, is_own, 0)
            table = table_ptr + b * width
            is_wrong |= is_own & ((length < end - begin) | (length > max_length))
            pages = tl.where(is_own & (is_wrong == 0), (length + PAGE - 1) // PAGE, 0)
            is_wrong |= has_pages(table, pages, num_pages) == 0
        first = token - end + length
        last = tl.where(is_own & (is_wrong == 0), first + tl.minimum(QUERIES, end - token), 0)
        power = tl.full((ROWS,), 1.0, tl.float32)
        if FP8:
            q, power = without_power(q)
        power = tl.maximum(power * scale, _LEAST)  # times the -inf of a masked key: never 0
        total, norm = attend_keys(
            q,
            power,
            first + query,
            k_ptr,
            v_ptr,
            k_scales_ptr,
            v_scales_ptr,
            table,
            begin,
            head,
            first,
            last,
            HEADS,
            ROWS,
            PAGE,
            BLOCK,
            STAGES,
            FP8,
            PAGED,
            False,
        )
        if not FP8:
            is_finite = tl.abs(total) < _INFINITY
            if tl.min(tl.min(is_finite.to(tl.int32), axis=1), axis=0) == 0:
                total, norm = attend_keys(
                    q,
                    power,
                    first + query,
                    k_ptr,
                    v_ptr,
                    k_scales_ptr,
                    v_scales_ptr,
                    table,
                    begin,
                    head,
                    first,
                    last,
                    HEADS,
                    ROWS,
                    PAGE,
                    BLOCK,
                    1,
                    FP8,
                    PAGED,
                    True,
                )
        fill = tl.where(is_wrong, float("nan"), 0.0)
        out = tl.where(last == 0, fill, total / norm[:, None])
        tl.store(out_ptr + base + offsets, out.to(tl.bfloat16), is_query[:, None])


@triton.jit(do_not_specialize=["T", "num_rows", "max_new", "max_length", "num_pages", "width"])
def append_tokens_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    T,
    num_rows,
    max_new,
    max_length,
    num_pages,
    width,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to TOKENS new tokens of a row, all their heads.  ROWS: the power of two from HEADS up."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b, begin, end, token, is_wrong = part_of(starts_ptr, tl.program_id(0), num_rows, T, max_new, TOKENS)
    is_own = (b >= 0) & (b < num_rows) & (token < end)
    length = tl.load(lengths_ptr + b, is_own, 0)
    if is_own & (is_wrong == 0) & (length >= end - begin) & (length <= max_length):
        pair = tl.arange(0, TOKENS * ROWS)
        of_token, head = token + pair // ROWS, pair % ROWS
        is_new = (of_token < end) & (head < HEADS)
        position = of_token - end + length
        page = tl.load(table_ptr + b * width + position // PAGE, is_new, 0)
        mask = is_new & (page >= 0) & (page < num_pages)
        place = (page.to(tl.int64) * HEADS + head) * PAGE + position % PAGE
        source = of_token.to(tl.int64) * HEADS + head
        append_heads(k_ptr, k_pool_ptr, k_scales_ptr, source, place, mask, PAGE, FP8, False)
        append_heads(v_ptr, v_pool_ptr, v_scales_ptr, source, place, mask, PAGE, FP8, FP8)
