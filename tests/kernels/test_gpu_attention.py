"""Attention on the GPU at the model's sizes: against fp64, run against run, alone and among others, in a graph."""

from dataclasses import fields, replace

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.attention import append_kv, decode_attention, decode_attention_quantize, run_decode_attention
from slackwater_kernels.attention_layout import KvPool, PagedRows, Pool
from slackwater_kernels.dispatch import attention_sources, fp8_attention_sources
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import Fp8Activations
from slackwater_kernels.plan import BF16_ATTENTION, FP8_ATTENTION
from slackwater_kernels.quantize import quantize_activations
from slackwater_kernels.testing import awkward_lengths, lost_of_small_weights, scattered, vectors

pytestmark = pytest.mark.gpu

KV_HEADS, HEADS = 8, 32
FORMS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
# The output is rounded to bf16 once, and so are weights beside bf16 values.  The FP8 tensor cores keep about 14 bits of
# a sum: of logits, which makes a weight wrong by so many times their size, and of weighted values.
ROUNDING, WEIGHTS, KEPT = 2.0**-8, 2.0**-8, 2.0**-12


def queries(rows: int, seed: int = 0) -> torch.Tensor:
    return vectors(rows, HEADS, device="cuda", seed=seed)


def tokens(rows: int, seed: int) -> torch.Tensor:
    return vectors(rows, KV_HEADS, device="cuda", seed=seed)


def paged(lengths, *, page_size=64, fp8=True, **more):
    return scattered(lengths, num_kv_heads=KV_HEADS, page_size=page_size, fp8=fp8, device="cuda", **more)


