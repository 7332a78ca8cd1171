"""The Triton source of the sampler: one row's draw, and the draw taken instead where it would repeat, in one program.

Owns the code that runs on the GPU and nothing of its launch, which is `sampling`'s.  Imported lazily, since Triton is
not everywhere.  Tests load it a second time under Triton's interpreter.
"""

# mypy: ignore-errors
# Triton compiles these functions itself; to Python's type system `tl.constexpr` and pointers say nothing.

import triton
import triton.language as tl

_RANKS = tl.constexpr(32)  # the power of two above MAX_K
_LOW = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mixed(x):
    """A 32-bit finaliser, as `reference.noise` has it."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def uniforms(seed, step, stage, rank, MAX_K: tl.constexpr):
    """fp32 in (0, 1), one a rank: they depend on seed, step, stage and rank alone."""
    row = mixed(mixed(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
    row = mixed(row + step.to(tl.uint32) * 0x9E3779B1)
    counter = (stage * MAX_K + 1 + rank).to(tl.uint32) * 0x85EBCA77
    bits = mixed(mixed(row + counter))
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23


@triton.jit
def winner(logit, mass, temperature, top_p, top_k, uniform, rank, MAX_K: tl.constexpr):
    """The rank that wins an exponential race among those that the filter leaves; the best always stays."""
    is_out = (rank > 0) & ((mass > top_p) | (rank >= top_k)) | (rank >= MAX_K)
    scaled = tl.where(is_out, float("-inf"), tl.div_rn(logit, tl.maximum(temperature, 1e-5)))
    likely = tl.exp(scaled - tl.max(scaled, axis=0))
    likely = tl.div_rn(likely, tl.sum(likely, axis=0))
    return tl.argmax(tl.div_rn(likely, -tl.log(uniform)), axis=0, tie_break_left=True)


@triton.jit(do_not_specialize=["stage", "num_semantic", "high_temperature", "high_top_p"])
def draw_kernel(
    logits_ptr,
    seeds_ptr,
    steps_ptr,
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    window_ptr,
    ids_ptr,
    first_ptr,
    out_ptr,
    stage,
    num_semantic,
    high_temperature,
    high_top_p,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_K: tl.constexpr,
    W: tl.constexpr,
    CW: tl.constexpr,
):
    """Row r of logits [b, V] to an index.  W > 0: what repeats is replaced by the draw of the next stage."""
    r = tl.program_id(0)
    i = tl.arange(0, SIZE)
    # Adding 0 makes a negative zero a positive one: equal numbers must have equal bits.
    values = tl.load(logits_ptr + r.to(tl.int64) * V + i, i < V, float("-inf")) + 0.0
    largest = tl.max(values, axis=0)
    total = tl.sum(tl.exp(values - largest), axis=0)
    # Sorted as whole numbers: the float's bits, made ascending, and below them the index upside down, so that of equal
    # numbers the lower index comes first.
    bits = values.to(tl.int32, bitcast=True)
    ascending = bits ^ ((bits >> 31) & _LOW)
    keys = (ascending.to(tl.int64) << 32) | (i ^ _LOW).to(tl.int64)
    best = tl.topk(keys, _RANKS)
    rank = tl.arange(0, _RANKS)
    index = (best & _LOW).to(tl.int32) ^ _LOW
    ascending = (best >> 32).to(tl.int32)
    logit = (ascending ^ ((ascending >> 31) & _LOW)).to(tl.float32, bitcast=True)
    mass = tl.cumsum(tl.div_rn(tl.exp(logit - largest), total), axis=0)

    seed, step = tl.load(seeds_ptr + r), tl.load(steps_ptr + r)
    temperature, top_p, top_k = tl.load(temperature_ptr + r), tl.load(top_p_ptr + r), tl.load(top_k_ptr + r)
    uniform = uniforms(seed, step, stage, rank, MAX_K)
    won = winner(logit, mass, temperature, top_p, top_k, uniform, rank, MAX_K)
    drawn = tl.sum(tl.where(rank == won, index, 0), axis=0)
    if W > 0:
        w = tl.arange(0, triton.next_power_of_2(W))
        before = tl.load(window_ptr + (r.to(tl.int64) * W + w) * CW, w < W, -1)
        again = tl.max((before == tl.load(ids_ptr + drawn).to(tl.int32)).to(tl.int32), axis=0)
        again = again * (drawn < num_semantic).to(tl.int32) * (tl.load(first_ptr + r) == 0).to(tl.int32)
        uniform = uniforms(seed, step, stage + 1, rank, MAX_K)
        high = winner(logit, mass, high_temperature, high_top_p, top_k, uniform, rank, MAX_K)
        drawn = tl.where(again > 0, tl.sum(tl.where(rank == high, index, 0), axis=0), drawn)
    tl.store(out_ptr + r, drawn.to(tl.int64))
