"""MXFP8 attention's own code on small shapes without a GPU, against the references."""

from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType

import pytest
import torch

from slackwater_kernels import reference_mx_attention as reference
from slackwater_kernels.attention_layout import NewTokens, PagedRows
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.mx_attention import (
    DECODE,
    TILES,
    run_append_kv_mx,
    run_append_tokens_mx,
    run_decode_attention_mx,
    run_extend_attention_mx,
    run_prefill_attention_mx,
    run_quantize_tokens_mx,
)
from slackwater_kernels.mx_attention_layout import MxKvPool
from slackwater_kernels.plan import AttentionLaunch, ExtendLaunch
from slackwater_kernels.reference_mx_attention import Steps
from slackwater_kernels.testing import ragged
from slackwater_kernels.testing_mx import heads_of_tokens, scattered_mx

SMALL = AttentionLaunch(block=32, warps=1, stages=2, chunk=64)
WIDE = AttentionLaunch(block=64, warps=1, stages=2, chunk=64)  # a block reads several pages
TILE = ExtendLaunch(rows=16, block=32, warps=1, stages=2)  # 4 queries
WIDE_TILE = ExtendLaunch(rows=32, block=64, warps=1, stages=2)
HEADS, SHARERS = 2, 4
ROUNDING = 2.0**-8  # the output is rounded to bf16 once


@pytest.fixture(scope="module")
def kernels(interpreted: ModuleType) -> ModuleType:
    """`slackwater_kernels.mx_attention_source`, run by NumPy on CPU tensors."""
    if not hasattr(import_module("triton.runtime.interpreter").InterpreterBuilder, "create_dot_scaled"):
        pytest.skip("this Triton interprets no tl.dot_scaled; 3.9 does")
    return import_module("slackwater_kernels.mx_attention_source")


def queries(tokens: int, heads: int = HEADS * SHARERS, seed: int = 50) -> torch.Tensor:
    return heads_of_tokens(tokens, heads, seed=seed)


def tokens(count: int, seed: int) -> torch.Tensor:
    return heads_of_tokens(count, HEADS, seed=seed)


def paged(lengths, *, page_size=16, **more) -> tuple[MxKvPool, PagedRows]:
    return scattered_mx(lengths, num_kv_heads=HEADS, page_size=page_size, **more)


def new_tokens(counts, **more) -> NewTokens:
    return ragged(counts, **more)[0]


def is_near(got: torch.Tensor, values: torch.Tensor, bound: torch.Tensor) -> bool:
    """Whether each element is within its bound, and bf16's rounding."""
    return bool(((got.double() - values).abs() <= bound + (values.abs() + bound) * ROUNDING).all())


def clone(pool: MxKvPool) -> MxKvPool:
    tensors = {field.name: getattr(pool, field.name) for field in fields(pool)}
    return replace(pool, **{name: part.clone() for name, part in tensors.items() if isinstance(part, torch.Tensor)})


def same(got: MxKvPool, wanted: MxKvPool) -> bool:
    return all(
        torch.equal(getattr(got, name).view(torch.uint8), getattr(wanted, name).view(torch.uint8))
        for name in ("keys", "key_scales", "values", "value_scales")
    )


@pytest.mark.parametrize(
    ("lengths", "page_size", "launch"),
    [
        pytest.param((1, 7, 15), 16, SMALL, id="less than a page"),
        pytest.param((32, 33), 32, SMALL, id="a block and one more"),
        pytest.param((140, 0, 65), 16, SMALL, id="several chunks beside an idle row"),
        pytest.param((550,), 64, SMALL, id="more chunks than are merged at a time"),
        pytest.param((63, 65), 16, WIDE, id="several pages a block"),
        pytest.param((100,), 128, SMALL, id="several blocks and chunks a page"),
    ],
)
def test_decodes_as_the_reference_whatever_lies_in_slots_that_no_row_has(kernels, lengths, page_size, launch):
    pool, rows = paged(lengths, page_size=page_size)
    q = queries(len(lengths))

    got = run_decode_attention_mx(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=launch)

    assert got.dtype is torch.bfloat16
    assert is_near(got, *reference.decode_bounded(q, pool, rows))
    assert is_near(got, *reference.decode_bounded(q, pool, rows, steps=Steps(launch.block, launch.chunk)))
    assert (got[rows.lengths == 0] == 0).all()


