"""The order of sums and the launches: every block once, and M changes the launch alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater_kernels.plan import (
    BF16_EXTEND,
    FP8_EXTEND,
    SumTree,
    Take,
    append_tokens_each,
    flat_parts,
    gated_launch,
    launch,
    splits,
    sum_tree,
)

SIZES = st.tuples(st.integers(1, 30_000), st.integers(1, 200).map(lambda blocks: 128 * blocks))


@given(SIZES)
def test_leaves_and_groups_cover_every_block_once(size):
    n, k = size

    tree = sum_tree(n, k)

    leaves = [range(i * tree.leaf, min((i + 1) * tree.leaf, tree.blocks)) for i in range(tree.leaves)]
    assert [block for leaf in leaves for block in leaf] == list(range(k // 128))
    assert all(leaves)
    assert (tree.groups - 1) * tree.group < tree.leaves <= tree.groups * tree.group


@given(SIZES, st.integers(1, 100_000))
def test_a_launch_fits_the_tree_and_the_tensor_core(size, m):
    n, k = size
    tree = sum_tree(n, k)

    for chosen in (launch(n, k, m), gated_launch(m)):
        assert chosen.rows in (64, 128)
        assert chosen.tokens in (16, 32, 64, 128)  # 16 is the least that FP8 has on sm_90
        assert not (chosen.tma and chosen.tokens < 32)  # a box has at least 128 bytes
    # All weights of a leaf lie in shared memory at once.
    assert launch(n, k, m).take is not Take.LEAF or tree.leaf * 16 <= 128


@given(SIZES)
def test_partial_sums_stay_few_where_rows_are_many(size):
    n, k = size

    assert splits(sum_tree(n, k), launch(n, k, 257).take) == 1


@pytest.mark.parametrize(
    ("n", "k", "tree", "takes"),
    [
        pytest.param(6144, 2560, SumTree(20, 5, 2), ("leaf", "group"), id="wqkv"),
        pytest.param(2560, 4096, SumTree(32, 5, 2), ("leaf", "group"), id="wo"),
        pytest.param(19456, 2560, SumTree(20, 20, 1), ("all", "all"), id="gate_up"),
        pytest.param(2560, 9728, SumTree(76, 6, 3), ("leaf", "group"), id="down"),
    ],
)
def test_the_layers_of_the_model_have_the_launches_that_were_measured(n, k, tree, takes):
    assert sum_tree(n, k) == tree
    assert (launch(n, k, 1).take.value, launch(n, k, 64).take.value) == takes


@given(st.integers(1, 64), st.integers(1, 16))
def test_a_part_holds_whole_queries_and_fills_the_tensor_core(num_kv_heads, sharers):
    for chosen in FP8_EXTEND + BF16_EXTEND:
        assert chosen.rows * 4 == chosen.warps * 64  # each four warps have 64 rows of the product
        assert 1 <= chosen.queries(sharers) * sharers <= chosen.rows
        assert (chosen.queries(sharers) + 1) * sharers > chosen.rows
    tokens = append_tokens_each(num_kv_heads)
    assert tokens & (tokens - 1) == 0
    assert tokens == 1 or tokens * num_kv_heads <= 64


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 30), st.integers(0, 30), st.integers(1, 40)
)
def test_slots_are_enough_for_the_parts_of_any_rows_and_few_are_empty(counts, ahead, behind, part):
    slots = flat_parts(ahead + sum(counts) + behind, len(counts), part)

    parts = sum(-(-count // part) for count in (ahead, *counts, behind))
    assert parts <= slots
    assert slots <= parts + len(counts) + 2
