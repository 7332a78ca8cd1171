"""Attention's own code on small shapes without a GPU, against the reference."""

from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slackwater_kernels import reference
from slackwater_kernels.attention import run_append_kv, run_decode_attention, run_decode_attention_quantize
from slackwater_kernels.attention_layout import Fp8KvPool, PagedRows
from slackwater_kernels.core import E4M3_NAN, KvForm
from slackwater_kernels.dispatch import describe_attention
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.numerics import from_e4m3, to_e4m3
from slackwater_kernels.plan import (
    BF16_ATTENTION,
    FP8_ATTENTION,
    AttentionLaunch,
    attention_launch,
    attention_splits,
)
from slackwater_kernels.testing import scattered, vectors

SMALL = AttentionLaunch(block=16, warps=4, stages=2, chunk=32)
WIDE = AttentionLaunch(block=64, warps=4, stages=2, chunk=64)  # a block reads several pages
HEADS, SHARERS = 2, 4
FORMS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
# The output is rounded to bf16 once.  Beside bf16 values weights are rounded to bf16; beside FP8 ones they are exact to
# 12 bits, and queries wholly, in the parts that they are taken into.  The interpreter sums in fp32, which the FP8
# tensor core does not.
ROUNDING, WEIGHTS = 2.0**-8, {False: 2.0**-8, True: 2.0**-12}


@pytest.fixture(scope="module")
def kernels(interpreted: ModuleType) -> dict[bool, SimpleNamespace]:
    """The kernels of either form, FP8 or not, run by NumPy on CPU tensors."""
    append, decode = (import_module(f"slackwater_kernels.{name}attention_source") for name in ("", "fp8_"))
    return {
        fp8: SimpleNamespace(append_kernel=append.append_kernel, decode_kernel=module.decode_kernel)
        for fp8, module in ((False, append), (True, decode))
    }


def queries(rows: int, heads: int = HEADS * SHARERS, seed: int = 0) -> torch.Tensor:
    return vectors(rows, heads, seed=seed)


def paged(lengths, *, page_size=16, fp8=True, heads=HEADS, **more):
    return scattered(lengths, num_kv_heads=heads, page_size=page_size, fp8=fp8, **more)


def near(got, q, pool, rows, scale=None):
    """Whether each element differs from the exact one by no more than its roundings."""
    fp8 = isinstance(pool, Fp8KvPool)
    exact = reference.decode_attention(q, pool, rows, scale)
    positive = replace(pool, values=pool.values & 0x7F if fp8 else pool.values.abs())
    size = reference.decode_attention(q, positive, rows, scale)
    return ((got.double() - exact).abs() <= exact.abs() * ROUNDING + size * WEIGHTS[fp8]).all()


@FORMS
@pytest.mark.parametrize(
    ("lengths", "page_size", "launch"),
    [
        pytest.param((1, 7, 15), 16, SMALL, id="less than a page"),
        pytest.param((16, 17), 16, SMALL, id="a page and one more"),
        pytest.param((70, 0, 33), 16, SMALL, id="several chunks beside an idle row"),
        pytest.param((290,), 32, SMALL, id="more chunks than are merged at a time"),
        pytest.param((63, 65), 16, WIDE, id="several pages a block"),
        pytest.param((100,), 64, SMALL, id="several blocks a page"),
        pytest.param((128, 129), 128, WIDE, id="pages of 128"),
    ],
)
def test_attends_as_the_reference_whatever_lies_in_slots_that_no_row_has(kernels, fp8, lengths, page_size, launch):
    pool, rows = paged(lengths, page_size=page_size, fp8=fp8)
    q = queries(len(lengths))

    got = run_decode_attention(kernels[fp8], q, pool, rows, Workspace("cpu"), pdl=False, chosen=launch)

    assert got.dtype is torch.bfloat16
    assert near(got, q, pool, rows)
    assert (got[rows.lengths == 0] == 0).all()


@pytest.mark.parametrize("scale", [torch.inf, -torch.inf, -3.0, 3e38])
def test_scales_of_slots_that_no_token_has_may_be_anything(kernels, scale):
    pool, rows = paged((40, 17))
    q, space = queries(2), Workspace("cpu")
    usual = run_decode_attention(kernels[True], q, pool, rows, space, pdl=False, chosen=SMALL)
    for scales in (pool.key_scales, pool.value_scales):
        scales[scales.isnan()] = scale

    assert torch.equal(run_decode_attention(kernels[True], q, pool, rows, space, pdl=False, chosen=SMALL), usual)


