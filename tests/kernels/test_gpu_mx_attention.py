"""MXFP8 attention on a GPU without its instruction: Triton widens, the addresses and the numbers are the same."""

import pytest
import torch

from slackwater_kernels import reference_mx_attention as reference
from slackwater_kernels.attention_layout import NewTokens, PagedRows
from slackwater_kernels.dispatch import mx_attention_sources
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.mx_attention import (
    DECODE,
    TILES,
    run_append_kv_mx,
    run_append_tokens_mx,
    run_decode_attention_mx,
    run_extend_attention_mx,
    run_prefill_attention_mx,
)
from slackwater_kernels.mx_attention_layout import MxKvPool
from slackwater_kernels.reference_mx_attention import Steps
from slackwater_kernels.testing import ragged
from slackwater_kernels.testing_mx import heads_of_tokens, scattered_mx

pytestmark = pytest.mark.gpu

KV_HEADS, HEADS = 8, 32
DECODED, EXTENDED = Steps(DECODE.block, DECODE.chunk), Steps(TILES.block)
ROUNDING = 2.0**-8  # the output is rounded to bf16 once


def queries(count: int, seed: int = 50) -> torch.Tensor:
    return heads_of_tokens(count, HEADS, device="cuda", seed=seed)


def tokens(count: int, seed: int) -> torch.Tensor:
    return heads_of_tokens(count, KV_HEADS, device="cuda", seed=seed)


def lengths_of(rows: int, longest: int) -> list[int]:
    """Lengths from 1 to the longest, those beside page and chunk boundaries first."""
    some = [longest, 1, 31, 32, 33, 255, 256, 257, 63, 64, 65, 0]
    return [min(some[b], longest) if b < len(some) else 1 + b * 7919 % longest for b in range(rows)]


def paged(lengths, *, page_size=64, **more) -> tuple[MxKvPool, PagedRows]:
    return scattered_mx(lengths, num_kv_heads=KV_HEADS, page_size=page_size, device="cuda", **more)


def new_tokens(counts) -> NewTokens:
    return ragged(counts, device="cuda")[0]


def is_near(got: torch.Tensor, values: torch.Tensor, bound: torch.Tensor) -> bool:
    """Whether each element is within its bound, and bf16's rounding."""
    return bool(((got.double() - values).abs() <= bound + (values.abs() + bound) * ROUNDING).all())


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("rows_many", [1, 12])
def test_decodes_as_the_reference_does(page_size, rows_many):
    pool, rows = paged(lengths_of(rows_many, 1500), page_size=page_size)
    q = queries(rows_many)

    got = run_decode_attention_mx(mx_attention_sources(), q, pool, rows, Workspace("cuda"))

    assert is_near(got, *reference.decode_bounded(q, pool, rows))
    assert is_near(got, *reference.decode_bounded(q, pool, rows, steps=DECODED))
    assert (got[rows.lengths == 0] == 0).all()


@pytest.mark.parametrize("page_size", [16, 64])
def test_extends_as_the_reference_does(page_size):
    pool, rows = paged((700, 65, 40, 300), page_size=page_size)
    counts = (50, 65, 0, 1)
    q, new = queries(sum(counts)), new_tokens(counts)

    got = run_extend_attention_mx(mx_attention_sources(), q, pool, rows, new)

    assert is_near(got, *reference.extend_bounded(q, pool, rows, new))
    assert is_near(got, *reference.extend_bounded(q, pool, rows, new, steps=EXTENDED))


def test_two_runs_are_equal_and_a_row_has_the_same_bits_alone():
    pool, rows = paged(lengths_of(16, 2000))
    q, space = queries(16), Workspace("cuda")

    whole = run_decode_attention_mx(mx_attention_sources(), q, pool, rows, space)

    for _ in range(10):
        assert torch.equal(run_decode_attention_mx(mx_attention_sources(), q, pool, rows, space), whole)
    lengths = rows.lengths.tolist()
    for b in (0, 1, 7, 15):
        one = PagedRows(rows.table[b : b + 1].clone(), rows.lengths[b : b + 1].clone(), max(lengths[b], 1))
        alone = run_decode_attention_mx(mx_attention_sources(), q[b : b + 1].clone(), pool, one, space)
        assert torch.equal(alone[0], whole[b]), b


def test_a_prompt_in_chunks_has_the_bits_of_one_at_once_and_of_prefill_without_a_pool():
    kernels, length = mx_attention_sources(), 333
    q, keys, values = queries(length), tokens(length, seed=1), tokens(length, seed=2)
    pool, parts = MxKvPool.zeros(6, KV_HEADS, 64, "cuda"), []
    table = torch.tensor([[3, 0, 2, 5, 1, 4]], dtype=torch.int32, device="cuda")

    for first, last in ((0, 1), (1, 100), (100, 333)):
        rows = PagedRows(table, torch.tensor([last], dtype=torch.int32, device="cuda"), 384)
        new = new_tokens([last - first])
        run_append_tokens_mx(kernels, keys[first:last].clone(), values[first:last].clone(), pool, rows, new)
        parts.append(run_extend_attention_mx(kernels, q[first:last].clone(), pool, rows, new))

    new = new_tokens([length])
    at_once = run_extend_attention_mx(kernels, q, pool, rows, new)
    assert torch.equal(torch.cat(parts), at_once)
    assert torch.equal(run_prefill_attention_mx(kernels, q, keys, values, new), at_once)
    assert is_near(at_once, *reference.prefill_bounded(q, keys, values, new, steps=EXTENDED))


