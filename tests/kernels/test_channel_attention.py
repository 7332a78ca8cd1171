"""Attention over values by channel, its own code on small shapes without a GPU, against the reference."""

from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType, SimpleNamespace

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
from slackwater_kernels.attention_layout import ChannelKvPool, NewTokens, PagedRows
from slackwater_kernels.core import E4M3_NAN, KvForm, LayoutError, UnsupportedError
from slackwater_kernels.dispatch import describe_attention
from slackwater_kernels.extend import extend_attention, run_append_tokens
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.numerics import from_e4m3, to_e4m3
from slackwater_kernels.plan import CHANNEL_ATTENTION, AttentionLaunch, attention_splits
from slackwater_kernels.testing import by_channel, scattered, vectors

SMALL = AttentionLaunch(block=16, warps=4, stages=2, chunk=32)
WIDE = AttentionLaunch(block=64, warps=4, stages=2, chunk=64)  # a block reads several pages
HEADS, SHARERS = 2, 4
# The output is rounded to bf16 once.  Queries are exact, and weights to 12 bits, in the parts that they are taken
# into; the interpreter sums in fp32, which the tensor core does not.
ROUNDING, WEIGHTS = 2.0**-8, 2.0**-12


@pytest.fixture(scope="module")
def kernels(interpreted: ModuleType) -> SimpleNamespace:
    """The kernels of three sources, run by NumPy on CPU tensors: `decode_kernel` is the one under test."""
    attention, channel, extend = (
        import_module(f"slackwater_kernels.{name}_source") for name in ("attention", "channel_attention", "extend")
    )
    return SimpleNamespace(
        append_kernel=attention.append_kernel,
        append_tokens_kernel=extend.append_tokens_kernel,
        decode_kernel=channel.decode_kernel,
    )


def queries(rows: int, heads: int = HEADS * SHARERS, seed: int = 0) -> torch.Tensor:
    return vectors(rows, heads, seed=seed)


def paged(lengths, *, page_size=16, heads=HEADS, **more) -> tuple[ChannelKvPool, PagedRows]:
    pool, rows = scattered(lengths, num_kv_heads=heads, page_size=page_size, fp8=True, **more)
    return by_channel(pool), rows


def bound(q, pool, rows, scale=None):
    """What a kernel may differ from the exact values by, element by element."""
    size = reference.decode_attention(q, replace(pool, values=pool.values & 0x7F), rows, scale)
    return reference.decode_attention(q, pool, rows, scale).abs() * ROUNDING + size * WEIGHTS


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
def test_attends_as_the_reference_whatever_lies_in_slots_that_no_row_has(kernels, lengths, page_size, launch):
    pool, rows = paged(lengths, page_size=page_size)
    q = queries(len(lengths))

    got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=launch)

    exact = reference.decode_attention(q, pool, rows)
    assert ((got.double() - exact).abs() <= bound(q, pool, rows)).all()
    assert (got[rows.lengths == 0] == 0).all()


@pytest.mark.parametrize("page_size", [16, 128])
def test_the_launch_of_the_package_attends_as_the_reference(kernels, page_size):
    pool, rows = paged((300, 1), page_size=page_size)

    got = run_decode_attention(kernels, queries(2), pool, rows, Workspace("cpu"), pdl=False)

    assert (
        (got.double() - reference.decode_attention(queries(2), pool, rows)).abs() <= bound(queries(2), pool, rows)
    ).all()


@pytest.mark.parametrize(("heads", "sharers"), [(1, 1), (1, 16), (3, 2), (2, 3), (1, 8)])
def test_any_number_of_queries_share_a_head_of_keys(kernels, heads, sharers):
    pool, rows = paged((40, 5), heads=heads)
    q = queries(2, heads * sharers)

    got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), 0.25, pdl=False, chosen=SMALL)

    assert ((got.double() - reference.decode_attention(q, pool, rows, 0.25)).abs() <= bound(q, pool, rows, 0.25)).all()