@FORMS
@pytest.mark.parametrize("page_size", [16, 128])
def test_the_launch_of_the_package_attends_as_the_reference(kernels, fp8, page_size):
    pool, rows = paged((300, 1), page_size=page_size, fp8=fp8)

    got = run_decode_attention(kernels[fp8], queries(2), pool, rows, Workspace("cpu"), pdl=False)

    assert near(got, queries(2), pool, rows)


@FORMS
@pytest.mark.parametrize("at", [0, 40, 299], ids=["first", "inside", "last"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6], ids=["tiny values", "usual values", "large values"])
def test_one_token_may_outweigh_all_others_wherever_it_stands_and_whatever_its_scale(kernels, fp8, at, size):
    pool, rows = paged((300,), page_size=32, fp8=fp8)
    q = queries(1)
    of_token = PagedRows(rows.table, torch.tensor([at + 1], dtype=torch.int32), 300)
    keys = 3 * q.view(1, HEADS, SHARERS, 128).sum(2)
    reference.append_kv(keys, queries(1, HEADS, seed=9) * size, pool, of_token)

    got = run_decode_attention(kernels[fp8], q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    assert near(got, q, pool, rows)


@FORMS
@pytest.mark.parametrize(("heads", "sharers"), [(1, 1), (1, 16), (3, 2), (2, 3), (1, 8)])
def test_any_number_of_queries_share_a_head_of_keys(kernels, fp8, heads, sharers):
    pool, rows = paged((40, 5), fp8=fp8, heads=heads)
    q = queries(2, heads * sharers)

    got = run_decode_attention(kernels[fp8], q, pool, rows, Workspace("cpu"), 0.25, pdl=False, chosen=SMALL)

    assert near(got, q, pool, rows, 0.25)


@FORMS
def test_a_row_has_the_same_bits_alone_and_among_others_and_at_every_max_length(kernels, fp8):
    pool, rows = paged((40, 70, 17), fp8=fp8, max_length=80)
    q, space = queries(3), Workspace("cpu")

    whole = run_decode_attention(kernels[fp8], q, pool, rows, space, pdl=False, chosen=SMALL)

    for b in range(3):
        one = PagedRows(rows.table[b : b + 1], rows.lengths[b : b + 1], int(rows.lengths[b]))
        alone = run_decode_attention(kernels[fp8], q[b : b + 1].clone(), pool, one, space, pdl=False, chosen=SMALL)
        assert torch.equal(alone[0], whole[b]), b
    assert not space.take(0, 6)[1].any()  # each launch leaves its counters at 0


@FORMS
def test_tokens_are_appended_as_the_reference_does_and_nothing_else_is_touched(kernels, fp8):
    pool, rows = paged((1, 16, 17, 0, 40, 9), fp8=fp8)
    rows.table[4, 2] = 1 << 30  # the page of its last token is none of the pool's
    tensors = {field.name: getattr(pool, field.name) for field in fields(pool)}
    wanted = replace(pool, **{name: t.clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)})
    keys, values = queries(6, HEADS, seed=1), queries(6, HEADS, seed=2)
    keys[0, 0, 3], keys[1, 1, 5], values[2], values[5, 0, 9] = torch.nan, torch.inf, 0.0, torch.nan

    run_append_kv(kernels[fp8], keys, values, pool, rows, pdl=False)

    reference.append_kv(keys, values, wanted, rows)
    for name in ("keys", "values", *(("key_scales", "value_scales") if fp8 else ())):
        got, right = getattr(pool, name), getattr(wanted, name)
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8)), name
    assert not fp8 or ((pool.values & E4M3_NAN) != E4M3_NAN).all()


def test_keys_lie_token_by_token_and_values_number_by_number():
    pool, rows = paged((20,))
    keys, values = queries(1, HEADS, seed=1), queries(1, HEADS, seed=2)

    reference.append_kv(keys, values, pool, rows)

    page, slot = rows.table[0, 1], 3
    (key_codes, key_scales), (codes, scales) = reference.quantize_kv(keys[0]), reference.quantize_kv(values[0])
    assert torch.equal(pool.keys[page, :, slot], key_codes)
    assert torch.equal(pool.key_scales[page, :, slot], key_scales)
    assert torch.equal(pool.value_scales[page, :, slot], scales)
    for number in range(128):
        assert torch.equal(pool.values[page, :, number * 16 + slot], codes[:, number])


