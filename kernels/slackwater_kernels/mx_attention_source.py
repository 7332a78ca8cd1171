"""The Triton sources of MXFP8 attention: tokens quantised into pages, one query a row, and many.

Owns the code that runs on the GPU and nothing of its launch, which is `mx_attention`'s.  Imported lazily, since Triton
is not everywhere.  Tests load it a second time under Triton's interpreter.

Both products are the block-scaled instruction's: queries with keys over the 128 values of a head, weights with values
over tokens.  Queries are quantised once a tile; a token's scale of its values goes into its weight, then weights are
quantised by 32 tokens.  Blocks of keys begin at multiples of their size from a row's first token on and are taken in
order, and a block that a query does not see leaves it as it is: so a query's bits depend neither on the tile that it
is in nor on what else is.  The query heads that share a head of keys are rows of one tile: nothing is expanded.

Columns of the logits are tokens in another order inside each 16: that in which a thread that has logits of the first
product has the weights that it needs for the second.  Keys are loaded in this order, which costs nothing.
"""

# mypy: ignore-errors
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slackwater_kernels.mxfp8_source import exponent_byte
from slackwater_kernels.paged_source import chunk_of, finish_chunk, finite_top, has_pages, pages_of, part_of
from slackwater_kernels.triton_source import quantized

