"""Attention over values by channel on the GPU at the model's sizes: against fp64, run against run, in a graph."""

from dataclasses import replace

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.attention import append_kv, decode_attention, decode_attention_quantize, run_decode_attention
from slackwater_kernels.attention_layout import ChannelKvPool, NewTokens, PagedRows
from slackwater_kernels.dispatch import channel_attention_sources
from slackwater_kernels.extend import append_tokens
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.plan import CHANNEL_ATTENTION
from slackwater_kernels.quantize import quantize_activations
from slackwater_kernels.testing import awkward_lengths, by_channel, lost_of_small_weights, scattered, vectors

pytestmark = pytest.mark.gpu

KV_HEADS, HEADS = 8, 32
# The output is rounded to bf16 once, and the FP8 tensor cores keep about 14 bits of a sum: of logits, which makes a
# weight wrong by so many times their size, and of weighted values.
ROUNDING, KEPT = 2.0**-8, 2.0**-12


def queries(rows: int, seed: int = 0) -> torch.Tensor:
    return vectors(rows, HEADS, device="cuda", seed=seed)


def tokens(rows: int, seed: int) -> torch.Tensor:
    return vectors(rows, KV_HEADS, device="cuda", seed=seed)


def paged(lengths, *, page_size=64, **more) -> tuple[ChannelKvPool, PagedRows]:
    pool, rows = scattered(lengths, num_kv_heads=KV_HEADS, page_size=page_size, fp8=True, device="cuda", **more)
    return by_channel(pool), rows


def bound(q: torch.Tensor, pool: ChannelKvPool, rows: PagedRows) -> torch.Tensor:
    """What a kernel may differ from the exact values by, element by element."""
    exact = reference.decode_attention(q, pool, rows)
    size = reference.decode_attention(q, replace(pool, values=pool.values & 0x7F), rows)
    largest = torch.zeros(q.shape[:2], dtype=torch.float64, device="cuda")
    for b, length in enumerate(rows.lengths.tolist()):
        if length:
            keys, _ = reference._tokens(pool, rows.table[b, : -(-length // pool.page_size)].long())
            sizes = q[b].double().abs().view(KV_HEADS, -1, 128) @ keys[:, :length].abs().transpose(1, 2)
            largest[b] = sizes.amax(-1).flatten() / 128**0.5
    lost = lost_of_small_weights(pool, rows).repeat_interleave(HEADS // KV_HEADS, 1)[..., None]
    return exact.abs() * ROUNDING + size * (torch.expm1(2 * KEPT * largest)[..., None] + 2 * KEPT) + lost


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("rows_many", [1, 3, 64])
def test_attends_as_the_reference_does(page_size, rows_many):
    pool, rows = paged(awkward_lengths(rows_many, 2048), page_size=page_size)
    q = queries(rows_many)

    got = decode_attention(q, pool, rows, Workspace("cuda"))

    assert ((got.double() - reference.decode_attention(q, pool, rows)).abs() <= bound(q, pool, rows)).all()
    assert (got[rows.lengths == 0] == 0).all()


def test_every_launch_of_the_table_attends_as_the_reference_does():
    pool, rows = paged(awkward_lengths(16, 1500))
    q, space = queries(16), Workspace("cuda")
    exact, allowed = reference.decode_attention(q, pool, rows), bound(q, pool, rows)

    for launch in CHANNEL_ATTENTION:
        got = run_decode_attention(channel_attention_sources(), q, pool, rows, space, chosen=launch)

        assert ((got.double() - exact).abs() <= allowed).all(), launch


def test_two_runs_are_equal_and_a_row_has_the_same_bits_alone():
    pool, rows = paged(awkward_lengths(64, 2048))
    q, space = queries(64), Workspace("cuda")

    whole = decode_attention(q, pool, rows, space)

    for _ in range(20):
        assert torch.equal(decode_attention(q, pool, rows, space), whole)
    lengths = rows.lengths.tolist()
    for b in (0, 1, 8, 14, 40, 63):
        for max_length in {max(lengths[b], 1), 2048}:
            one = PagedRows(rows.table[b : b + 1].clone(), rows.lengths[b : b + 1].clone(), max_length)
            alone = decode_attention(q[b : b + 1].clone(), pool, one, space)
            assert torch.equal(alone[0], whole[b]), (b, max_length)


@pytest.mark.parametrize("many", [False, True], ids=["a step", "a prompt"])
def test_appended_tokens_are_as_the_reference_has_them(many):
    lengths = [1, 16, 17, 0, 64, 65, 900]
    counts = [1, 3, 17, 0, 64, 2, 300] if many else [1] * 7
    pool, rows = paged(lengths)
    wanted, _ = paged(lengths)
    rows.table[5, 1] = pool.num_pages
    keys, values = tokens(sum(counts), 1), tokens(sum(counts), 2)
    keys[0, 0, 3], keys[1, 1, 5], values[2], values[4, 3, 9] = torch.nan, torch.inf, 0.0, torch.nan

    if many:
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        append_tokens(keys, values, pool, rows, NewTokens(starts, 300))
        reference.append_tokens(keys, values, wanted, rows, NewTokens(starts, 300))
    else:
        append_kv(keys, values, pool, rows)
        reference.append_kv(keys, values, wanted, rows)

    for name in ("keys", "values"):
        assert torch.equal(getattr(pool, name), getattr(wanted, name)), name
    for name in ("key_scales", "value_scales"):
        assert torch.equal(getattr(pool, name).nan_to_num(-1), getattr(wanted, name).nan_to_num(-1)), name


def test_a_step_replays_from_a_graph_while_lengths_grow_without_synchronising():
    starts = awkward_lengths(64, 1000)
    room = [length + 20 for length in starts]
    pool, rows = paged(room, max_length=1020)
    keys, values, q, space = tokens(64, 1), tokens(64, 2), queries(64), Workspace("cuda")
    rows.lengths.copy_(torch.tensor(starts))

    def step() -> torch.Tensor:
        rows.lengths.add_(1)
        append_kv(keys, values, pool, rows)
        return decode_attention(q, pool, rows, space)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    rows.lengths.copy_(torch.tensor(starts))

    for turn in range(20):
        keys.copy_(tokens(64, 100 + turn) * 0.1)
        values.copy_(tokens(64, 200 + turn))
        captured.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured, decode_attention(q, pool, rows, space)), turn
    assert ((captured.double() - reference.decode_attention(q, pool, rows)).abs() <= bound(q, pool, rows)).all()


def test_the_quantised_form_is_the_quantiser_behind_attention_bit_for_bit():
    pool, rows = paged(awkward_lengths(63, 2000))
    q = queries(63)
    q[0, 2, 0] = torch.nan

    got = decode_attention_quantize(q, pool, rows, Workspace("cuda"))

    wanted = quantize_activations(decode_attention(q, pool, rows, Workspace("cuda")).view(63, -1))
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1))


def test_what_is_no_number_makes_its_head_nan_and_no_other():
    pool, rows = paged([300, 20, 1000, 4], max_length=1000)
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
