"""The Triton sources: quantisers, the block-scaled product and what is fused into them.

Owns the code that runs on the GPU and nothing of its launch: sizes, workspaces and checks are `quantize`'s, `gemm`'s
and `plan`'s.  Imported lazily, since Triton is not everywhere.  Tests load it a second time under Triton's interpreter.

Weights are the 64-row operand of the tensor core ("swap-AB"), because FP8 has no native path on sm_90 with fewer
rows; a token tile of 16 is the least.  A 128-block is summed in the tensor core, which keeps about 14 bits, and then
scaled and added in fp32.  With PDL the kernel in front may still run: only weights are read before `gdc_wait`.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing,
# and it knows no unpacking into a tuple and no `and` of what is known before and after compiling.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TILE = tl.constexpr(16384)  # bytes of a 128 x 128 tile
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_PREFETCH = tl.constexpr(
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
    " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


@triton.jit
def quantized(x):
    """fp32 [rows, 128] to (E4M3 [rows, 128], scale [rows], holds NaN [rows]), as `reference.quantize_activations`."""
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    x = tl.minimum(tl.maximum(x, -_FLOAT_MAX), _FLOAT_MAX)
    multiplier = tl.div_rn(448.0, tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10))
    scale = tl.where(has_nan, float("nan"), tl.div_rn(1.0, multiplier))
    codes = tl.minimum(tl.maximum(x * multiplier[:, None], -448.0), 448.0).to(tl.float8e4nv)
    return codes, scale, has_nan


@triton.jit
def store_quantized(x, codes_ptr, scales_ptr, m, M, MP, groups, BLOCKS: tl.constexpr):
    """Store one row's groups: codes as bytes, scales group-major; rows from M on are padding and hold scale 0."""
    codes, scale, has_nan = quantized(x)
    bytes_ = tl.where(has_nan[:, None], 0x7F, codes.to(tl.uint8, bitcast=True))
    offsets = m.to(tl.int64) * BLOCKS * 128 + groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(codes_ptr + offsets, bytes_, (groups < tl.where(m < M, BLOCKS, 0))[:, None])
    tl.store(scales_ptr + groups * MP + m, tl.where(m < M, scale, 0.0), groups < BLOCKS)


@triton.jit
def load_groups(ptr, m, M, stride, groups, BLOCKS: tl.constexpr):
    """fp32 [groups, 128] of row m."""
    offsets = m.to(tl.int64) * stride + groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    return tl.load(ptr + offsets, (groups < tl.where(m < M, BLOCKS, 0))[:, None], 0.0).to(tl.float32)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up of bf16 values held in fp32, rounded to bf16."""
    return (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)


@triton.jit(do_not_specialize=["M", "MP"])
def quantize_kernel(x_ptr, codes_ptr, scales_ptr, M, MP, BLOCKS: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0)
    groups = tl.program_id(1) * PER + tl.arange(0, PER)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = load_groups(x_ptr, m, M, BLOCKS * 128, groups, BLOCKS)
    store_quantized(x, codes_ptr, scales_ptr, m, M, MP, groups, BLOCKS)


@triton.jit(do_not_specialize=["M", "MP"])
def swiglu_quantize_kernel(
    gate_up_ptr, codes_ptr, scales_ptr, M, MP, BLOCKS: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr
):
    m = tl.program_id(0)
    groups = tl.program_id(1) * PER + tl.arange(0, PER)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = load_groups(gate_up_ptr, m, M, BLOCKS * 256, groups, BLOCKS)
    up = load_groups(gate_up_ptr + BLOCKS * 128, m, M, BLOCKS * 256, groups, BLOCKS)
    h = silu_times(gate, up).to(tl.float32)
    store_quantized(h, codes_ptr, scales_ptr, m, M, MP, groups, BLOCKS)


@triton.jit(do_not_specialize=["M", "MP", "eps"])
def rmsnorm_quantize_kernel(
    x_ptr, gain_ptr, codes_ptr, scales_ptr, M, MP, eps, BLOCKS: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr
):
    m = tl.program_id(0)
    groups = tl.arange(0, PER)  # a row is one program: the norm needs all of it
    gain = load_groups(gain_ptr, tl.program_id(1), 1, 0, groups, BLOCKS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = load_groups(x_ptr, m, M, BLOCKS * 128, groups, BLOCKS)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (BLOCKS * 128)
    y = (x * tl.rsqrt(mean + eps) * gain).to(tl.bfloat16).to(tl.float32)
    store_quantized(y, codes_ptr, scales_ptr, m, M, MP, groups, BLOCKS)


@triton.jit
def prefetch(ptr, size):
    """One thread asks the L2 for `size` bytes from here."""
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [ptr, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_rounded(total, residual_ptr, out_ptr, offsets, mask, RESIDUAL: tl.constexpr):
    """The one rounding to bf16, after the residual."""
    if RESIDUAL:
        total += tl.load(residual_ptr + offsets, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(tl.bfloat16), mask)


@triton.jit
def finish(
    part,
    partials_ptr,
    counters_ptr,
    residual_ptr,
    out_ptr,
    M,
    rows,
    tokens,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store the tile, or leave the part and let the last CTA of the tile add all parts in the order of the tree."""
    mask = (tokens < M)[None, :] & (rows < N)[:, None]
    offsets = tokens.to(tl.int64)[None, :] * N + rows[:, None]
    if SPLITS == 1:
        store_rounded(part, residual_ptr, out_ptr, offsets, mask, RESIDUAL)
    else:
        plane = M.to(tl.int64) * N
        tl.store(partials_ptr + tl.program_id(1) * plane + offsets, part, mask)
        counter = counters_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            group = tl.zeros((ROWS, TOKENS), tl.float32)
            for split in tl.static_range(SPLITS):
                group += tl.load(partials_ptr + split * plane + offsets, mask, 0.0, cache_modifier=".cg")
                if (split + 1) % GROUP == 0 or split == SPLITS - 1:
                    total += group
                    group = tl.zeros((ROWS, TOKENS), tl.float32)
            store_rounded(total, residual_ptr, out_ptr, offsets, mask, RESIDUAL)
            tl.store(counter, 0)  # ready for the next launch


