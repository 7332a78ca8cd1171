"""The Triton source of attention over an `Fp8KvPool`, one query a row: both products on Hopper's FP8 tensor cores.

Owns the code that runs on the GPU and nothing of its launch, which is `attention`'s.  Imported lazily, since Triton is
not everywhere.  Tests load it a second time under Triton's interpreter.

Keys and values go from memory to the tensor cores as they lie: tokens are the 64 rows of the first product, the values
of a head those of the second, and neither is ever in a register.  So what is multiplied with them must be FP8 too.  A
query is taken apart into two codes, which hold a bf16 exactly, a weight into three, each 16 times finer than the one
before; the parts are columns of one product and are put together behind it.  Scales never meet a code: a key's goes
into the logits, a value's into the weights.

Chunks, their merging and what a wrong or idle row is are those of `attention_source.decode_kernel`.
"""

# mypy: ignore-errors
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slackwater_kernels.paged_source import checked_pages, chunk_of, finish_chunk, finite_top, first_tokens
from slackwater_kernels.triton_source import prefetch

_LOWEST = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))
_STEP = tl.constexpr(16.0)  # a part is this much finer than the one before: e4m3 rounds at 2^-4 of a number
_AHEAD = tl.constexpr(2)  # blocks that the L2 is asked for before the kernel in front has ended
_WEIGHT_BITS = tl.constexpr(7.0)  # weights are under 2^8, the power of two under E4M3's largest number


@triton.jit
def code(x):
    """fp32 to the bits of its E4M3 code.

    Codes are chosen among as bits: a constant that is converted takes two bytes from a register that nobody has set
    (ptxas 12.8, `F2FP.PACK_AB_MERGE_C`).
    """
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def finer(x):
    """What E4M3 leaves of x, a step larger."""
    return (x - x.to(tl.float8e4nv).to(tl.float32)) * _STEP