@pytest.mark.parametrize("page_size", [16, 128])
def test_the_launches_of_the_package_attend_as_the_reference(kernels, page_size):
    pool, rows = paged((300, 1), page_size=page_size)
    q, new = queries(2), new_tokens([1, 1])

    decoded = run_decode_attention_mx(kernels, q, pool, rows, Workspace("cpu"), pdl=False)
    extended = run_extend_attention_mx(kernels, q, pool, rows, new, pdl=False)

    assert is_near(decoded, *reference.decode_bounded(q, pool, rows, steps=Steps(DECODE.block, DECODE.chunk)))
    assert is_near(extended, *reference.extend_bounded(q, pool, rows, new, steps=Steps(TILES.block)))


@pytest.mark.parametrize("at", [0, 40, 149], ids=["first", "inside", "last"])
def test_one_token_may_outweigh_all_others_wherever_it_stands(kernels, at):
    pool, rows = paged((150,), page_size=32)
    q = queries(1)
    of_token = PagedRows(rows.table, torch.tensor([at + 1], dtype=torch.int32), 150)
    reference.append_kv_mx(2 * q.view(1, HEADS, SHARERS, 128).sum(2), tokens(1, seed=9), pool, of_token)

    got = run_decode_attention_mx(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    assert is_near(got, *reference.decode_bounded(q, pool, rows, steps=Steps(SMALL.block, SMALL.chunk)))


@pytest.mark.parametrize(("heads", "sharers"), [(1, 1), (1, 16), (3, 2), (2, 3)])
def test_any_number_of_queries_share_a_head_of_keys(kernels, heads, sharers):
    pool, rows = scattered_mx((70, 5), num_kv_heads=heads, page_size=16)
    q, many, new = queries(2, heads * sharers), queries(9, heads * sharers), new_tokens([6, 3])

    decoded = run_decode_attention_mx(kernels, q, pool, rows, Workspace("cpu"), 0.25, pdl=False, chosen=SMALL)
    extended = run_extend_attention_mx(kernels, many, pool, rows, new, 0.25, pdl=False, chosen=TILE)

    assert is_near(decoded, *reference.decode_bounded(q, pool, rows, 0.25, Steps(SMALL.block, SMALL.chunk)))
    assert is_near(extended, *reference.extend_bounded(many, pool, rows, new, 0.25, Steps(TILE.block)))


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda pool: {"key_scales": pool.key_scales.roll(1, 2)}, id="words of the token beside"),
        pytest.param(lambda pool: {"key_scales": pool.key_scales.transpose(0, 1).reshape(pool.key_scales.shape)},
                     id="words with heads before pages"),
        pytest.param(lambda pool: {"key_scales": pool.key_scales.view(-1, 1).view(torch.uint8).flip(1).view(
            torch.int32).view(pool.key_scales.shape)}, id="bytes of a word turned round"),
        pytest.param(lambda pool: {"value_scales": pool.value_scales.roll(1, 2)}, id="scales of the token beside"),
        pytest.param(lambda pool: {"value_scales": pool.value_scales * 1.25}, id="scales a quarter too large"),
        pytest.param(lambda pool: {"values": pool.values.view(-1, 8, 16).transpose(1, 2).reshape(pool.values.shape)},
                     id="values in another order"),
    ],
)  # fmt: skip
def test_the_bound_finds_every_wrong_scale_and_order(kernels, plant):
    pool, rows = paged((48, 48), page_size=16)
    pool.value_scales.nan_to_num_()  # no NaN of an empty slot gives it away
    pool.key_scales[pool.key_scales == -1] = 0
    q, steps = queries(2), Steps(SMALL.block, SMALL.chunk)

    got = run_decode_attention_mx(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    assert is_near(got, *reference.decode_bounded(q, pool, rows, steps=steps))
    planted = replace(pool, **{name: part.contiguous() for name, part in plant(pool).items()})
    assert not is_near(got, *reference.decode_bounded(q, planted, rows, steps=steps))


def test_a_row_has_the_same_bits_alone_and_among_others_and_at_every_max_length(kernels):
    pool, rows = paged((40, 140, 17), max_length=150)
    q, space = queries(3), Workspace("cpu")

    whole = run_decode_attention_mx(kernels, q, pool, rows, space, pdl=False, chosen=SMALL)
    alone = [
        run_decode_attention_mx(
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


@pytest.mark.parametrize(
    ("lengths", "counts", "page_size", "launch"),
    [
        pytest.param((7, 40), (7, 3), 16, TILE, id="all of a row and the last of another"),
        pytest.param((33, 32, 5), (33, 0, 1), 32, TILE, id="an empty row between"),
        pytest.param((70,), (9,), 16, WIDE_TILE, id="several pages a block"),
        pytest.param((130,), (5,), 128, TILE, id="several blocks a page"),
    ],
)
def test_extends_as_the_reference_whatever_lies_in_slots_that_no_row_has(kernels, lengths, counts, page_size, launch):
    pool, rows = paged(lengths, page_size=page_size)
    q, new = queries(sum(counts)), new_tokens(counts)

    got = run_extend_attention_mx(kernels, q, pool, rows, new, pdl=False, chosen=launch)

    assert is_near(got, *reference.extend_bounded(q, pool, rows, new))
    assert is_near(got, *reference.extend_bounded(q, pool, rows, new, steps=Steps(launch.block)))


@pytest.mark.parametrize("launch", [TILE, WIDE_TILE], ids=["tile", "wide tile"])
def test_a_prompt_in_chunks_has_the_bits_of_one_at_once_and_of_prefill_without_a_pool(kernels, launch):
    q, keys, values = queries(42), tokens(42, seed=1), tokens(42, seed=2)
    table = torch.tensor([[3, 0, 2], [5, 1, 4]], dtype=torch.int32)
    pool, parts = MxKvPool.zeros(6, HEADS, 16, "cpu"), []
    lengths = (37, 5)

    for done, upto in (((0, 0), (3, 5)), ((3, 5), (34, 5)), ((34, 5), lengths)):
        rows = PagedRows(table, torch.tensor(upto, dtype=torch.int32), 48)
        new = new_tokens([to - to_before for to, to_before in zip(upto, done, strict=True)])
        of_part = torch.cat([torch.arange(done[b], upto[b]) + 37 * b for b in range(2)])
        run_append_tokens_mx(kernels, keys[of_part], values[of_part], pool, rows, new, pdl=False)
        parts.append((of_part, run_extend_attention_mx(kernels, q[of_part], pool, rows, new, pdl=False, chosen=launch)))

    at_once = run_extend_attention_mx(kernels, q, pool, rows, new_tokens(lengths), pdl=False, chosen=launch)
    prefilled = run_prefill_attention_mx(kernels, q, keys, values, new_tokens(lengths), pdl=False, chosen=launch)
    for of_part, part in parts:
        assert torch.equal(part, at_once[of_part])
    assert torch.equal(prefilled, at_once)
    steps = Steps(launch.block)
    assert is_near(at_once, *reference.prefill_bounded(q, keys, values, new_tokens(lengths), steps=steps))


def test_a_query_has_the_same_bits_alone_and_among_others_and_at_every_max_new(kernels):
    pool, rows = paged((40, 70))
    q, new = queries(9), new_tokens([4, 5], max_new=30)

    whole = run_extend_attention_mx(kernels, q, pool, rows, new, pdl=False, chosen=TILE)

    second = PagedRows(rows.table[1:], rows.lengths[1:], 70)
    alone = run_extend_attention_mx(kernels, q[4:].clone(), pool, second, new_tokens([5]), pdl=False, chosen=TILE)
    one = run_extend_attention_mx(kernels, q[8:].clone(), pool, second, new_tokens([1]), pdl=False, chosen=TILE)
    assert torch.equal(alone, whole[4:])
    assert torch.equal(one, whole[8:])


@pytest.fixture
def unwritten(monkeypatch):
    """New results are NaN, so that what a kernel does not write is seen."""
    as_is = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: as_is(x).fill_(torch.nan))


@pytest.mark.usefixtures("unwritten")
def test_tokens_that_no_row_has_are_zeros(kernels):
    pool, rows = paged((20, 30))
    q, new = queries(20), new_tokens([3, 5], ahead=2)

    extended = run_extend_attention_mx(kernels, q, pool, rows, new, pdl=False, chosen=TILE)
    prefilled = run_prefill_attention_mx(kernels, q, tokens(20, 1), tokens(20, 2), new, pdl=False, chosen=TILE)

    for got in (extended, prefilled):
        assert (got == 0).all(-1).all(-1).tolist() == [True] * 2 + [False] * 8 + [True] * 10
        assert not got.isnan().any()


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    ("starts", "lengths", "wrong"),
    [
        pytest.param((-1, 3, 5, 8), (20, 30, 40), range(3), id="begins before the batch"),
        pytest.param((0, 3, 5, 9), (20, 30, 40), range(5, 8), id="ends behind it"),
        pytest.param((0, 7, 8, 8), (20, 30, 40), range(7), id="more than max_new"),
        pytest.param((0, 5, 3, 8), (20, 30, 40), range(5, 8), id="begins before the end of the row in front"),
        pytest.param((0, 3, 5, 8), (2, 30, 40), range(3), id="shorter than its new tokens"),
        pytest.param((0, 3, 5, 8), (20, 41, 40), range(3, 5), id="longer than max_length"),
    ],
)
def test_all_tokens_of_a_wrong_row_are_nan_and_no_others(kernels, starts, lengths, wrong):
    pool, rows = paged((20, 41, 40))
    rows = PagedRows(rows.table, torch.tensor(lengths, dtype=torch.int32), 40)
    q, new = queries(8), NewTokens(torch.tensor(starts, dtype=torch.int32), 6)

    got = run_extend_attention_mx(kernels, q, pool, rows, new, pdl=False, chosen=TILE)

    wanted, bound = reference.extend_bounded(q, pool, rows, new, steps=Steps(TILE.block))
    of_row = [token in wrong for token in range(8)]
    assert got.isnan().all(-1).all(-1).tolist() == got.isnan().any(-1).any(-1).tolist() == of_row
    assert torch.equal(wanted.isnan(), got.isnan())
    assert is_near(got.nan_to_num(), wanted.nan_to_num(), bound.nan_to_num())


@pytest.mark.usefixtures("unwritten")
def test_a_row_that_is_too_long_or_names_a_page_of_no_pool_is_nan_and_no_other(kernels):
    pool, rows = paged((20, 30, 40, 50))
    rows.lengths[0], rows.lengths[1] = 51, -1
    rows.table[2, 2] = pool.num_pages  # the page of its last tokens: queries before them are the row's too
    q, new = queries(4), new_tokens([1, 1, 1, 1])

    decoded = run_decode_attention_mx(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)
    extended = run_extend_attention_mx(kernels, q, pool, rows, new, pdl=False, chosen=TILE)
    many = run_extend_attention_mx(kernels, queries(32), pool, rows, new_tokens([0, 0, 30, 2]), pdl=False, chosen=TILE)

    for got in (decoded, extended):
        assert got.isnan().all(-1).all(-1).tolist() == [True, True, True, False]
        assert got.isnan().any(-1).any(-1).tolist() == [True, True, True, False]
    assert many.isnan().all(-1).all(-1).tolist() == many.isnan().any(-1).any(-1).tolist() == [True] * 30 + [False] * 2


def test_a_nan_makes_nan_what_it_meets_and_nothing_else(kernels):
    pool, rows = paged((20, 20, 40))
    keys, values, q = tokens(3, seed=1), tokens(3, seed=2), queries(3)
    q[0, 1, 7] = torch.nan
    keys[1, 0, 3], values[2, 1, 5] = torch.nan, torch.nan
    run_append_kv_mx(kernels, keys, values, pool, rows, pdl=False)

    got = run_decode_attention_mx(kernels, q, pool, rows, Workspace("cpu"), pdl=False, chosen=SMALL)

    assert torch.equal(got.isnan().any(-1), got.isnan().all(-1))
    has_nan = got.isnan().any(-1).int().tolist()
    assert has_nan == [[0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("is_paged", [True, False], ids=["extend", "prefill"])
def test_a_nan_or_infinity_reaches_no_query_before_its_token(kernels, is_paged):
    q, keys, values, new = queries(18), tokens(18, seed=1), tokens(18, seed=2), new_tokens([12, 6])
    keys[5, 0, 3], values[7, 1, 5], q[2, 1, 9] = torch.nan, torch.nan, torch.nan
    keys[15, 0, 0], values[16, 1, 0] = torch.inf, -torch.inf  # the largest number, for what attends to it
    pool = MxKvPool.zeros(2, HEADS, 16, "cpu")
    table, lengths = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([12, 6], dtype=torch.int32)
    rows = PagedRows(table, lengths, 16)
    run_append_tokens_mx(kernels, keys, values, pool, rows, new, pdl=False)

    if is_paged:
        got = run_extend_attention_mx(kernels, q, pool, rows, new, pdl=False, chosen=TILE)
    else:
        got = run_prefill_attention_mx(kernels, q, keys, values, new, pdl=False, chosen=TILE)

    is_nan, is_huge = (torch.zeros(18, HEADS * SHARERS, dtype=torch.bool) for _ in range(2))
    is_nan[5:12, :4], is_nan[7:12, 4:], is_nan[2, 1] = True, True, True
    is_huge[15:, :4], is_huge[16:, 4:] = True, True
    assert torch.equal(got.isnan().any(-1) & ~is_huge, is_nan)
    assert torch.equal(got.isnan().all(-1) & ~is_huge, is_nan)
    exact, bound = reference.extend_bounded(q, pool, rows, new, steps=Steps(TILE.block))
    clean = ~is_nan & ~is_huge
    assert is_near(got[clean], exact[clean], bound[clean])


def test_tokens_are_appended_as_the_reference_does_and_nothing_else_is_touched(kernels):
    pool, rows = paged((1, 16, 17, 0, 40))
    rows.table[4, 2] = 1 << 30  # the page of its last token is none of the pool's
    wanted, keys, values = clone(pool), tokens(5, seed=1), tokens(5, seed=2)
    keys[0, 0, 3], keys[1, 1, 5], values[2], values[1, 0, 3] = torch.nan, torch.inf, 0.0, torch.nan
    keys[2, 0, 0], keys[2, 0, 1] = 1e-38, 1e-40  # the second one is subnormal

    run_append_kv_mx(kernels, keys, values, pool, rows, pdl=False)

    reference.append_kv_mx(keys, values, wanted, rows)
    assert same(pool, wanted)


def test_new_tokens_are_appended_as_the_reference_does_and_nothing_else_is_touched(kernels):
    pool, rows = paged((9, 20, 17, 40, 33, 8), max_length=40)
    rows.table[3, 2], rows.lengths[2] = pool.num_pages, 2
    starts = torch.tensor([1, 10, 13, 17, 30, 37, 41], dtype=torch.int32)
    new, before, wanted = NewTokens(starts, 14), clone(pool), clone(pool)
    keys, values = tokens(40, seed=1), tokens(40, seed=2)
    keys[3, 0, 3], values[11, 1, 5], values[4] = torch.nan, torch.inf, 0.0

    run_append_tokens_mx(kernels, keys, values, pool, rows, new, pdl=False)

    reference.append_tokens_mx(keys, values, wanted, rows, new)
    assert same(pool, wanted)
    is_written = (wanted.keys != before.keys).flatten(1).any(1)
    wrong = rows.table[2, :2].tolist() + rows.table[5, :1].tolist()  # shorter than its new tokens; behind the batch
    assert is_written[rows.table[[0, 1, 4], [0, 1, 2]].long()].all()
    assert not is_written[wrong].any()


def test_contiguous_tokens_are_quantised_as_the_reference_does(kernels):
    keys, values = heads_of_tokens(7, 3, seed=1), heads_of_tokens(7, 3, seed=2)
    keys[0, 0, 3], values[6, 2, 5], values[3] = torch.nan, torch.nan, 0.0

    got = run_quantize_tokens_mx(kernels, keys, values, pdl=False)

    for part, right in zip(
        (got.keys, got.key_scales, got.values, got.value_scales), reference.quantize_kv_mx(keys, values), strict=True
    ):
        assert torch.equal(part.nan_to_num(-1), right.transpose(0, 1).nan_to_num(-1))


def test_no_tokens_are_a_result_too(kernels):
    pool, rows = paged((20,))
    none, no_keys, new = torch.empty(0, 8, 128).bfloat16(), torch.empty(0, HEADS, 128).bfloat16(), new_tokens([0])

    run_append_tokens_mx(kernels, no_keys, no_keys, pool, rows, new, pdl=False)

    assert run_extend_attention_mx(kernels, none, pool, rows, new, pdl=False).shape == (0, 8, 128)
    assert run_prefill_attention_mx(kernels, none, no_keys, no_keys, new, pdl=False).shape == (0, 8, 128)