_ROWS = tl.constexpr(16)  # the tensor core's least tile: the query heads of a head of keys, and zeros
_LOWEST = tl.constexpr(float("-inf"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # where there is no assembly
_BYTES = tl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")  # the compiler takes six a pair
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def mx_codes(x, ROWS: tl.constexpr, K: tl.constexpr):
    """fp32 [ROWS, K] to (E4M3 [ROWS, K], E8M0 bytes [ROWS, K / 32]) by rceil; a NaN is a NaN code and no byte."""
    groups = x.reshape(ROWS, K // 32, 32)
    byte = exponent_byte(tl.max(tl.abs(groups), axis=2), False)
    reciprocal = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    # By rceil nothing exceeds 448: nothing is clipped, and so a NaN stays one.
    return (groups * reciprocal[:, :, None]).reshape(ROWS, K).to(tl.float8e4nv), byte.to(tl.uint8)


@triton.jit
def load_queries(q_ptr, offsets, mask, ROWS: tl.constexpr):
    """bf16 [ROWS, 128] from these places, quantised; an infinity counts as the largest number."""
    d = tl.arange(0, 128)
    q = tl.load(q_ptr + offsets[:, None] + d[None, :], mask[:, None], 0.0).to(tl.float32)
    q = tl.where(q != q, q, tl.minimum(tl.maximum(q, -_FLOAT_MAX), _FLOAT_MAX))
    return mx_codes(q, ROWS, 128)


@triton.jit
def token_of(column):
    """Which token of its 16 is in this column of the logits: pairs of one half lie between pairs of the other."""
    return (column & -16) | ((column & 6) << 1) | ((column & 8) >> 2) | (column & 1)


@triton.jit
def in_order(codes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] of columns to [ROWS, BLOCK] of tokens."""
    return codes.reshape(ROWS, BLOCK // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, BLOCK)


@triton.jit
def bytes_of(pairs):
    """int16 of two E4M3 codes to those of the low bytes and of the high ones.

    Values come in pairs, whose columns are summed apart, because the tensor core wants four tokens side by side, and
    only what has 16 bits is turned so on the way from shared memory; single codes would be read one by one.
    """
    if _INTERPRETED:
        low, high = pairs.to(tl.uint8), (pairs >> 8).to(tl.uint8)
    else:
        low, high = tl.inline_asm_elementwise(
            _BYTES, "=r,=r,r,r", [pairs], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def attend_block(
    q, q_bytes, k, k_words, v, v_scale, is_seen, scale, even, odd, top, norm,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(even columns of weighted values, odd ones, largest logit, sum of weights), with a block of tokens more.

    scale: in log2.   Products and sums that could be fused in more than one way say which one they are, so that MASKED
    makes no other bits.
    """
    k_bytes = (k_words[:, None] >> (tl.arange(0, 4) * 8)[None, :]).to(tl.uint8)
    s = tl.dot_scaled(q, q_bytes, "e4m3", tl.trans(k), k_bytes, "e4m3")
    if MASKED:
        s = tl.where(is_seen, s, _LOWEST)
    highest = tl.maximum(top, tl.max(s, axis=1) * scale)
    taken = finite_top(highest)
    weights = tl.exp2(tl.fma(s, scale, -taken[:, None]))
    shrink = tl.exp2(top - taken)
    norm = tl.fma(norm, shrink, tl.sum(weights, axis=1))
    carried = weights * v_scale[None, :]
    if MASKED:
        carried = tl.where(is_seen, carried, 0.0)  # the scale of a token that is not seen may be NaN
    codes, bytes_ = mx_codes(carried, ROWS, BLOCK)
    codes = in_order(codes, ROWS, BLOCK)
    low, high = bytes_of(v)
    ones = tl.full((64, BLOCK // 32), 127, tl.uint8)
    even = tl.dot_scaled(codes, bytes_, "e4m3", low, ones, "e4m3", acc=even * shrink[:, None])
    odd = tl.dot_scaled(codes, bytes_, "e4m3", high, ones, "e4m3", acc=odd * shrink[:, None])
    return even, odd, highest, norm


@triton.jit
def slots_of(page, head, start, HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """(where the block is, int64; the slots behind it of its columns; those of its tokens)."""
    if BLOCK <= PAGE:
        n = tl.arange(0, BLOCK)
        place = ((page * HEADS + head) * PAGE + start % PAGE).to(tl.int64)
        of_column, of_token = token_of(n), n
    else:
        n = tl.arange(0, PAGE)
        place = tl.full((), 0, tl.int64)
        of_page = ((page * HEADS + head) * PAGE).to(tl.int64)[:, None]
        of_column = (of_page + token_of(n)[None, :]).reshape(BLOCK)
        of_token = (of_page + n[None, :]).reshape(BLOCK)
    return place, of_column, of_token


@triton.jit
def attend(
    q, q_bytes, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, table, contiguous, head, limit, first, last, end, scale,
    num_pages, even, odd, top, norm, HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, PAGED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`attend_block` over the blocks from `first` to `last` of a row that is read up to `end`.

    contiguous: where the row's first token is, if not PAGED.   limit: int32 [ROWS], the token from which on a query
    sees none, if MASKED.   Pages of SPAN tokens are looked up before their loop: a copy whose address another load of
    the loop gives is not asked for ahead.
    """
    n, d, pair = tl.arange(0, BLOCK), tl.arange(0, 128), tl.arange(0, 64)
    for begin in range(first, last, SPAN):
        stop = tl.minimum(begin + SPAN, last)
        if PAGED:
            pages, _ = pages_of(table, begin, tl.minimum(begin + SPAN, end), num_pages, PAGE, BLOCK, SPAN)
        for start in tl.range(begin, stop, BLOCK, num_stages=STAGES):
            if PAGED:
                is_block = tl.arange(0, SPAN // BLOCK) == (start - begin) // BLOCK
                if BLOCK <= PAGE:
                    page = tl.sum(tl.where(is_block, pages, 0), axis=0)
                else:
                    page = tl.sum(tl.where(is_block[:, None], pages, 0), axis=0)
                place, of_column, of_token = slots_of(page, head, start, HEADS, PAGE, BLOCK)
            else:
                place, of_column, of_token = contiguous + start, token_of(n), n
            k_tile = k_ptr + place * 128 + (of_column[:, None] * 128 + d[None, :])
            v_tile = v_ptr + place * 64 + (of_token[:, None] * 64 + pair[None, :])
            k_words_tile, v_scales_tile = k_scales_ptr + place + of_column, v_scales_ptr + place + of_column
            column = start + token_of(n)
            is_seen = column[None, :] < limit[:, None]
            if MASKED:
                # Slots behind the last token may hold anything, a NaN too: they are neither read nor multiplied.
                is_column, is_token = column < end, start + n < end
                k = tl.load(k_tile, is_column[:, None], 0.0)
                k_words = tl.load(k_words_tile, is_column, 0)
                v = tl.load(v_tile, is_token[:, None], 0)
                v_scale = tl.load(v_scales_tile, is_column, 0.0)
            else:
                k, k_words = tl.load(k_tile), tl.load(k_words_tile)
                v, v_scale = tl.load(v_tile), tl.load(v_scales_tile)
            even, odd, top, norm = attend_block(
                q, q_bytes, k, k_words, v, v_scale, is_seen, scale, even, odd, top, norm, ROWS, BLOCK, MASKED
            )
    return even, odd, top, norm


@triton.jit(do_not_specialize=["scale", "max_length", "num_pages", "width"])
def decode_mx_kernel(
    q_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, table_ptr, lengths_ptr, out_ptr, partials_ptr, stats_ptr,
    counters_ptr, scale, max_length, num_pages, width, HEADS: tl.constexpr, SHARERS: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row and head of keys.  ROWS: the power of two from SHARERS up."""
    head, b, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # the kernel in front writes the step's token, and the lengths change in a graph
    is_wrong, live, first, last = chunk_of(lengths_ptr, max_length, CHUNK)
    if chunk < tl.maximum(live, 1):
        row = tl.arange(0, _ROWS)
        table = table_ptr + b * width
        pages = (last + PAGE - 1) // PAGE - first // PAGE
        faulty = has_pages(table + first // PAGE, pages, num_pages) == 0
        q, q_bytes = load_queries(q_ptr, ((b * HEADS + head) * SHARERS + row) * 128, row < SHARERS, _ROWS)
        limit = tl.full((_ROWS,), 0, tl.int32) + last
        even, odd = tl.zeros((_ROWS, 64), tl.float32), tl.zeros((_ROWS, 64), tl.float32)
        top = tl.full((_ROWS,), _LOWEST, tl.float32)
        norm = tl.full((_ROWS,), 0.0, tl.float32) + tl.where(faulty, float("nan"), 0.0)
        even, odd, top, norm = attend(
            q, q_bytes, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, table, 0, head, limit, first, last, last, scale,
            num_pages, even, odd, top, norm, HEADS, PAGE, BLOCK, CHUNK, STAGES, _ROWS, True, True,
        )  # fmt: skip
        total = tl.join(even, odd).reshape(_ROWS, 128)
        finish_chunk(
            total, top, norm, live, is_wrong, out_ptr, out_ptr, partials_ptr, stats_ptr, counters_ptr, 0, HEADS,
            SHARERS, _ROWS, ROWS, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["scale", "T", "num_rows", "max_new", "max_length", "num_pages", "width"])
def tiles_mx_kernel(
    q_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, scale, T, num_rows,
    max_new, max_length, num_pages, width, HEADS: tl.constexpr, SHARERS: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PAGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one row's queries, for a head of keys.  PAGED: keys lie in pages, else where `MxTokens` has them."""
    QUERIES: tl.constexpr = ROWS // SHARERS
    SPAN: tl.constexpr = 16 * BLOCK if PAGED else 1 << 30
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # the kernel in front writes the new tokens, and the lengths change in a graph
    # A row's last part has most keys: it starts first.
    slot = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEADS
    head = tl.program_id(0) % HEADS
    b, begin, end, token, is_wrong = part_of(starts_ptr, slot, num_rows, T, max_new, QUERIES)
    if token < end:
        is_own = (b >= 0) & (b < num_rows)
        length = end - begin
        table = table_ptr
        if PAGED:
            length = tl.load(lengths_ptr + b, is_own, 0)
            table = table_ptr + b * width
            is_wrong |= is_own & ((length < end - begin) | (length > max_length))
            pages = tl.where(is_own & (is_wrong == 0), (length + PAGE - 1) // PAGE, 0)
            is_wrong |= has_pages(table, pages, num_pages) == 0
        is_right = is_own & (is_wrong == 0)
        first = token - end + length
        last = tl.where(is_right, first + tl.minimum(QUERIES, end - token), 0)
        whole = tl.where(is_right, (first + 1) // BLOCK * BLOCK, 0)  # up to here each query sees every token
        row, d = tl.arange(0, ROWS), tl.arange(0, 128)
        query = row // SHARERS
        is_query = (query < QUERIES) & (token + query < end)
        offsets = ((token + query).to(tl.int64) * (HEADS * SHARERS) + head * SHARERS + row % SHARERS) * 128
        q, q_bytes = load_queries(q_ptr, offsets, is_query, ROWS)
        limit = first + query + 1
        even, odd = tl.zeros((ROWS, 64), tl.float32), tl.zeros((ROWS, 64), tl.float32)
        norm, top = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), _LOWEST, tl.float32)
        contiguous = head.to(tl.int64) * T + begin
        even, odd, top, norm = attend(
            q, q_bytes, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, table, contiguous, head, limit, 0, whole, last, scale,
            num_pages, even, odd, top, norm, HEADS, PAGE, BLOCK, SPAN, STAGES, ROWS, PAGED, False,
        )  # fmt: skip
        even, odd, top, norm = attend(
            q, q_bytes, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, table, contiguous, head, limit, whole, last, last,
            scale, num_pages, even, odd, top, norm, HEADS, PAGE, BLOCK, SPAN, STAGES, ROWS, PAGED, True,
        )  # fmt: skip
        total = tl.join(even, odd).reshape(ROWS, 128)
        fill = tl.where(is_wrong, float("nan"), 0.0)
        out = tl.where(last == 0, fill, total / norm[:, None])
        tl.store(out_ptr + offsets[:, None] + d[None, :], out.to(tl.bfloat16), is_query[:, None])


@triton.jit
def put_heads(
    k_ptr, v_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, source, place, mask, ROWS: tl.constexpr
):
    """Heads `source` of a flat batch, quantised, to slots `place`, int64 [ROWS]; key_scales_ptr: to single bytes."""
    d = tl.arange(0, 128)
    offsets = source[:, None] * 128 + d[None, :]
    of_slot = place[:, None] * 128 + d[None, :]
    x = tl.load(k_ptr + offsets, mask[:, None], 0.0).to(tl.float32)
    groups = x.reshape(ROWS, 4, 32)
    has_nan = tl.max((groups != groups).to(tl.int32), axis=2) > 0
    clipped = tl.minimum(tl.maximum(groups, -_FLOAT_MAX), _FLOAT_MAX)
    codes, byte = mx_codes(clipped.reshape(ROWS, 128), ROWS, 128)
    bits = tl.where(has_nan[:, :, None], 0x7F, codes.to(tl.uint8, bitcast=True).reshape(ROWS, 4, 32))
    tl.store(keys_ptr + of_slot, bits.reshape(ROWS, 128), mask[:, None])
    of_byte = place[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(key_scales_ptr + of_byte, tl.where(has_nan, 255, byte).to(tl.uint8), mask[:, None])
    x = tl.load(v_ptr + offsets, mask[:, None], 0.0).to(tl.float32)
    codes, scale, of_nan = quantized(x)
    tl.store(values_ptr + of_slot, tl.where(of_nan[:, None], 0, codes.to(tl.uint8, bitcast=True)), mask[:, None])
    tl.store(value_scales_ptr + place, scale, mask)


@triton.jit(do_not_specialize=["T", "num_rows", "max_new", "max_length", "num_pages", "width"])
def append_mx_kernel(
    k_ptr, v_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, lengths_ptr, starts_ptr, T,
    num_rows, max_new, max_length, num_pages, width, HEADS: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to TOKENS new tokens of a row, or the last of each, all their heads.  SPAN: the power of two from HEADS up.

    Where the row is wrong or idle, or the token's page is none of the pool's: nothing.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if RAGGED:
        b, begin, end, token, is_wrong = part_of(starts_ptr, tl.program_id(0), num_rows, T, max_new, TOKENS)
        is_own = (b >= 0) & (b < num_rows) & (token < end)
        length = tl.load(lengths_ptr + b, is_own, 0)
        is_right = is_own & (is_wrong == 0) & (length >= end - begin) & (length <= max_length)
    else:
        b, token = tl.program_id(0), tl.program_id(0)
        end = b + 1
        length = tl.load(lengths_ptr + b)
        is_right = (length > 0) & (length <= width * PAGE)
    if is_right:
        pair = tl.arange(0, TOKENS * SPAN)
        of_token, head = token + pair // SPAN, pair % SPAN
        is_new = (of_token < end) & (head < HEADS)
        position = of_token - end + length
        page = tl.load(table_ptr + b * width + position // PAGE, is_new, 0)
        mask = is_new & (page >= 0) & (page < num_pages)
        place = (page.to(tl.int64) * HEADS + head) * PAGE + position % PAGE
        source = of_token.to(tl.int64) * HEADS + head
        put_heads(
            k_ptr, v_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, source, place, mask, TOKENS * SPAN
        )


@triton.jit(do_not_specialize=["T"])
def quantise_tokens_kernel(
    k_ptr, v_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, T,
    HEADS: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a flat batch, all their heads, to where a head's tokens lie one after the other."""
    row = tl.arange(0, TOKENS * SPAN)
    token, head = (tl.program_id(0) * TOKENS + row // SPAN).to(tl.int64), row % SPAN
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mask = (token < T) & (head < HEADS)
    put_heads(
        k_ptr, v_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, token * HEADS + head,
        head.to(tl.int64) * T + token, mask, TOKENS * SPAN,
    )  # fmt: skip