@triton.jit
def queries(q_ptr, first, SHARERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """bf16 [128, COLUMNS]: column p * ROWS + r is query head first + r, for each p, and zeros behind the sharers."""
    row, d = tl.arange(0, COLUMNS) % ROWS, tl.arange(0, 128)
    return tl.load(q_ptr + (first + row)[None, :] * 128 + d[:, None], (row < SHARERS)[None, :], 0.0)


@triton.jit
def query_parts(q, ROWS: tl.constexpr):
    """(E4M3 of the shape of q, a power of two of each column): column p * ROWS + r is part p of query head r.

    Exact, but for what is under 2^-13 of the head's largest, which is rounded at 2^-21 of it.  What is no finite
    number is NaN.
    """
    part = (tl.arange(0, q.shape[1]) // ROWS)[None, :]
    q = q.to(tl.float32)
    exponent = tl.minimum(tl.maximum(tl.max(tl.abs(q), axis=0).to(tl.int32, bitcast=True) >> 23, 8), 253)
    q = tl.where(
        tl.abs(q) < _INFINITY, q * ((261 - exponent) << 23).to(tl.float32, bitcast=True)[None, :], float("nan")
    )
    parts = tl.where(part == 0, code(q), tl.where(part == 1, code(finer(q)), 0))
    return parts.to(tl.float8e4nv, bitcast=True), ((exponent - 7) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weight_parts(weights, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """fp32 [tokens, ROWS] under 2^8 to E4M3 [tokens, PARTS * ROWS], of which three parts are used."""
    part = tl.arange(0, PARTS)[None, :, None]
    second = finer(weights)
    later = tl.where(part == 1, code(second)[:, None, :], tl.where(part == 2, code(finer(second))[:, None, :], 0))
    parts = tl.where(part == 0, code(weights)[:, None, :], later)
    return tl.reshape(parts, (weights.shape[0], PARTS * ROWS)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def taken_apart(scale):
    """(e, 2^-e, m) with scale = m 2^e and m from 1 up to 2; 2^-e is NaN where the scale is no finite number."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    power = tl.where(exponent == 255, float("nan"), ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    return (exponent - 127).to(tl.float32), power, ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def together(x, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """fp32 [n, PARTS * ROWS] to [n, ROWS]: each part over what it is finer by."""
    part = tl.arange(0, PARTS)
    size = tl.where(part == 0, 1.0, tl.where(part == 1, 1.0 / _STEP, tl.where(part == 2, 1.0 / (_STEP * _STEP), 0.0)))
    return tl.sum(tl.reshape(x, (x.shape[0], PARTS, ROWS)) * size[None, :, None], axis=1)


@triton.jit
def of_each_part(x, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS] to [PARTS * ROWS]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (PARTS, ROWS)), (PARTS * ROWS,))


@triton.jit
def attend(
    q,
    power,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table,
    head,
    first,
    last,
    scale,
    num_pages,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(weighted values [ROWS, 128], largest level [ROWS], sum of weights [ROWS]) of tokens first to last.

    q, power: as `query_parts` has them.   table: the entries of the chunk.   scale: in log2.   A level is a logit and
    the exponent of its value's scale: so the weight that carries that scale is under 2^8, whatever the scales.
    """
    n, d = tl.arange(0, BLOCK), tl.arange(0, 128)
    power = tl.max(tl.reshape(power, (PARTS, ROWS)), axis=0) * scale
    pages, are_pages = checked_pages(table, first_tokens(first, PAGE, BLOCK, CHUNK) < last, num_pages)
    total = tl.zeros((128, PARTS * ROWS), tl.float32)
    norms = tl.zeros((BLOCK, ROWS), tl.float32)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        is_live = start + n < last
        is_block = tl.arange(0, CHUNK // BLOCK) == (start - first) // BLOCK
        if BLOCK <= PAGE:
            page = tl.sum(tl.where(is_block, pages, 0), axis=0)
            inside = tl.multiple_of(start % PAGE, BLOCK)
            base = (page * HEADS + head).to(tl.int64) * PAGE
            k_tile, scale_at = k_ptr + (base + inside) * 128, base + inside
            v_tile, slot, column = v_ptr + base * 128 + inside, n, n
        else:
            page = tl.sum(tl.where(is_block[:, None], pages, 0), axis=0)
            base = ((page * HEADS + head).to(tl.int64) * PAGE)[:, None]
            k_tile, v_tile, scale_at = k_ptr, v_ptr, 0
            slot = (base + tl.arange(0, PAGE)[None, :]).reshape(BLOCK)
            column = (base * 128 + tl.arange(0, PAGE)[None, :]).reshape(BLOCK)
            column = tl.max_contiguous(tl.multiple_of(column, PAGE), PAGE)
        # Slots behind the last token have scales that may be anything, and codes that are numbers: their keys make
        # logits that are not looked at, their values meet the weight 0.
        k = tl.load(k_tile + slot[:, None] * 128 + d[None, :])
        v = tl.load(v_tile + d[:, None] * PAGE + column[None, :])
        k_scale = tl.load(k_scales_ptr + scale_at + slot)
        v_scale = tl.load(v_scales_ptr + scale_at + slot)
        s = together(tl.dot(k, q), ROWS, PARTS) * k_scale[:, None] * power[None, :]
        exponent, power_down, mantissa = taken_apart(v_scale)
        s = tl.where(is_live[:, None], s + exponent[:, None], _LOWEST)
        highest = tl.maximum(top, tl.max(s, axis=0))
        level = finite_top(highest)
        weights = tl.exp2(s - (level - _WEIGHT_BITS)[None, :])
        shrink = tl.exp2(top - level)
        # Summed by token, and over tokens once at the end: each sum over tokens is one over all warps.
        norms = norms * shrink[None, :] + tl.where(is_live[:, None], weights * power_down[:, None], 0.0)
        parts = weight_parts(weights * mantissa[:, None], ROWS, PARTS)
        total = total * of_each_part(shrink, ROWS, PARTS)[None, :] + tl.dot(v, parts)
        top = highest
    norm = tl.sum(norms, axis=0) + tl.where(are_pages, 0.0, float("nan"))
    return tl.trans(together(total, ROWS, PARTS)), top, norm


@triton.jit
def ask_ahead(
    k_ptr, v_ptr, table, head, first, num_pages, width, HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Ask the L2 for what the first blocks read, while the kernel in front ends.

    The table may be older than this step's; no answer is read, so the worst is a page that nobody wanted.  It is read
    past the L1, which would keep the old entry.
    """
    COUNT: tl.constexpr = _AHEAD * BLOCK // PAGE if BLOCK > PAGE else _AHEAD
    of = tl.arange(0, COUNT)
    entries = tl.load(table + first + of, first + of < width, -1, cache_modifier=".cg")
    for i in tl.static_range(COUNT):
        page = tl.sum(tl.where(of == i, entries, 0), axis=0)
        if (page >= 0) & (page < num_pages):
            place = (page * HEADS + head).to(tl.int64) * (PAGE * 128)
            prefetch(k_ptr + place, PAGE * 128)
            prefetch(v_ptr + place, PAGE * 128)


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
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of a row and head of keys.  ROWS: the power of two from SHARERS up."""
    PARTS: tl.constexpr = 16 // ROWS if ROWS < 4 else 4  # the tensor core takes 16 columns or more
    head, b, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        ask_ahead(
            k_ptr, v_ptr, table_ptr + b * width, head, chunk * (CHUNK // PAGE), num_pages, width, HEADS, PAGE, BLOCK
        )
        gdc_wait()  # the kernel in front writes the step's token, and the lengths change in a graph
    is_wrong, live, first, last = chunk_of(lengths_ptr, max_length, CHUNK)
    # Asked for beside the length, which decides whether they are wanted.
    page = first_tokens(chunk * CHUNK, PAGE, BLOCK, CHUNK) // PAGE
    table = tl.load(table_ptr + b * width + page, page < width, 0)
    q, power = query_parts(queries(q_ptr, (b * HEADS + head) * SHARERS, SHARERS, ROWS, PARTS * ROWS), ROWS)
    if chunk < tl.maximum(live, 1):
        total, top, norm = attend(
            q,
            power,
            k_ptr,
            v_ptr,
            k_scales_ptr,
            v_scales_ptr,
            table,
            head,
            first,
            last,
            scale,
            num_pages,
            HEADS,
            ROWS,
            PARTS,
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
            ROWS,
            ROWS,
            QUANTISE,
        )
