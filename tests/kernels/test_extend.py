"""Attention of many queries a row on small shapes without a GPU, against the reference."""

from dataclasses import fields, replace
from importlib import import_module

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.attention_layout import Fp8KvPool, NewTokens, PagedRows
from slackwater_kernels.core import E4M3_NAN
from slackwater_kernels.extend import run_append_tokens, run_extend_attention, run_prefill_attention
from slackwater_kernels.plan import ExtendLaunch
from slackwater_kernels.testing import ragged, scattered, vectors

SMALL = ExtendLaunch(rows=32, block=16, warps=1, stages=2)  # eight queries a part
WIDE = ExtendLaunch(rows=64, block=64, warps=1, stages=2)  # a block reads several pages
HEADS, SHARERS = 2, 4
FORMS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
# The output is rounded to bf16 once.  Weights are rounded to bf16 beside bf16 values, to f16 beside FP8 ones.
ROUNDING, WEIGHTS = 2.0**-8, {False: 2.0**-8, True: 2.0**-10}


@pytest.fixture
def kernels(interpreted, monkeypatch):
    """`slackwater_kernels.extend_source`, run by NumPy on CPU tensors; what it does not write of a result is NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))
    return import_module("slackwater_kernels.extend_source")


def heads(tokens: int, num_heads: int = HEADS * SHARERS, seed: int = 0) -> torch.Tensor:
    return vectors(tokens, num_heads, seed=seed)


def paged(lengths, *, page_size=16, fp8=True, **more):
    return scattered(lengths, num_kv_heads=HEADS, page_size=page_size, fp8=fp8, **more)


def extend(kernels, q, pool, rows, new, *, launch=SMALL):
    return run_extend_attention(kernels, q, pool, rows, new, pdl=False, chosen=launch)


def prefill(kernels, q, keys, values, new, *, launch=SMALL):
    return run_prefill_attention(kernels, q, keys, values, new, pdl=False, chosen=launch)


def near(got, q, pool, rows, new):
    """Whether each element differs from the exact one by no more than its roundings."""
    fp8 = isinstance(pool, Fp8KvPool)
    exact = reference.extend_attention(q, pool, rows, new)
    positive = replace(pool, values=pool.values & 0x7F if fp8 else pool.values.abs())
    size = reference.extend_attention(q, positive, rows, new)
    return ((got.double() - exact).abs() <= exact.abs() * ROUNDING + size * WEIGHTS[fp8]).all()


def first(count, keys, values, pool, rows):
    """Puts the first tokens of a row in place."""
    new, _ = ragged([count])
    one = replace(rows, lengths=torch.tensor([count], dtype=torch.int32))
    reference.append_tokens(keys[:count], values[:count], pool, one, new)


@FORMS
@pytest.mark.parametrize(
    ("lengths", "counts", "page_size", "launch"),
    [
        pytest.param((1, 7, 15), (1, 7, 15), 16, SMALL, id="new rows of less than a page"),
        pytest.param((70, 0, 33), (3, 0, 9), 16, SMALL, id="behind older tokens, beside an idle row"),
        pytest.param((40, 17, 20), (5, 0, 20), 16, SMALL, id="a row without new tokens"),
        pytest.param((63, 65), (10, 65), 16, WIDE, id="several pages a block"),
        pytest.param((100,), (21,), 64, SMALL, id="several blocks a page"),
        pytest.param((128, 129), (1, 2), 128, WIDE, id="pages of 128"),
    ],
)
def test_attends_as_the_reference_whatever_lies_in_slots_that_no_row_has(
    kernels, fp8, lengths, counts, page_size, launch
):
    pool, rows = paged(lengths, page_size=page_size, fp8=fp8)
    new, tokens = ragged(counts)
    q = heads(tokens)

    got = extend(kernels, q, pool, rows, new, launch=launch)

    assert got.dtype is torch.bfloat16
    assert near(got, q, pool, rows, new)


@pytest.mark.parametrize("scale", [torch.inf, -torch.inf, -3.0, 3e38])
def test_scales_of_slots_that_no_token_has_may_be_anything(kernels, scale):
    pool, rows = paged((40, 17))
    new, tokens = ragged((20, 5))
    q = heads(tokens)
    usual = extend(kernels, q, pool, rows, new)
    for scales in (pool.key_scales, pool.value_scales):
        scales[scales.isnan()] = scale

    assert torch.equal(extend(kernels, q, pool, rows, new), usual)


@FORMS
@pytest.mark.parametrize("page_size", [16, 128])
def test_the_launch_of_the_package_attends_as_the_reference(kernels, fp8, page_size):
    pool, rows = paged((140, 3), page_size=page_size, fp8=fp8)
    new, tokens = ragged((36, 3))

    got = run_extend_attention(kernels, heads(tokens), pool, rows, new, pdl=False)

    assert near(got, heads(tokens), pool, rows, new)


@FORMS
@pytest.mark.parametrize(("num_kv_heads", "sharers"), [(1, 1), (1, 16), (3, 2), (2, 3)])
def test_any_number_of_queries_share_a_head_of_keys(kernels, fp8, num_kv_heads, sharers):
    pool, rows = scattered((21, 9), num_kv_heads=num_kv_heads, page_size=16, fp8=fp8)
    new, tokens = ragged((7, 9), ahead=1, behind=2)
    q = heads(tokens, num_kv_heads * sharers)

    got = extend(kernels, q, pool, rows, new)

    assert near(got, q, pool, rows, new)


@pytest.mark.parametrize("launch", [SMALL, WIDE], ids=["small", "wide"])
def test_prefill_attends_as_the_reference_and_as_an_extension_of_new_rows_bit_for_bit(kernels, launch):
    counts = (33, 0, 6, 1)
    new, tokens = ragged(counts, ahead=2, behind=5)
    q, keys, values = heads(tokens), heads(tokens, HEADS, seed=1), heads(tokens, HEADS, seed=2)
    pool, rows = paged(counts, fp8=False)
    run_append_tokens(kernels, keys, values, pool, rows, new, pdl=False)

    got = prefill(kernels, q, keys, values, new, launch=launch)

    assert torch.equal(got, extend(kernels, q, pool, rows, new, launch=launch))
    assert torch.allclose(
        reference.prefill_attention(q, keys, values, new), reference.extend_attention(q, pool, rows, new), rtol=1e-12
    )
    assert near(got, q, pool, rows, new)


@FORMS
def test_a_query_of_zeros_takes_all_values_alike(kernels, fp8):
    pool, rows = paged((22,), fp8=fp8)
    new, tokens = ragged((6,))
    q = heads(tokens)
    q[1], q[4, 3] = 0.0, 2.0**-130

    got = extend(kernels, q, pool, rows, new)

    assert near(got, q, pool, rows, new)


def test_a_scale_is_taken_as_it_is_given(kernels):
    pool, rows = paged((20,), fp8=True)
    new, tokens = ragged((3,))

    got = run_extend_attention(kernels, heads(tokens), pool, rows, new, 2**-0.5, pdl=False, chosen=SMALL)

    exact = reference.extend_attention(heads(tokens), pool, rows, new, 2**-0.5)
    size = reference.extend_attention(heads(tokens), replace(pool, values=pool.values & 0x7F), rows, new, 2**-0.5)
    assert ((got.double() - exact).abs() <= exact.abs() * ROUNDING + size * WEIGHTS[True]).all()


@FORMS
def test_a_row_has_the_same_bits_alone_and_among_others_and_at_every_bound(kernels, fp8):
    lengths, counts = (40, 23, 17), (9, 23, 2)
    pool, rows = paged(lengths, fp8=fp8, max_length=48)
    new, tokens = ragged(counts, behind=3, max_new=30)
    q = heads(tokens)

    whole = extend(kernels, q, pool, rows, new)

    at = 0
    for b, count in enumerate(counts):
        one = PagedRows(rows.table[b : b + 1], rows.lengths[b : b + 1], lengths[b])
        alone = extend(kernels, q[at : at + count].clone(), pool, one, ragged([count])[0])
        assert torch.equal(whole[at : at + count], alone)
        at += count


@FORMS
@pytest.mark.parametrize("chunks", [(1, 6, 20, 8), (32, 3)], ids=str)
@pytest.mark.parametrize("launch", [SMALL, WIDE], ids=["small", "wide"])
def test_a_prompt_in_chunks_has_the_bits_of_the_prompt_at_once(kernels, fp8, chunks, launch):
    total = sum(chunks)
    pool, rows = paged((total,), fp8=fp8)
    q, keys, values = heads(total), heads(total, HEADS, seed=1), heads(total, HEADS, seed=2)
    parts, done = [], 0
    pool.keys.fill_(E4M3_NAN if fp8 else torch.nan)  # what a chunk's rows do not have yet
    pool.values.fill_(E4M3_NAN - 1 if fp8 else torch.nan)

    for chunk in chunks:
        now = slice(done, done + chunk)
        done += chunk
        rows.lengths.fill_(done)
        new, _ = ragged([chunk])
        run_append_tokens(kernels, keys[now].clone(), values[now].clone(), pool, rows, new, pdl=False)
        parts.append(extend(kernels, q[now].clone(), pool, rows, new, launch=launch))

    assert torch.equal(torch.cat(parts), extend(kernels, q, pool, rows, ragged([total])[0], launch=launch))
    assert near(torch.cat(parts), q, pool, rows, ragged([total])[0])


@FORMS
def test_one_token_may_outweigh_all_others_but_only_for_those_behind_it(kernels, fp8):
    pool, rows = paged((40,), fp8=fp8)
    new, tokens = ragged((20,))
    q = heads(tokens)
    at = replace(rows, lengths=torch.tensor([30], dtype=torch.int32))
    reference.append_kv(3 * q[10:11].view(1, HEADS, SHARERS, 128).sum(2), heads(1, HEADS, seed=9) * 50, pool, at)

    got = extend(kernels, q, pool, rows, new)

    assert near(got, q, pool, rows, new)


@FORMS
def test_small_weights_keep_their_digits_where_the_value_of_the_large_one_is_zero(kernels, fp8):
    q, keys, values = torch.zeros(20, 8, 128).bfloat16(), torch.zeros(20, HEADS, 128).bfloat16(), heads(20, HEADS)
    q[..., 0], keys[5, :, 0], values[5] = 8.0, 20.0, 100.0  # 2^20 times the weight of any other
    values[5, :, :64] = 0.0
    pool, rows = paged((20,), fp8=fp8)
    first(20, keys, values, pool, rows)

    got = extend(kernels, q, pool, rows, ragged([20])[0])

    assert near(got, q, pool, rows, ragged([20])[0])
    assert 0 < got[-1, :, :64].abs().max() < 2.0**-12


# FP8 has no infinity: one is quantised to the largest finite number.
@pytest.mark.parametrize(
    ("fp8", "value"),
    [(False, torch.nan), (False, torch.inf), (True, torch.nan)],
    ids=["bf16 nan", "bf16 infinity", "fp8 nan"],
)
@pytest.mark.parametrize("launch", [SMALL, WIDE], ids=["small", "wide"])
def test_what_is_no_number_reaches_what_attends_to_it_and_leaves_the_bits_of_all_others(kernels, fp8, value, launch):
    total, old = 30, 5
    pool, rows = paged((total,), fp8=fp8)
    q, keys, values = heads(total - old), heads(total, HEADS, seed=1), heads(total, HEADS, seed=2)
    new, _ = ragged([total - old])
    first(total, keys, values, pool, rows)
    clean = extend(kernels, q, pool, rows, new, launch=launch)
    q[2, 5, 7], keys[20, 0, 3], values[13, 1, 4] = torch.nan, torch.nan, value
    first(total, keys, values, pool, rows)

    got = extend(kernels, q, pool, rows, new, launch=launch)

    is_hit = torch.zeros(total - old, HEADS * SHARERS, dtype=torch.bool)
    is_hit[2, 5], is_hit[20 - old :, :SHARERS], is_hit[13 - old :, SHARERS:] = True, True, True
    assert got[is_hit].isnan().all()
    assert torch.equal(got[~is_hit], clean[~is_hit])


@FORMS
@pytest.mark.parametrize("launch", [SMALL, WIDE], ids=["small", "wide"])
def test_a_wrong_row_is_nan_and_no_other(kernels, fp8, launch):
    lengths, counts = (60, 30, 40, 50, 18, 0, 35), (7, 5, 6, 3, 9, 0, 4)
    pool, rows = paged(lengths, fp8=fp8)
    rows = replace(rows, max_length=50)  # the first row has more
    for part in (pool.key_scales, pool.value_scales) if fp8 else (pool.keys, pool.values):
        part.nan_to_num_()  # so no NaN comes out of a slot
    for part in (pool.keys, pool.values) if fp8 else ():
        part[part == E4M3_NAN] = 0
    new, tokens = ragged(counts, max_new=8, behind=1)  # the fifth row has more
    q = heads(tokens)
    rows.lengths[1] = 4  # fewer than new ones
    rows.table[2, 0], rows.table[3, 3] = -1, pool.num_pages
    before = pool.keys.clone()

    got = extend(kernels, q, pool, rows, new, launch=launch)

    exact = reference.extend_attention(q, pool, rows, new)
    wanted = torch.zeros(tokens, dtype=torch.bool)
    wanted[:30] = True
    assert torch.equal(exact.isnan().all(-1).all(-1), wanted)
    assert torch.equal(got.isnan().all(-1).all(-1), wanted)
    assert torch.equal(got.isnan().any(-1).any(-1), wanted)
    assert torch.equal(pool.keys.view(torch.uint8), before.view(torch.uint8))
    assert near(got[30:], q[30:], pool, PagedRows(rows.table[5:], rows.lengths[5:], 50), ragged((0, 4), behind=1)[0])


@pytest.mark.parametrize(
    ("starts", "max_new", "wrong", "zeros"),
    [
        pytest.param((3, 9, 14), 6, (), (0, 1, 2, 14, 15, 16, 17), id="nobody's in front and behind"),
        pytest.param((0, 9, 14), 8, range(9), (14, 15, 16, 17), id="more than max_new"),
        pytest.param((-2, 9, 14), 18, range(9), (14, 15, 16, 17), id="begins before the batch"),
        pytest.param((0, 9, 19), 18, range(9, 18), (), id="ends behind the batch"),
        pytest.param((0, 30, 14), 18, range(18), (), id="a row behind one that ends behind the batch"),
        pytest.param((25, 26, 30), 18, (), range(18), id="all behind the batch"),
        pytest.param((0, 9, 5, 13), 18, range(9, 13), range(13, 18), id="a start that falls back"),
        pytest.param((4, 2, 1), 18, (), (*range(4), *range(4, 18)), id="rows that end before they begin"),
        pytest.param((0, 0, 18, 18), 18, (), (), id="empty rows"),
    ],
)
def test_each_token_is_written_once_whatever_starts_hold(kernels, starts, max_new, wrong, zeros):
    new, tokens = NewTokens(torch.tensor(starts, dtype=torch.int32), max_new), 18
    q, keys, values = heads(tokens), heads(tokens, HEADS, seed=1), heads(tokens, HEADS, seed=2)

    got = prefill(kernels, q, keys, values, new)

    exact = reference.prefill_attention(q, keys, values, new)
    for out in (got, exact):
        assert out.isnan().all(-1).all(-1).nonzero().flatten().tolist() == list(wrong)
        assert out.isnan().any(-1).any(-1).nonzero().flatten().tolist() == list(wrong)
        assert (out == 0).all(-1).all(-1).nonzero().flatten().tolist() == list(zeros)
    size = reference.prefill_attention(q, keys, values.abs(), new)
    is_near = (got.double() - exact).abs() <= exact.abs() * ROUNDING + size * WEIGHTS[False]
    assert (is_near | exact.isnan()).all()


def test_more_rows_than_are_looked_at_at_a_time(kernels):
    counts = [int(b % 5 == 0) for b in range(131)]
    new, tokens = ragged(counts, behind=1)
    q, keys, values = heads(tokens, 1), heads(tokens, 1, seed=1), heads(tokens, 1, seed=2)

    got = prefill(kernels, q, keys, values, new)

    assert torch.equal(got[:-1], values[:-1])  # each attends to itself alone
    assert (got[-1] == 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_wrong_starts_are_wrong_as_the_reference_has_them(kernels, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(-3, 17, (7,), generator=generator, dtype=torch.int32)
    new, tokens = NewTokens(starts if seed % 2 else starts.sort().values, 5), 14
    q, keys, values = heads(tokens, 1), heads(tokens, 1, seed=1), heads(tokens, 1, seed=2)

    got = prefill(kernels, q, keys, values, new, launch=replace(SMALL, rows=8))

    exact = reference.prefill_attention(q, keys, values, new)
    assert torch.allclose(got.double(), exact, rtol=2.0**-6, atol=2.0**-6, equal_nan=True)


@FORMS
@pytest.mark.parametrize("num_kv_heads", [2, 3])
def test_tokens_are_appended_as_the_reference_does_and_nothing_else_is_touched(kernels, fp8, num_kv_heads):
    lengths, counts = (40, 23, 30, 0, 19, 45, 31), (33, 23, 5, 0, 9, 4, 2)
    pool, rows = scattered(lengths, num_kv_heads=num_kv_heads, page_size=16, fp8=fp8)
    rows = replace(rows, max_length=40)  # the sixth row has more
    rows.table[0, 1] = 1 << 30  # a page in the middle is none of the pool's: tokens beside it are written
    rows.lengths[4] = 8  # fewer than new ones
    new, tokens = ragged(counts, ahead=1, behind=2)
    tensors = {field.name: getattr(pool, field.name) for field in fields(pool)}
    wanted = replace(pool, **{name: t.clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)})
    keys, values = heads(tokens, num_kv_heads, seed=1), heads(tokens, num_kv_heads, seed=2)
    keys[3, 0, 3], keys[36, 1, 5], values[2], values[5, 1, 9] = torch.nan, torch.inf, 0.0, torch.nan
    before = pool.keys.clone()

    run_append_tokens(kernels, keys, values, pool, rows, new, pdl=False)

    reference.append_tokens(keys, values, wanted, rows, new)
    assert not torch.equal(before.view(torch.uint8), wanted.keys.view(torch.uint8))
    for name in ("keys", "values", *(("key_scales", "value_scales") if fp8 else ())):
        got, right = getattr(pool, name), getattr(wanted, name)
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8)), name
    assert not fp8 or ((pool.values & E4M3_NAN) != E4M3_NAN).all()


@FORMS
def test_tokens_at_once_are_tokens_one_after_the_other(fp8):
    pool, rows = paged((20,), fp8=fp8)
    one_by_one, _ = paged((20,), fp8=fp8)
    keys, values = heads(9, HEADS, seed=1), heads(9, HEADS, seed=2)

    reference.append_tokens(keys, values, pool, rows, ragged([9])[0])

    for i in range(9):
        at = replace(rows, lengths=torch.tensor([12 + i], dtype=torch.int32))
        reference.append_kv(keys[i : i + 1], values[i : i + 1], one_by_one, at)
    assert torch.equal(pool.keys.view(torch.uint8), one_by_one.keys.view(torch.uint8))
    assert torch.equal(pool.values.view(torch.uint8), one_by_one.values.view(torch.uint8))


def test_reference_equals_the_product_of_torch():
    for fp8 in (False, True):
        pool, rows = paged((45,), fp8=fp8)
        keys, values = reference._tokens(pool, rows.table[0, :3].long())
        q = heads(20)
        is_seen = torch.arange(45)[None, :] <= torch.arange(25, 45)[:, None]

        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(0, 1)[None], keys[None, :, :45], values[None, :, :45], is_seen, enable_gqa=True
        )

        got = reference.extend_attention(q, pool, rows, ragged([20])[0])
        assert torch.allclose(got, wanted[0].transpose(0, 1), rtol=1e-12)
    q, keys, values = heads(20), heads(20, HEADS, seed=1), heads(20, HEADS, seed=2)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1)[None] for x in (q, keys, values)), is_causal=True, enable_gqa=True
    )
    got = reference.prefill_attention(q, keys, values, ragged([20])[0])
    assert torch.allclose(got, wanted[0].transpose(0, 1), rtol=1e-12)


def test_no_token_is_an_empty_result_without_a_launch():
    pool, rows = paged((4, 5), fp8=True)
    new, _ = ragged((0, 0))
    q, kv = heads(0), heads(0, HEADS)

    run_append_tokens(None, kv, kv, pool, rows, new)

    for got in (run_extend_attention(None, q, pool, rows, new), run_prefill_attention(None, q, kv, kv, new)):
        assert got.shape == (0, HEADS * SHARERS, 128)
        assert got.dtype is torch.bfloat16