@triton.jit(do_not_specialize=["M", "MP"])
def stream_kernel(
    weight_ptr,
    weight_scales_ptr,
    x_ptr,
    x_scales_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    MP,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEAF: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One leaf a CTA: all its weights are asked for at once and lie in shared memory when the activations come."""
    tile = tl.program_id(0) * ROWS // 128
    first = tl.program_id(1) * LEAF
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row, k = tl.arange(0, ROWS), tl.arange(0, 128)
    base = weight_ptr + tile.to(tl.int64) * (BLOCKS * _TILE) + tl.program_id(0) * ROWS % 128 * 128
    if PDL:
        gdc_launch_dependents()
    weights, weight_scales = (), ()
    for i in tl.static_range(LEAF):
        block = min(first + i, BLOCKS - 1)  # a short last leaf reads its last block again, times 0
        weights = weights + (
            tl.load(base + block * _TILE + row[:, None] * 128 + k[None, :], eviction_policy="evict_first"),
        )
        weight_scales = weight_scales + (tl.load(weight_scales_ptr + tile * BLOCKS + block),)
    if PDL:
        gdc_wait()
    xs, x_scales = (), ()
    for i in tl.static_range(LEAF):
        live = tokens < tl.where(first + i < BLOCKS, M, 0)
        offsets = tokens.to(tl.int64)[:, None] * (BLOCKS * 128) + (first + i) * 128 + k[None, :]
        xs = xs + (tl.load(x_ptr + offsets, live[:, None], 0.0),)
        x_scales = x_scales + (tl.load(x_scales_ptr + (first + i) * MP + tokens, live, 0.0),)
    part = tl.zeros((ROWS, TOKENS), tl.float32)
    for i in tl.static_range(LEAF):
        part += tl.dot(weights[i], tl.trans(xs[i])) * (x_scales[i] * weight_scales[i])[None, :]
    SPLITS: tl.constexpr = (BLOCKS + LEAF - 1) // LEAF
    rows = tl.program_id(0) * ROWS + row
    finish(
        part,
        partials_ptr,
        counters_ptr,
        residual_ptr,
        out_ptr,
        M,
        rows,
        tokens,
        N,
        SPLITS,
        GROUP,
        RESIDUAL,
        ROWS,
        TOKENS,
    )


@triton.jit
def quantize_whole_group(
    hidden_ptr,
    codes_ptr,
    scales_ptr,
    counters_ptr,
    group,
    tokens,
    M,
    MP,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Quantise 128 columns of `hidden` for these tokens, by the CTA that finds their other parts stored."""
    counter = counters_ptr + tl.program_id(2) * GROUPS + group
    tl.debug_barrier()  # every thread's part is written before one of them says so
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == PARTS - 1:
        offsets = tokens.to(tl.int64)[:, None] * (GROUPS * 128) + group * 128 + tl.arange(0, 128)[None, :]
        live = (tokens < M)[:, None]
        codes, scale, has_nan = quantized(tl.load(hidden_ptr + offsets, live, 0.0, cache_modifier=".cg").to(tl.float32))
        tl.store(codes_ptr + offsets, tl.where(has_nan[:, None], 0x7F, codes.to(tl.uint8, bitcast=True)), live)
        tl.store(scales_ptr + group * MP + tokens, tl.where(tokens < M, scale, 0.0), tokens < MP)
        tl.store(counter, 0)  # ready for the next launch


@triton.jit(do_not_specialize=["M", "MP"])
def loop_kernel(
    weight_ptr,
    weight_desc,
    weight_scales_ptr,
    x_ptr,
    x_desc,
    x_scales_ptr,
    x_scales_desc,
    residual_ptr,
    out_ptr,
    out_scales_ptr,
    hidden_ptr,
    partials_ptr,
    counters_ptr,
    M,
    MP,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEAF: tl.constexpr,
    GROUP: tl.constexpr,
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A pipeline over one group of leaves, or over all of K.

    GATED: half of a CTA's rows are gate's and half are up's of the same hidden values; SwiGLU of them is stored, and
    the last CTA of a group of 128 quantises it.
    """
    SPAN: tl.constexpr = LEAF * GROUP
    HIDDEN: tl.constexpr = ROWS // 2 if GATED else ROWS  # rows of the weight side by side
    UP: tl.constexpr = N // 2 // 128 * BLOCKS  # tiles from a gate row's to its up row's
    tile = tl.program_id(0) * HIDDEN // 128
    inner = tl.program_id(0) * HIDDEN % 128
    first = 0 if ALL else tl.program_id(1) * SPAN
    last = BLOCKS if ALL else min(first + SPAN, BLOCKS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row, k = tl.arange(0, ROWS), tl.arange(0, 128)
    base = weight_ptr + tile.to(tl.int64) * (BLOCKS * _TILE) + inner * 128
    scales = weight_scales_ptr + tile * BLOCKS
    w_offsets = (row // HIDDEN * (UP * _TILE) + row % HIDDEN * 128)[:, None] + k[None, :]
    x_offsets = tokens.to(tl.int64)[:, None] * (BLOCKS * 128) + k[None, :]
    for i in tl.static_range(AHEAD):
        prefetch(base + (first + i) * _TILE, HIDDEN * 128)
        if GATED:
            prefetch(base + (UP + first + i) * _TILE, HIDDEN * 128)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    leaf = tl.zeros((ROWS, TOKENS), tl.float32)
    group = tl.zeros((ROWS, TOKENS), tl.float32)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        if TMA and not GATED:
            w = weight_desc.load([(tile * BLOCKS + block) * 128 + inner, 0])
        else:
            w = tl.load(base + block * _TILE + w_offsets)
        if TMA:
            x = x_desc.load([tl.program_id(2) * TOKENS, block * 128])
        else:
            x = tl.load(x_ptr + x_offsets + block * 128, (tokens < M)[:, None], 0.0)
        if TMA and TOKENS >= 32:  # a box in shared memory has at least 128 bytes
            x_scale = x_scales_desc.load([block * MP + tl.program_id(2) * TOKENS])
        else:
            x_scale = tl.load(x_scales_ptr + block * MP + tokens, tokens < M, 0.0)
        scale = tl.load(scales + block)
        if GATED:
            of_row = tl.where(row < HIDDEN, scale, tl.load(scales + UP + block))
            leaf += tl.dot(w, tl.trans(x)) * (x_scale[None, :] * of_row[:, None])
        else:
            leaf += tl.dot(w, tl.trans(x)) * (x_scale * scale)[None, :]
        if LEAF < BLOCKS:
            if (block + 1) % LEAF == 0:
                group += leaf
                leaf = tl.zeros((ROWS, TOKENS), tl.float32)
            if ALL:
                if (block + 1) % SPAN == 0:
                    total += group
                    group = tl.zeros((ROWS, TOKENS), tl.float32)
    if PDL and not EARLY:
        gdc_launch_dependents()
    if GATED:
        rounded = leaf.to(tl.bfloat16).to(tl.float32).reshape(2, HIDDEN, TOKENS)
        gate, up = tl.split(tl.permute(rounded, (1, 2, 0)))
        column = tl.program_id(0) * HIDDEN
        offsets = tokens.to(tl.int64)[None, :] * (N // 2) + column + tl.arange(0, HIDDEN)[:, None]
        tl.store(hidden_ptr + offsets, silu_times(gate, up), (tokens < M)[None, :])
        quantize_whole_group(
            hidden_ptr, out_ptr, out_scales_ptr, counters_ptr, column // 128, tokens, M, MP, N // 256, 128 // HIDDEN
        )
    else:
        SPLITS: tl.constexpr = 1 if ALL else (BLOCKS + SPAN - 1) // SPAN
        finish(
            total + (group + leaf),
            partials_ptr,
            counters_ptr,
            residual_ptr,
            out_ptr,
            M,
            tl.program_id(0) * ROWS + row,
            tokens,
            N,
            SPLITS,
            1,
            RESIDUAL,
            ROWS,
            TOKENS,
        )
