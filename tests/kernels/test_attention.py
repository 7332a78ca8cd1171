"""Attention's own code on small shapes without a GPU, against the reference; and what every entry refuses."""

from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slackwater_kernels import reference
from slackwater_kernels.attention import (
    append_kv,
    decode_attention,
    decode_attention_quantize,
    run_append_kv,
    run_decode_attention,
    run_decode_attention_quantize,
)
from slackwater_kernels.attention_layout import Fp8KvPool, KvPool, PagedRows
from slackwater_kernels.core import KvForm, LayoutError, UnsupportedError
from slackwater_kernels.dispatch import describe_attention
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.plan import (
    BF16_ATTENTION,
    FP8_ATTENTION,
    AttentionLaunch,
    attention_launch,
    attention_splits,
)
from slackwater_kernels.testing import scattered, vectors

SMALL = AttentionLaunch(block=16, warps=1, stages=2, chunk=32)
WIDE = AttentionLaunch(block=64, warps=1, stages=2, chunk=64)  # a block reads several pages
HEADS, SHARERS = 2, 4
# The output is rounded to bf16 once.  Weights are rounded to bf16 beside bf16 values, to f16 beside FP8 ones.
ROUNDING, WEIGHTS = 2.0**-8, {False: 2.0**-8, True: 2.0**-10}


@pytest.fixture(scope="module")
def kernels(interpreted: ModuleType) -> ModuleType:
    """`slackwater_kernels.attention_source`, run by NumPy on CPU tensors."""
    return import_module("slackwater_kernels.attention_source")


def queries(rows: int, heads: int = HEADS * SHARERS, seed: int = 0) -> torch.Tensor:
    return vectors(rows, heads, seed=seed)


def paged(lengths, *, page_size=16, fp8=True, **more):
    return scattered(lengths, num_kv_heads=HEADS, page_size=page_size, fp8=fp8, **more)


def bound(q, pool, rows, *, fp8):
    """What a kernel may differ from the exact values by, element by element."""
    values = (pool.values & 0x7F) if fp8 else pool.values.abs()
    size = reference.decode_attention(q, replace(pool, values=values), rows)
    return reference.decode_attention(q, pool, rows).abs() * ROUNDING + size * WEIGHTS[fp8]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
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

    got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=launch)

    exact = reference.decode_attention(q, pool, rows)
    assert got.dtype is torch.bfloat16
    assert ((got.double() - exact).abs() <= bound(q, pool, rows, fp8=fp8)).all()
    assert (got[rows.lengths == 0] == 0).all()


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_the_launch_of_the_package_attends_as_the_reference(kernels, fp8, page_size):
    pool, rows = paged((300, 1), page_size=page_size, fp8=fp8)

    got = run_decode_attention(kernels, queries(2), pool, rows, Workspace("cpu"), pdl=False)

    exact = reference.decode_attention(queries(2), pool, rows)
    assert ((got.double() - exact).abs() <= bound(queries(2), pool, rows, fp8=fp8)).all()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("at", [0, 40, 299], ids=["first", "inside", "last"])
def test_one_token_may_outweigh_all_others_wherever_it_stands(kernels, fp8, at):
    pool, rows = paged((300,), page_size=32, fp8=fp8)
    q = queries(1)
    of_token = PagedRows(rows.table, torch.tensor([at + 1], dtype=torch.int32), 300)
    reference.append_kv(3 * q.view(1, HEADS, SHARERS, 128).sum(2), queries(1, HEADS, seed=9), pool, of_token)

    got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    exact = reference.decode_attention(q, pool, rows)
    assert ((got.double() - exact).abs() <= bound(q, pool, rows, fp8=fp8)).all()