def bound(q: torch.Tensor, pool: Pool, rows: PagedRows) -> torch.Tensor:
    """What a kernel may differ from the exact values by, element by element."""
    rounding = reference.decode_attention(q, pool, rows).abs() * ROUNDING
    if isinstance(pool, KvPool):
        return rounding + reference.decode_attention(q, replace(pool, values=pool.values.abs()), rows) * WEIGHTS
    size = reference.decode_attention(q, replace(pool, values=pool.values & 0x7F), rows)
    largest = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    for b, length in enumerate(rows.lengths.tolist()):
        if length:
            keys, _ = reference._tokens(pool, rows.table[b, : -(-length // pool.page_size)].long())
            sizes = q[b].double().abs().view(KV_HEADS, -1, 128) @ keys[:, :length].abs().transpose(1, 2)
            largest[b] = sizes.amax(-1).flatten() / 128**0.5
    lost = lost_of_small_weights(pool, rows).repeat_interleave(HEADS // KV_HEADS, 1)[..., None]
    return rounding + size * (torch.expm1(2 * KEPT * largest)[..., None] + 2 * KEPT) + lost


@FORMS
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("rows_many", [1, 3, 16, 64])
def test_attends_as_the_reference_does(fp8, page_size, rows_many):
    pool, rows = paged(awkward_lengths(rows_many, 4096), page_size=page_size, fp8=fp8)
    q = queries(rows_many)

    got = decode_attention(q, pool, rows, Workspace("cuda"))

    exact = reference.decode_attention(q, pool, rows)
    assert ((got.double() - exact).abs() <= bound(q, pool, rows)).all()
    assert (got[rows.lengths == 0] == 0).all()


@FORMS
def test_every_launch_of_the_table_attends_as_the_reference_does(fp8):
    pool, rows = paged(awkward_lengths(16, 1500), fp8=fp8)
    q, space = queries(16), Workspace("cuda")
    exact, allowed = reference.decode_attention(q, pool, rows), bound(q, pool, rows)

    kernels = fp8_attention_sources() if fp8 else attention_sources()
    for launch in FP8_ATTENTION if fp8 else BF16_ATTENTION:
        got = run_decode_attention(kernels, q, pool, rows, space, chosen=launch)

        assert ((got.double() - exact).abs() <= allowed).all(), launch


@FORMS
def test_two_runs_are_equal_and_a_row_has_the_same_bits_alone(fp8):
    pool, rows = paged(awkward_lengths(64, 4096), fp8=fp8)
    q, space = queries(64), Workspace("cuda")

    whole = decode_attention(q, pool, rows, space)

    for _ in range(20):
        assert torch.equal(decode_attention(q, pool, rows, space), whole)
    lengths = rows.lengths.tolist()
    for b in (0, 1, 8, 14, 40, 63):
        for max_length in {max(lengths[b], 1), 4096}:
            one = PagedRows(rows.table[b : b + 1].clone(), rows.lengths[b : b + 1].clone(), max_length)
            alone = decode_attention(q[b : b + 1].clone(), pool, one, space)
            assert torch.equal(alone[0], whole[b]), (b, max_length)


@FORMS
def test_appended_tokens_are_as_the_reference_has_them(fp8):
    lengths = [1, 16, 17, 0, 64, 65, 900]
    pool, rows = paged(lengths, fp8=fp8)
    wanted, _ = paged(lengths, fp8=fp8)
    rows.table[5, 1] = pool.num_pages
    keys, values = tokens(7, 1), tokens(7, 2)
    keys[0, 0, 3], keys[1, 1, 5], values[2], values[4, 3, 9] = torch.nan, torch.inf, 0.0, torch.nan

    append_kv(keys, values, pool, rows)

    reference.append_kv(keys, values, wanted, rows)
    for field in fields(pool):
        got, right = getattr(pool, field.name), getattr(wanted, field.name)
        if isinstance(got, torch.Tensor) and got.is_floating_point():
            got, right = got.nan_to_num(-1), right.nan_to_num(-1)
        assert got == right if isinstance(got, int) else torch.equal(got, right), field.name


@FORMS
def test_a_step_replays_from_a_graph_while_lengths_grow_without_synchronising(fp8):
    starts = awkward_lengths(64, 1000)
    room = [length + 40 for length in starts]
    pool, rows = paged(room, fp8=fp8, max_length=1040)
    same, there = paged(room, fp8=fp8, max_length=1040)
    keys, values, q, space = tokens(64, 1), tokens(64, 2), queries(64), Workspace("cuda")
    rows.lengths.copy_(torch.tensor(starts))

    def step() -> tuple[torch.Tensor, Fp8Activations]:
        rows.lengths.add_(1)
        append_kv(keys, values, pool, rows)
        return decode_attention(q, pool, rows, space), decode_attention_quantize(q, pool, rows, space)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, codes = step()
    rows.lengths.copy_(torch.tensor(starts))
    there.lengths.copy_(torch.tensor(starts))

    for step in range(40):
        keys.copy_(tokens(64, 100 + step) * 0.1)  # logits near 100, for which the bound is stated
        values.copy_(tokens(64, 200 + step))
        captured.fill_(torch.nan)
        codes.codes.fill_(0x7F)
        codes.scales.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        there.lengths.add_(1)
        reference.append_kv(keys, values, same, there)
        eager = decode_attention(q, same, there, space)
        assert torch.equal(captured, eager), step
        wanted = quantize_activations(eager.view(64, -1))
        assert torch.equal(codes.codes, wanted.codes)
        assert torch.equal(codes.scales, wanted.scales)
    exact = reference.decode_attention(q, same, there)
    assert ((captured.double() - exact).abs() <= bound(q, same, there)).all()


@FORMS
@pytest.mark.parametrize("rows_many", [1, 3, 16, 63])
def test_the_quantised_form_is_the_quantiser_behind_attention_bit_for_bit(fp8, rows_many):
    pool, rows = paged(awkward_lengths(rows_many, 2000), fp8=fp8)
    q = queries(rows_many)
    q[0, 2, 0] = torch.nan

    got = decode_attention_quantize(q, pool, rows, Workspace("cuda"))

    wanted = quantize_activations(decode_attention(q, pool, rows, Workspace("cuda")).view(rows_many, -1))
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1))


@FORMS
def test_what_is_no_number_makes_its_head_nan_and_no_other(fp8):
    pool, rows = paged([300, 20, 1000, 4], fp8=fp8, max_length=1000)
    q = queries(4)
    q[0, 1, 7], q[0, 9, 0] = torch.nan, torch.inf
    keys, values = tokens(4, 1), tokens(4, 2)
    keys[1, 0, 3], values[2, 1, 5] = torch.nan, torch.nan
    append_kv(keys, values, pool, rows)
    rows.lengths[3] = 1001

    got = decode_attention(q, pool, rows, Workspace("cuda")).isnan().any(-1)

    wanted = torch.zeros(4, HEADS, dtype=torch.bool, device="cuda")
    wanted[0, 1], wanted[0, 9], wanted[1, :4], wanted[2, 4:8], wanted[3] = True, True, True, True, True
    assert torch.equal(got, wanted)
