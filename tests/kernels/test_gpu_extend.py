"""Attention of many queries a row on the GPU at the model's sizes: against fp64, in chunks and at once, in a graph."""

from dataclasses import fields, replace

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.attention_layout import Fp8KvPool, NewTokens, PagedRows, Pool
from slackwater_kernels.dispatch import extend_sources
from slackwater_kernels.extend import (
    append_tokens,
    extend_attention,
    prefill_attention,
    run_extend_attention,
)
from slackwater_kernels.plan import BF16_EXTEND, FP8_EXTEND
from slackwater_kernels.testing import lost_of_small_weights, ragged, scattered, vectors

pytestmark = pytest.mark.gpu

KV_HEADS, HEADS = 8, 32
FORMS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
# The output is rounded to bf16 once.  Weights are rounded to bf16 beside bf16 values, to f16 beside FP8 ones; the
# exponential is approximated to about 2^-22 and a logit of 100 has 2^-17 of it to lose.
ROUNDING, WEIGHTS = 2.0**-8, {False: 2.0**-8, True: 2.0**-10}


def heads(tokens: int, seed: int = 0, num_heads: int = HEADS) -> torch.Tensor:
    return vectors(tokens, num_heads, device="cuda", seed=seed)


def kv(tokens: int, seed: int) -> torch.Tensor:
    return heads(tokens, seed, KV_HEADS)


def paged(lengths, *, page_size=64, fp8=True, **more):
    return scattered(lengths, num_kv_heads=KV_HEADS, page_size=page_size, fp8=fp8, device="cuda", **more)


