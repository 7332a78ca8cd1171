"""The order of sums and the launches: every block once, and M changes the launch alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater_kernels.plan import SumTree, Take, gated_launch, launch, splits, sum_tree

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