@FORMS
def test_what_is_no_number_makes_its_head_nan_and_no_other(kernels, fp8):
    pool, rows = paged((20, 20, 40, 20), fp8=fp8)
    q = queries(4)
    q[0, 1, 7], q[3, 6, 0] = torch.nan, torch.inf
    keys, values = queries(4, HEADS, seed=1), queries(4, HEADS, seed=2)
    keys[1, 0, 3], values[2, 1, 5] = torch.nan, torch.nan
    run_append_kv(kernels[fp8], keys, values, pool, rows, pdl=False)

    got = run_decode_attention(kernels[fp8], q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    wanted = [[0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 0]]
    assert got.isnan().any(-1).int().tolist() == wanted
    if fp8:  # a token has one scale: a NaN in it is one everywhere
        assert torch.equal(got.isnan().any(-1), got.isnan().all(-1))


@FORMS
@pytest.mark.parametrize("launch", [SMALL, WIDE], ids=["small", "wide"])
def test_a_row_that_is_too_long_or_names_a_page_of_no_pool_is_nan_and_no_other(kernels, fp8, launch):
    pool, rows = paged((20, 30, 40, 50), fp8=fp8)
    for part in (pool.key_scales, pool.value_scales) if fp8 else (pool.keys, pool.values):
        part.nan_to_num_()  # so no NaN comes out of a slot
    for part in (pool.keys, pool.values) if fp8 else ():
        part[part == E4M3_NAN] = 0
    rows.lengths[0], rows.lengths[1] = 51, -1
    rows.table[2, 1] = pool.num_pages

    got = run_decode_attention(kernels[fp8], queries(4), pool, rows, Workspace("cpu"), pdl=False, chosen=launch)

    assert got.isnan().all(-1).all(-1).tolist() == got.isnan().any(-1).any(-1).tolist() == [True, True, True, False]
    exact = reference.decode_attention(queries(4), pool, rows)
    assert torch.equal(exact.isnan().all(-1).all(-1), got.isnan().all(-1).all(-1))


@FORMS
@pytest.mark.parametrize("rows_many", [1, 3, 4])
def test_the_quantised_form_is_the_quantiser_behind_attention_bit_for_bit(kernels, fp8, rows_many):
    pool, rows = paged((5, 70, 0, 33)[:rows_many], fp8=fp8)
    q = queries(rows_many)
    q[0, 2, 0] = torch.nan

    got = run_decode_attention_quantize(kernels[fp8], q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    plain = run_decode_attention(kernels[fp8], q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)
    wanted = reference.quantize_activations(plain.view(rows_many, -1))
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1))


def test_reference_equals_the_product_of_torch():
    for fp8 in (False, True):
        pool, rows = paged((45,), fp8=fp8)
        keys, values = reference._tokens(pool, rows.table[0, :3].long())
        q = queries(1)

        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(0, 1)[None, :, :], keys[None, :, :45], values[None, :, :45], enable_gqa=True
        )

        assert torch.allclose(reference.decode_attention(q, pool, rows), wanted[0].transpose(0, 1), rtol=1e-12)


def test_the_shared_scale_is_exact_algebra_and_a_code_is_at_most_one_step_off():
    x = queries(3, HEADS)

    codes, scales = reference.quantize_kv(x)

    values = reference.from_e4m3(codes).double() * scales.double()[..., None]
    largest = x.double().abs().amax(-1, keepdim=True)
    assert ((values - x.double()).abs() <= x.double().abs() * 2.0**-3.9 + largest * 2.0**-17).all()


@given(st.integers(-20, 0), st.integers(128, 255))
def test_two_codes_hold_a_bf16_number_exactly_if_it_is_not_far_under_the_largest(exponent, mantissa):
    number = torch.tensor([mantissa * 2.0**exponent])  # up to 2^8, as queries are made

    first = from_e4m3(to_e4m3(number))
    second = from_e4m3(to_e4m3((number - first) * 16)) / 16

    assert abs(first + second - number) <= (0 if exponent > -14 else 2.0**-14)


@given(st.integers(1, 40_000), st.sampled_from(FP8_ATTENTION + BF16_ATTENTION))
def test_chunks_hold_whole_blocks_and_cover_every_token_once(max_length, launch):
    splits = attention_splits(max_length, launch)

    assert launch.chunk % launch.block == 0
    assert (splits - 1) * launch.chunk < max_length <= splits * launch.chunk


def test_describe_says_how_tokens_are_divided_and_that_a_batch_does_not_matter():
    told = describe_attention(1024, KvForm.FP8)

    assert told["form"] == "fp8"
    assert told["split"] == attention_splits(1024, attention_launch(KvForm.FP8))
    assert told["batch_invariant"] is True
    assert describe_attention(4096, KvForm.FP8)["sum"] == told["sum"]
    assert describe_attention(1024, KvForm.BF16)["form"] == "bf16"