@pytest.mark.parametrize("at", [0, 40, 299], ids=["first", "inside", "last"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6], ids=["tiny values", "usual values", "large values"])
def test_one_token_may_outweigh_all_others_wherever_it_stands_and_whatever_its_scale(kernels, at, size):
    pool, rows = paged((300,), page_size=32)
    q = queries(1)
    of_token = PagedRows(rows.table, torch.tensor([at + 1], dtype=torch.int32), 300)
    keys = 3 * q.view(1, HEADS, SHARERS, 128).sum(2)
    reference.append_kv(keys, queries(1, HEADS, seed=9) * size, pool, of_token)

    got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    assert ((got.double() - reference.decode_attention(q, pool, rows)).abs() <= bound(q, pool, rows)).all()


def test_a_row_has_the_same_bits_alone_and_among_others_and_at_every_max_length(kernels):
    pool, rows = paged((40, 70, 17), max_length=80)
    q, space = queries(3), Workspace("cpu")

    whole = run_decode_attention(kernels, q, pool, rows, space, pdl=False, chosen=SMALL)
    ones = [PagedRows(rows.table[b : b + 1], rows.lengths[b : b + 1], int(rows.lengths[b])) for b in range(3)]
    alone = [
        run_decode_attention(kernels, q[b : b + 1].clone(), pool, one, space, pdl=False, chosen=SMALL)
        for b, one in enumerate(ones)
    ]

    assert torch.equal(whole, torch.cat(alone))
    assert not space.take(0, 6)[1].any()  # each launch leaves its counters at 0


@pytest.mark.parametrize("many", [False, True], ids=["a step", "a prompt"])
def test_tokens_are_appended_as_the_reference_does_and_nothing_else_is_touched(kernels, many):
    counts = [1, 3, 0, 0, 5] if many else [1] * 5
    pool, rows = paged((1, 16, 17, 0, 40))
    rows.table[4, 2] = 1 << 30  # the page of its last token is none of the pool's
    tensors = {field.name: getattr(pool, field.name) for field in fields(pool)}
    wanted = replace(pool, **{name: t.clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)})
    keys, values = queries(sum(counts), HEADS, seed=1), queries(sum(counts), HEADS, seed=2)
    keys[0, 0, 3], keys[1, 1, 5], values[2], values[3, 0, 9] = torch.nan, torch.inf, 0.0, torch.nan

    if many:
        new = NewTokens(torch.tensor([0, 1, 4, 4, 4, 9], dtype=torch.int32), 5)
        run_append_tokens(kernels, keys, values, pool, rows, new, pdl=False)
        reference.append_tokens(keys, values, wanted, rows, new)
    else:
        run_append_kv(kernels, keys, values, pool, rows, pdl=False)
        reference.append_kv(keys, values, wanted, rows)

    for name in ("keys", "values", "key_scales", "value_scales"):
        got, right = getattr(pool, name), getattr(wanted, name)
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8)), name
    assert ((pool.values & E4M3_NAN) != E4M3_NAN).all()


def test_the_pool_holds_what_the_one_by_token_holds():
    lengths = (5, 17, 40)
    turned, rows = paged(lengths)
    plain, _ = scattered(lengths, num_kv_heads=HEADS, page_size=16, fp8=True)
    keys, values, q = queries(3, HEADS, seed=1), queries(3, HEADS, seed=2), queries(3)

    for pool in (turned, plain):
        reference.append_kv(keys, values, pool, rows)

    exact = reference.decode_attention(q, plain, rows)
    assert torch.allclose(reference.decode_attention(q, turned, rows), exact, rtol=1e-12, atol=0)


def test_what_is_no_number_makes_its_head_nan_and_no_other(kernels):
    pool, rows = paged((20, 20, 40, 20))
    q = queries(4)
    q[0, 1, 7], q[3, 6, 0] = torch.nan, torch.inf
    keys, values = queries(4, HEADS, seed=1), queries(4, HEADS, seed=2)
    keys[1, 0, 3], values[2, 1, 5] = torch.nan, torch.nan
    run_append_kv(kernels, keys, values, pool, rows, pdl=False)

    got = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    wanted = [[0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 0]]
    assert got.isnan().any(-1).int().tolist() == wanted
    assert torch.equal(got.isnan().any(-1), got.isnan().all(-1))


