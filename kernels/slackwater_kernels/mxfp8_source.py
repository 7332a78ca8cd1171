"""The Triton sources of MXFP8: the quantisers, and the product by the block-scaled tensor core instruction.

Owns the code that runs on the GPU and nothing of its launch, which is `mxfp8`'s.  Imported lazily, since Triton is not
everywhere.  Tests load it a second time under Triton's interpreter.

`tl.dot_scaled` becomes the native instruction on sm_120a, and on sm_103a with 128 rows.  Elsewhere Triton widens both
operands to bf16, which holds every product of a code and a power of two: slow, and the same numbers but for the order
inside a sum.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing,
# and it knows no `and` of what is known before and after compiling.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slackwater_kernels.triton_source import finish, silu_times

_TILE = tl.constexpr(16384)  # bytes of a 128 x 128 tile
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_MANTISSA_1_75 = tl.constexpr(0x600000)  # the fp32 mantissa bits of 1.75: 448 = 1.75 * 2^8
_ONE = tl.constexpr(127)  # the E8M0 byte of 1: what padding rows hold, since 0 times NaN would be NaN


@triton.jit
def exponent_byte(amax, FLOOR: tl.constexpr):
    """fp32 amax >= 0 to its block's E8M0 byte as int32, from its bits, as `numerics.e8m0_byte`."""
    bits = amax.to(tl.int32, bitcast=True)
    e = (bits >> 23) - 127 - 8
    if not FLOOR:
        e += tl.where((bits & 0x7FFFFF) > _MANTISSA_1_75, 1, 0)
    return tl.minimum(tl.maximum(e, -127), 127) + 127


@triton.jit
def load_blocks(ptr, m, M, stride, group, BLOCKS: tl.constexpr):
    """fp32 [groups, 32] of row m."""
    offsets = m.to(tl.int64) * stride + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.load(ptr + offsets, (group < tl.where(m < M, BLOCKS * 4, 0))[:, None], 0.0).to(tl.float32)


@triton.jit
def store_blocks(x, codes_ptr, scales_ptr, m, M, MP, group, BLOCKS: tl.constexpr, FLOOR: tl.constexpr):
    """Store some groups of 32 of one row; the bytes of four lie as one word, and rows from M on are padding."""
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    x = tl.minimum(tl.maximum(x, -_FLOAT_MAX), _FLOAT_MAX)
    byte = exponent_byte(tl.max(tl.abs(x), axis=1), FLOOR)
    # 1 / 2^(byte - 127): the byte mirrored; no amax of fp32 is so large that this would be subnormal.
    reciprocal = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    codes = tl.minimum(tl.maximum(x * reciprocal[:, None], -448.0), 448.0).to(tl.float8e4nv)
    bytes_ = tl.where(has_nan[:, None], 0x7F, codes.to(tl.uint8, bitcast=True))
    offsets = m.to(tl.int64) * BLOCKS * 128 + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes_ptr + offsets, bytes_, (group < tl.where(m < M, BLOCKS * 4, 0))[:, None])
    byte = tl.where(m < M, tl.where(has_nan, 255, byte), _ONE)
    tl.store(scales_ptr + (group // 4 * MP + m) * 4 + group % 4, byte.to(tl.uint8), group < BLOCKS * 4)


@triton.jit(do_not_specialize=["M", "MP"])
def quantize_mx_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    M,
    MP,
    BLOCKS: tl.constexpr,
    PER: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0)
    group = tl.program_id(1) * (PER * 4) + tl.arange(0, PER * 4)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = load_blocks(x_ptr, m, M, BLOCKS * 128, group, BLOCKS)
    store_blocks(x, codes_ptr, scales_ptr, m, M, MP, group, BLOCKS, FLOOR)


@triton.jit(do_not_specialize=["M", "MP"])
def swiglu_quantize_mx_kernel(
    gate_up_ptr,
    codes_ptr,
    scales_ptr,
    M,
    MP,
    BLOCKS: tl.constexpr,
    PER: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0)
    group = tl.program_id(1) * (PER * 4) + tl.arange(0, PER * 4)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = load_blocks(gate_up_ptr, m, M, BLOCKS * 256, group, BLOCKS)
    up = load_blocks(gate_up_ptr + BLOCKS * 128, m, M, BLOCKS * 256, group, BLOCKS)
    h = silu_times(gate, up).to(tl.float32)
    store_blocks(h, codes_ptr, scales_ptr, m, M, MP, group, BLOCKS, FLOOR)


@triton.jit(do_not_specialize=["M", "MP", "eps"])
def rmsnorm_quantize_mx_kernel(
    x_ptr,
    gain_ptr,
    codes_ptr,
    scales_ptr,
    M,
    MP,
    eps,
    BLOCKS: tl.constexpr,
    PER: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0)
    group = tl.arange(0, PER * 4)  # a row is one program: the norm needs all of it
    gain = load_blocks(gain_ptr, tl.program_id(1), 1, 0, group, BLOCKS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = load_blocks(x_ptr, m, M, BLOCKS * 128, group, BLOCKS)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (BLOCKS * 128)
    y = (x * tl.rsqrt(mean + eps) * gain).to(tl.bfloat16).to(tl.float32)
    store_blocks(y, codes_ptr, scales_ptr, m, M, MP, group, BLOCKS, FLOOR)


@triton.jit(do_not_specialize=["M", "MP"])
def mx_kernel(
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
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A pipeline over one group of leaves, or over all of K; weights are the operand with the many rows."""
    SPAN: tl.constexpr = LEAF * GROUP
    tile = tl.program_id(0) * ROWS // 128
    inner = tl.program_id(0) * ROWS % 128
    first = 0 if ALL else tl.program_id(1) * SPAN
    last = BLOCKS if ALL else min(first + SPAN, BLOCKS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row, k, byte = tl.arange(0, ROWS), tl.arange(0, 128), tl.arange(0, 4)
    base = weight_ptr + tile.to(tl.int64) * (BLOCKS * _TILE) + inner * 128
    scales = weight_scales_ptr + (tile * BLOCKS * 128 + inner) * 4
    w_offsets, w_scale_offsets = row[:, None] * 128 + k[None, :], row[:, None] * 4 + byte[None, :]
    x_offsets = tokens.to(tl.int64)[:, None] * (BLOCKS * 128) + k[None, :]
    x_scale_offsets = tokens[:, None] * 4 + byte[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    leaf = tl.zeros((ROWS, TOKENS), tl.float32)
    group = tl.zeros((ROWS, TOKENS), tl.float32)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        w = tl.load(base + block * _TILE + w_offsets)
        w_scale = tl.load(scales + block * 512 + w_scale_offsets)
        x = tl.load(x_ptr + x_offsets + block * 128, (tokens < M)[:, None], 0.0)
        x_scale = tl.load(x_scales_ptr + block * (MP * 4) + x_scale_offsets, (tokens < MP)[:, None], _ONE)
        leaf = tl.dot_scaled(w, w_scale, "e4m3", tl.trans(x), x_scale, "e4m3", acc=leaf)
        if LEAF < BLOCKS:
            if (block + 1) % LEAF == 0:
                group += leaf
                leaf = tl.zeros((ROWS, TOKENS), tl.float32)
            if ALL:
                if (block + 1) % SPAN == 0:
                    total += group
                    group = tl.zeros((ROWS, TOKENS), tl.float32)
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