@pytest.mark.parametrize(("heads", "sharers"), [(1, 1), (1, 16), (3, 2), (2, 3)])
def test_any_number_of_queries_share_a_head_of_keys(kernels, heads, sharers):
    pool, rows = scattered((40, 5), num_kv_heads=heads, page_size=16, fp8=True)
    q = queries(2, heads * sharers)

    got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), 0.25, pdl=False, chosen=SMALL)

    exact = reference.decode_attention(q, pool, rows, 0.25)
    size = reference.decode_attention(q, replace(pool, values=pool.values & 0x7F), rows, 0.25)
    assert ((got.double() - exact).abs() <= exact.abs() * ROUNDING + size * WEIGHTS[True]).all()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_row_has_the_same_bits_alone_and_among_others_and_at_every_max_length(kernels, fp8):
    pool, rows = paged((40, 70, 17), fp8=fp8, max_length=80)
    q, space = queries(3), Workspace("cpu")

    whole = run_decode_attention(kernels, q, pool, rows, space, pdl=False, chosen=SMALL)
    alone = [
        run_decode_attention(
            kernels,
            q[b : b + 1].clone(),
            pool,
            PagedRows(rows.table[b : b + 1], rows.lengths[b : b + 1], int(rows.lengths[b])),
            space,
            pdl=False,
            chosen=SMALL,
        )
        for b in range(3)
    ]

    assert torch.equal(whole, torch.cat(alone))
    assert not space.take(0, 6)[1].any()  # each launch leaves its counters at 0


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_tokens_are_appended_as_the_reference_does_and_nothing_else_is_touched(kernels, fp8):
    pool, rows = paged((1, 16, 17, 0, 40), fp8=fp8)
    rows.table[4, 2] = 1 << 30  # the page of its last token is none of the pool's
    tensors = {field.name: getattr(pool, field.name) for field in fields(pool)}
    wanted = replace(pool, **{name: t.clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)})
    keys, values = queries(5, HEADS, seed=1), queries(5, HEADS, seed=2)
    keys[0, 0, 3], keys[1, 1, 5], values[2] = torch.nan, torch.inf, 0.0

    run_append_kv(kernels, keys, values, pool, rows, pdl=False)

    reference.append_kv(keys, values, wanted, rows)
    for name in ("keys", "values", *(("key_scales", "value_scales") if fp8 else ())):
        got, right = getattr(pool, name), getattr(wanted, name)
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8)), name