def near(got, q: torch.Tensor, pool: Pool, rows: PagedRows, new: NewTokens) -> bool:
    """Whether each element differs from the exact one by no more than its roundings."""
    fp8 = isinstance(pool, Fp8KvPool)
    exact = reference.extend_attention(q, pool, rows, new)
    positive = replace(pool, values=pool.values & 0x7F if fp8 else pool.values.abs())
    size = reference.extend_attention(q, positive, rows, new)
    allowed = exact.abs() * ROUNDING + size * WEIGHTS[fp8]
    if fp8:
        lost = lost_of_small_weights(pool, rows).repeat_interleave(q.shape[1] // KV_HEADS, 1)[..., None]
        for b, first in enumerate(new.starts[:-1].tolist()):
            allowed[first : new.starts[b + 1]] += lost[b]
    return bool(((got.double() - exact).abs() <= allowed).all())


# Beside boundaries of pages, blocks and parts; rows of one query, none, and all new.
LENGTHS, COUNTS = (700, 64, 65, 1, 129, 0, 1025, 127, 300), (33, 64, 65, 1, 2, 0, 31, 127, 0)


@pytest.mark.parametrize(
    ("fp8", "page_size", "num_heads"),
    [
        pytest.param(False, 64, HEADS, id="bf16"),
        pytest.param(True, 64, HEADS, id="fp8"),
        pytest.param(False, 16, 24, id="bf16, pages of 16, 3 sharers"),
        pytest.param(True, 16, 128, id="fp8, pages of 16, 16 sharers"),
        pytest.param(True, 128, HEADS, id="fp8, pages of 128"),
    ],
)
def test_attends_as_the_reference_does(fp8, page_size, num_heads):
    pool, rows = paged(LENGTHS, page_size=page_size, fp8=fp8)
    new, tokens = ragged(COUNTS, ahead=3, behind=40, device="cuda")
    q = heads(tokens, num_heads=num_heads)

    got = extend_attention(q, pool, rows, new)

    assert near(got, q, pool, rows, new)
    assert (got[:3] == 0).all()
    assert (got[-40:] == 0).all()


@FORMS
def test_every_launch_of_the_table_attends_as_the_reference_does(fp8):
    pool, rows = paged((200, 90), fp8=fp8)
    new, tokens = ragged((50, 90), device="cuda")
    q = heads(tokens)

    for launch in FP8_EXTEND if fp8 else BF16_EXTEND:
        got = run_extend_attention(extend_sources(), q, pool, rows, new, chosen=launch)

        assert near(got, q, pool, rows, new), launch


def test_prefill_has_the_bits_of_an_extension_of_new_rows():
    counts = (1000, 0, 1, 63, 64, 65, 257)
    new, tokens = ragged(counts, behind=7, device="cuda")
    q, keys, values = heads(tokens), kv(tokens, 1), kv(tokens, 2)
    pool, rows = paged(counts, fp8=False)
    append_tokens(keys, values, pool, rows, new)

    got = prefill_attention(q, keys, values, new)

    assert torch.equal(got, extend_attention(q, pool, rows, new))
    assert near(got, q, pool, rows, new)


@FORMS
def test_a_prompt_in_chunks_has_the_bits_of_the_prompt_at_once(fp8):
    total = 700
    q, keys, values = heads(total), kv(total, 1), kv(total, 2)
    whole = {}
    for chunks in ((700,), (512, 188), (64, 1, 35, 500, 100), (33,) * 21 + (7,)):
        pool, rows = paged((total,), fp8=fp8)
        parts, done = {}, 0
        for chunk in chunks:
            now = slice(done, done + chunk)
            done += chunk
            rows.lengths.fill_(done)
            new, _ = ragged([chunk], device="cuda")
            append_tokens(keys[now].clone(), values[now].clone(), pool, rows, new)
            for launch in FP8_EXTEND if fp8 else BF16_EXTEND:
                out = run_extend_attention(extend_sources(), q[now].clone(), pool, rows, new, chosen=launch)
                parts.setdefault(launch, []).append(out)
        for launch, outs in parts.items():
            assert torch.equal(whole.setdefault(launch, torch.cat(outs)), torch.cat(outs)), (launch, chunks)


@FORMS
def test_two_runs_are_equal_and_a_row_has_the_same_bits_alone(fp8):
    pool, rows = paged(LENGTHS, fp8=fp8)
    new, tokens = ragged(COUNTS, behind=9, device="cuda")
    q = heads(tokens)

    whole = extend_attention(q, pool, rows, new)

    for _ in range(10):
        assert torch.equal(extend_attention(q, pool, rows, new), whole)
    at = 0
    for b, count in enumerate(COUNTS):
        one = PagedRows(rows.table[b : b + 1].clone(), rows.lengths[b : b + 1].clone(), max(LENGTHS[b], 1))
        alone = extend_attention(q[at : at + count].clone(), pool, one, ragged([count], device="cuda")[0])
        assert torch.equal(alone, whole[at : at + count]), b
        at += count


@FORMS
def test_appended_tokens_are_as_the_reference_has_them(fp8):
    lengths, counts = (70, 64, 65, 0, 300, 40), (70, 3, 1, 0, 130, 5)
    pool, rows = paged(lengths, fp8=fp8)
    wanted, _ = paged(lengths, fp8=fp8)
    rows.table[4, 3], rows.lengths[5] = pool.num_pages, 4
    new, tokens = ragged(counts, ahead=1, behind=2, device="cuda")
    keys, values = kv(tokens, 1), kv(tokens, 2)
    keys[3, 0, 3], keys[36, 1, 5], values[2], values[5, 3, 9] = torch.nan, torch.inf, 0.0, torch.nan

    append_tokens(keys, values, pool, rows, new)

    reference.append_tokens(keys, values, wanted, rows, new)
    for field in fields(pool):
        got, right = getattr(pool, field.name), getattr(wanted, field.name)
        if isinstance(got, torch.Tensor) and got.is_floating_point():
            got, right = got.nan_to_num(-1), right.nan_to_num(-1)
        assert got == right if isinstance(got, int) else torch.equal(got, right), field.name


@FORMS
def test_a_nan_reaches_what_attends_to_it_and_leaves_the_bits_of_all_others(fp8):
    total, old = 200, 50
    pool, rows = paged((total,), fp8=fp8)
    q, keys, values = heads(total - old), kv(total, 1), kv(total, 2)
    new, _ = ragged([total - old], device="cuda")
    all_new, _ = ragged([total], device="cuda")
    append_tokens(keys, values, pool, rows, all_new)
    clean = extend_attention(q, pool, rows, new)
    q[2, 5, 7], keys[120, 0, 3], values[83, 1, 4] = torch.nan, torch.nan, torch.nan
    append_tokens(keys, values, pool, rows, all_new)

    got = extend_attention(q, pool, rows, new)

    is_hit = torch.zeros(total - old, HEADS, dtype=torch.bool, device="cuda")
    is_hit[2, 5], is_hit[120 - old :, :4], is_hit[83 - old :, 4:8] = True, True, True
    assert got[is_hit].isnan().all()
    assert torch.equal(got[~is_hit], clean[~is_hit])


def test_a_wrong_row_is_nan_and_no_other():
    pool, rows = paged((100, 130, 140, 150, 218, 235), fp8=True)
    new, tokens = ragged((70, 50, 60, 30, 90, 40), max_new=80, behind=10, device="cuda")
    rows.lengths[0], rows.lengths[1] = 1000, 49
    rows.table[2, 2], rows.table[3, 0] = -1, pool.num_pages

    is_nan = extend_attention(heads(tokens), pool, rows, new).isnan()

    wanted = torch.zeros(tokens, dtype=torch.bool, device="cuda")
    wanted[:300] = True
    assert torch.equal(is_nan.all(-1).all(-1), wanted)
    assert torch.equal(is_nan.any(-1).any(-1), wanted)


@FORMS
def test_a_step_replays_from_a_graph_with_other_lengths_and_counts_without_synchronising(fp8):
    tokens, room = 256, (400, 400, 400, 400)
    pool, rows = paged(room, fp8=fp8)
    same, there = paged(room, fp8=fp8)
    q, keys, values = heads(tokens), kv(tokens, 1), kv(tokens, 2)
    new, _ = ragged((64,) * 4, max_new=200, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        append_tokens(keys, values, pool, rows, new)
        return extend_attention(q, pool, rows, new), prefill_attention(q, keys, values, new)

    step()
    append_tokens(keys, values, same, there, new)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for turn, (counts, lengths) in enumerate(
        (((1, 200, 0, 55), (300, 200, 17, 400)), ((64, 3, 0, 1), (64, 100, 0, 399)), ((0, 0, 0, 1), (1, 1, 1, 1)))
    ):
        new.starts.copy_(ragged(counts)[0].starts)
        rows.lengths.copy_(torch.tensor(lengths))
        there.lengths.copy_(rows.lengths)
        keys.copy_(kv(tokens, 10 + turn))
        for out in captured:
            out.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        append_tokens(keys, values, same, there, new)
        assert torch.equal(captured[0], extend_attention(q, same, there, new)), turn
        assert torch.equal(captured[1], prefill_attention(q, keys, values, new)), turn
        assert (captured[0][sum(counts) :] == 0).all()