def test_appended_tokens_are_as_the_reference_has_them():
    lengths = [9, 64, 65, 40, 130]
    pool, rows = paged(lengths)
    wanted, _ = paged(lengths)
    rows.table[4, 2] = pool.num_pages
    new = NewTokens(torch.tensor([1, 10, 13, 53, 93, 223], dtype=torch.int32, device="cuda"), 130)
    keys, values, last_keys, last_values = tokens(225, 1), tokens(225, 2), tokens(5, 3), tokens(5, 4)
    keys[3, 0, 3], values[11, 1, 5], values[4], last_keys[0, 0, 0] = torch.nan, torch.inf, 0.0, 1e-40
    last_values[1, 2, 3] = torch.nan

    run_append_tokens_mx(mx_attention_sources(), keys, values, pool, rows, new)
    run_append_kv_mx(mx_attention_sources(), last_keys, last_values, pool, rows)

    reference.append_tokens_mx(keys, values, wanted, rows, new)
    reference.append_kv_mx(last_keys, last_values, wanted, rows)
    for name in ("keys", "key_scales", "values", "value_scales"):
        assert torch.equal(getattr(pool, name).nan_to_num(-1), getattr(wanted, name).nan_to_num(-1)), name


def test_steps_replay_from_a_graph_while_lengths_and_counts_change_without_synchronising():
    kernels, room = mx_attention_sources(), [200, 90, 300]
    pool, rows = paged(room, max_length=300)
    same, there = paged(room, max_length=300)
    keys, values, q, space = tokens(64, 1), tokens(64, 2), queries(64), Workspace("cuda")
    new = NewTokens(torch.zeros(4, dtype=torch.int32, device="cuda"), 64)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        run_append_tokens_mx(kernels, keys, values, pool, rows, new)
        many = run_extend_attention_mx(kernels, q, pool, rows, new)
        one = run_decode_attention_mx(kernels, q[:3].clone(), pool, rows, space)
        return many, one, run_prefill_attention_mx(kernels, q, keys, values, new)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    for turn, counts in enumerate(([40, 1, 0], [1, 20, 43], [0, 0, 5], [10, 10, 10])):
        lengths = torch.tensor([100 + 20 * turn, 50 + 10 * turn, 200 + 20 * turn], dtype=torch.int32)
        for part, value in ((keys, tokens(64, 10 + turn)), (values, tokens(64, 20 + turn)), (rows.lengths, lengths)):
            part.copy_(value)
        there.lengths.copy_(lengths)
        new.starts.copy_(new_tokens(counts).starts)
        for part in captured:
            part.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        reference.append_tokens_mx(keys, values, same, there, new)
        assert torch.equal(captured[0], run_extend_attention_mx(kernels, q, same, there, new)), turn
        assert torch.equal(captured[1], run_decode_attention_mx(kernels, q[:3].clone(), same, there, space)), turn
        assert torch.equal(captured[2], run_prefill_attention_mx(kernels, q, keys, values, new)), turn
        assert is_near(captured[0], *reference.extend_bounded(q, same, there, new, steps=EXTENDED)), turn
        assert (captured[0][sum(counts) :] == 0).all()


def test_a_nan_or_a_wrong_row_makes_nan_what_it_meets_and_nothing_else():
    kernels = mx_attention_sources()
    pool, rows = paged([300, 80, 100], max_length=300)
    q, keys, values, new = queries(60), tokens(60, 1), tokens(60, 2), new_tokens([20, 20, 20])
    q[0, 1, 7], keys[5, 0, 3], values[9, 1, 5] = torch.nan, torch.nan, torch.nan
    run_append_tokens_mx(kernels, keys, values, pool, rows, new)
    rows.lengths[1], rows.table[2, 1] = 301, pool.num_pages

    extended = run_extend_attention_mx(kernels, q, pool, rows, new).isnan()
    decoded = run_decode_attention_mx(kernels, q[:3].clone(), pool, rows, Workspace("cuda")).isnan()

    wanted = torch.zeros(60, HEADS, dtype=torch.bool, device="cuda")
    wanted[0, 1], wanted[5:20, :4], wanted[9:20, 4:8], wanted[20:] = True, True, True, True
    assert torch.equal(extended.any(-1), wanted)
    assert torch.equal(extended.all(-1), wanted)
    assert decoded.any(-1).int().tolist() == [[1] * 8 + [0] * 24, [1] * HEADS, [1] * HEADS]