def test_a_nan_makes_its_head_nan_and_no_other(kernels):
    for fp8 in (False, True):
        pool, rows = paged((20, 20, 40), fp8=fp8)
        q = queries(3)
        q[0, 1, 7] = torch.nan
        keys, values = queries(3, HEADS, seed=1), queries(3, HEADS, seed=2)
        keys[1, 0, 3], values[2, 1, 5] = torch.nan, torch.nan
        run_append_kv(kernels, keys, values, pool, rows, pdl=False)

        got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

        has_nan = got.isnan().any(-1).int().tolist()
        assert has_nan == [[0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
        if fp8:  # a token has one scale: a NaN in it is one everywhere
            assert torch.equal(got.isnan().any(-1), got.isnan().all(-1))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("launch", [SMALL, WIDE], ids=["small", "wide"])
def test_a_row_that_is_too_long_or_names_a_page_of_no_pool_is_nan_and_no_other(kernels, fp8, launch):
    pool, rows = paged((20, 30, 40, 50), fp8=fp8)
    for part in (pool.key_scales, pool.value_scales) if fp8 else (pool.keys, pool.values):
        part.nan_to_num_()  # so no NaN comes out of a slot
    for part in (pool.keys, pool.values) if fp8 else ():
        part[part == 0x7F] = 0
    rows.lengths[0], rows.lengths[1] = 51, -1
    rows.table[2, 1] = pool.num_pages

    got = run_decode_attention(kernels, queries(4), pool, rows, Workspace("cpu"), pdl=False, chosen=launch)

    assert got.isnan().all(-1).all(-1).tolist() == got.isnan().any(-1).any(-1).tolist() == [True, True, True, False]
    exact = reference.decode_attention(queries(4), pool, rows)
    assert torch.equal(exact.isnan().all(-1).all(-1), got.isnan().all(-1).all(-1))


@pytest.mark.parametrize("rows_many", [1, 3, 4])
def test_the_quantised_form_is_the_quantiser_behind_attention_bit_for_bit(kernels, rows_many):
    lengths = (5, 70, 0, 33)[:rows_many]
    pool, rows = paged(lengths)
    q = queries(rows_many)
    q[0, 2, 0] = torch.nan

    got = run_decode_attention_quantize(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    plain = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)
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


@given(st.integers(1, 40_000), st.sampled_from(FP8_ATTENTION + BF16_ATTENTION))
def test_chunks_hold_whole_blocks_and_cover_every_token_once(max_length, launch):
    assert launch.chunk % launch.block == 0
    splits = attention_splits(max_length, launch)
    assert (splits - 1) * launch.chunk < max_length <= splits * launch.chunk


def test_describe_says_how_tokens_are_divided_and_that_a_batch_does_not_matter():
    told = describe_attention(1024, KvForm.FP8)

    assert told["split"] == attention_splits(1024, attention_launch(KvForm.FP8))
    assert told["batch_invariant"] is True
    assert describe_attention(4096, KvForm.FP8)["sum"] == told["sum"]
    assert describe_attention(1024, KvForm.BF16)["form"] == "bf16"


POOL, FP8 = KvPool.zeros(4, 2, 16, "cpu"), Fp8KvPool.zeros(4, 2, 16, "cpu")
TABLE, LENGTHS = torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
ROWS = PagedRows(TABLE, LENGTHS, 64)
Q, KV, SPACE = queries(3), queries(3, HEADS), Workspace("cpu")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: KvPool.zeros(4, 2, 24, "cpu"), "page_size must be one of", id="pages of 24"),
        pytest.param(lambda: KvPool.zeros(0, 2, 16, "cpu"), "has pages and heads", id="no pages"),
        pytest.param(lambda: KvPool.zeros(2**26, 2, 16, "meta"), "one for each layer", id="too many pages"),
        pytest.param(
            lambda: KvPool(4, 2, 16, POOL.keys.transpose(1, 2).contiguous(), POOL.values), "heads come before",
            id="tokens before heads",
        ),
        pytest.param(
            lambda: KvPool(4, 2, 16, POOL.keys.transpose(1, 2).contiguous().transpose(1, 2), POOL.values), "row-major",
            id="tokens before heads by strides",
        ),
        pytest.param(lambda: KvPool(4, 2, 16, POOL.keys.half(), POOL.values), "keys must be bfloat16", id="f16 keys"),
        pytest.param(
            lambda: KvPool(4, 2, 16, POOL.keys, POOL.values.transpose(2, 3).contiguous()), "values must be",
            id="transposed values",
        ),
        pytest.param(lambda: KvPool(4, 2, 16, POOL.keys, POOL.values.to("meta")), "the pool anew", id="two places"),
        pytest.param(
            lambda: KvPool(4, 2, 16, torch.zeros(16385, dtype=torch.bfloat16)[1:].view(4, 2, 16, 128), POOL.values),
            "16 bytes", id="keys inside something else",
        ),
        pytest.param(lambda: replace(FP8, keys=FP8.keys.view(torch.float8_e4m3fn)), "uint8", id="float codes"),
        pytest.param(
            lambda: replace(FP8, key_scales=FP8.key_scales.transpose(1, 2)), r"float32 \[4, 2, 16\]",
            id="scales of tokens before heads",
        ),
        pytest.param(lambda: replace(FP8, value_scales=FP8.value_scales.double()), "float32", id="fp64 scales"),
        pytest.param(lambda: replace(FP8, value_scales=torch.zeros(2, 16, 4).permute(2, 0, 1)), "row-major",
                     id="scales by strides"),
        pytest.param(lambda: PagedRows(TABLE.long(), LENGTHS, 64), "table must be int32", id="int64 table"),
        pytest.param(lambda: PagedRows(TABLE[0], LENGTHS, 64), "one row of pages", id="a table of one dimension"),
        pytest.param(lambda: PagedRows(TABLE[:, :0], LENGTHS, 64), "one row of pages", id="a table of no width"),
        pytest.param(lambda: PagedRows(TABLE[:, :3], LENGTHS, 64), "row-major", id="a slice of a table"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS.long(), 64), "lengths must be int32", id="int64 lengths"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS[:2], 64), r"lengths must be int32 \[3\]", id="few lengths"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS.to("meta"), 64), "keep them together", id="lengths elsewhere"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS, 0), "max_length must be 1", id="no length"),
    ],
)  # fmt: skip
def test_a_form_refuses_any_other(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda q, pool, rows: (q, pool.keys, rows), "ChannelKvPool, got Tensor", id="keys alone"),
        pytest.param(lambda q, pool, rows: (q, pool, rows.table), "PagedRows, got Tensor", id="a table alone"),
        pytest.param(lambda q, pool, rows: (q.float(), pool, rows), "q must be bfloat16", id="fp32 queries"),
        pytest.param(lambda q, pool, rows: (q.view(3, -1), pool, rows), "one query a row", id="flat queries"),
        pytest.param(lambda q, pool, rows: (q[:2], pool, rows), r"\[3, 8, 128\]", id="few rows"),
        pytest.param(lambda q, pool, rows: (q[:, :3].clone(), pool, rows), "1 to 16 times 2", id="half a head"),
        pytest.param(lambda q, pool, rows: (q.repeat(1, 5, 1), pool, rows), "1 to 16 times 2", id="too many sharers"),
        pytest.param(lambda q, pool, rows: (q[:, :4], pool, rows), "row-major", id="a slice of heads"),
        pytest.param(lambda q, pool, rows: (q[..., :64].clone(), pool, rows), "q must be", id="heads of 64"),
        pytest.param(
            lambda q, pool, rows: (q.transpose(1, 2).contiguous().transpose(1, 2), pool, rows), "row-major",
            id="queries by strides",
        ),
        pytest.param(lambda q, pool, rows: (q.to("meta"), pool, rows), "q is on meta", id="queries elsewhere"),
        pytest.param(
            lambda q, pool, rows: (torch.zeros(3073, dtype=torch.bfloat16)[1:].view(3, 8, 128), pool, rows), "16 bytes",
            id="queries inside something else",
        ),
        pytest.param(lambda q, pool, rows: (q, pool, replace(rows, max_length=65)), "widen the table", id="too long"),
        pytest.param(
            lambda q, pool, rows: (q, KvPool.zeros(4, 2, 16, "meta"), rows), "the pool is on meta", id="elsewhere"
        ),
    ],
)  # fmt: skip
def test_attention_refuses_what_it_would_have_to_cast_or_guess(call, complaint):
    for pool in (POOL, FP8):
        q, other, rows = call(Q, pool, ROWS)
        for attend in (
            lambda: decode_attention(q, other, rows, SPACE),  # noqa: B023 - called in this turn of the loop
            lambda: decode_attention_quantize(q, other, rows, SPACE),  # noqa: B023
            lambda: run_decode_attention(None, q, other, rows, SPACE),  # noqa: B023
            lambda: run_decode_attention_quantize(None, q, other, rows, SPACE),  # noqa: B023
            lambda: reference.decode_attention(q, other, rows),  # noqa: B023
        ):
            with pytest.raises(LayoutError, match=complaint):
                attend()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda kv: (kv.float(), kv), "keys must be bfloat16", id="fp32 keys"),
        pytest.param(lambda kv: (kv, kv.half()), "values must be bfloat16", id="f16 values"),
        pytest.param(lambda kv: (kv, kv[:2]), r"values must be bfloat16 \[3, 2, 128\]", id="few rows"),
        pytest.param(lambda kv: (queries(3), kv), r"keys must be bfloat16 \[3, 2, 128\]", id="expanded keys"),
        pytest.param(lambda kv: (kv.transpose(0, 1).contiguous().transpose(0, 1), kv), "row-major", id="by strides"),
        pytest.param(lambda kv: (kv, kv.to("meta")), "values is on meta", id="values elsewhere"),
        pytest.param(lambda kv: (kv[:, None], kv), "keys must be", id="a token's dimension"),
    ],
)
def test_append_refuses_what_it_would_have_to_cast_or_guess(call, complaint):
    for append in (append_kv, reference.append_kv, lambda *given: run_append_kv(None, *given)):
        with pytest.raises(LayoutError, match=complaint):
            append(*call(KV), POOL, ROWS)


def test_a_workspace_elsewhere_is_refused():
    with pytest.raises(LayoutError, match="workspace on meta"):
        run_decode_attention(None, Q, FP8, ROWS, Workspace("meta"))


@pytest.mark.parametrize(
    "take", [lambda: torch.add(POOL, 1), lambda: torch.zeros(3).copy_(FP8), lambda: torch.cat((FP8, FP8))]
)
def test_a_pool_is_no_tensor(take):
    with pytest.raises((LayoutError, TypeError)):
        take()


def test_a_cpu_is_refused_by_name_with_the_alternative():
    for call, instead in (
        (lambda: decode_attention(Q, POOL, ROWS, SPACE), "reference.decode_attention, or torch.*enable_gqa"),
        (lambda: decode_attention_quantize(Q, FP8, ROWS, SPACE), "reference.decode_attention and quantize_activations"),
        (lambda: append_kv(KV, KV, FP8, ROWS), "reference.append_kv"),
    ):
        with pytest.raises(UnsupportedError, match=f"no kernel for cpu: it runs on sm_90; use .*{instead}"):
            call()