@pytest.mark.parametrize("launch", [SMALL, WIDE], ids=["small", "wide"])
def test_a_row_that_is_too_long_or_names_a_page_of_no_pool_is_nan_and_no_other(kernels, launch):
    pool, rows = paged((20, 30, 40, 50))
    rows.lengths[0], rows.lengths[1] = 51, -1
    rows.table[2, 1] = pool.num_pages

    got = run_decode_attention(kernels, queries(4), pool, rows, Workspace("cpu"), pdl=False, chosen=launch)

    assert got.isnan().all(-1).all(-1).tolist() == got.isnan().any(-1).any(-1).tolist() == [True, True, True, False]


@pytest.mark.parametrize("rows_many", [1, 3, 4])
def test_the_quantised_form_is_the_quantiser_behind_attention_bit_for_bit(kernels, rows_many):
    pool, rows = paged((5, 70, 0, 33)[:rows_many])
    q = queries(rows_many)
    q[0, 2, 0] = torch.nan

    got = run_decode_attention_quantize(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    plain = run_decode_attention(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)
    wanted = reference.quantize_activations(plain.view(rows_many, -1))
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1))


@given(st.integers(-20, 0), st.integers(128, 255))
def test_two_codes_hold_a_bf16_number_exactly_if_it_is_not_far_under_the_largest(exponent, mantissa):
    number = torch.tensor([mantissa * 2.0**exponent])  # up to 2^8, as queries are made

    first = from_e4m3(to_e4m3(number))
    second = from_e4m3(to_e4m3((number - first) * 16)) / 16

    assert abs(first + second - number) <= (0 if exponent > -14 else 2.0**-14)


@given(st.integers(1, 40_000), st.sampled_from(CHANNEL_ATTENTION))
def test_chunks_hold_whole_blocks_and_cover_every_token_once(max_length, launch):
    splits = attention_splits(max_length, launch)

    assert launch.chunk % launch.block == 0
    assert (splits - 1) * launch.chunk < max_length <= splits * launch.chunk
    assert describe_attention(max_length, KvForm.CHANNEL)["form"] == "fp8 by channel"


POOL = ChannelKvPool.zeros(4, 2, 128, "cpu")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: ChannelKvPool.zeros(4, 2, 24, "cpu"), "page_size must be one of", id="pages of 24"),
        pytest.param(
            lambda: replace(POOL, values=POOL.values.view(4, 2, 128, 128)), "values lie by channel", id="by token"
        ),
        pytest.param(lambda: replace(POOL, values=POOL.values.view(4, 256, 128)), "values must be", id="heads gone"),
        pytest.param(lambda: replace(POOL, values=POOL.values.view(torch.int8)), "values must be uint8", id="signed"),
        pytest.param(
            lambda: replace(POOL, values=POOL.values.transpose(0, 1).contiguous().transpose(0, 1)), "row-major",
            id="heads before pages by strides",
        ),
        pytest.param(lambda: replace(POOL, keys=POOL.keys.flatten(2)), "keys must be", id="flat keys"),
        pytest.param(lambda: replace(POOL, value_scales=POOL.value_scales.double()), "float32", id="fp64 scales"),
        pytest.param(lambda: replace(POOL, key_scales=POOL.key_scales.to("meta")), "the pool anew", id="two places"),
    ],
)  # fmt: skip
def test_the_form_refuses_any_other(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


def test_where_there_is_no_kernel_for_it_the_pool_is_refused():
    rows = PagedRows(torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32), 64)
    new = NewTokens(torch.tensor([0, 1, 2, 3], dtype=torch.int32), 1)

    for call in (
        lambda: decode_attention(queries(3), POOL, rows, Workspace("cpu")),
        lambda: decode_attention_quantize(queries(3), POOL, rows, Workspace("cpu")),
        lambda: append_kv(queries(3, HEADS), queries(3, HEADS), POOL, rows),
    ):
        with pytest.raises(UnsupportedError, match="no kernel for cpu: it runs on sm_90"):
            call()
    with pytest.raises(LayoutError, match="many queries a row read no values by channel"):
        extend_attention(queries(3), POOL, rows, new)
