import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater_inference.kv_cache import BlockAllocator


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_no_block_is_lost_or_held_twice_whatever_is_asked(num_blocks, wishes):
    allocator = BlockAllocator(num_blocks)
    held = []

    for takes, size in wishes:
        if takes and size <= allocator.num_free:
            held.append(allocator.allocate(size))
        elif held:
            allocator.free(held.pop(size % len(held)))
        allocator.check(held)

    assert allocator.num_free + sum(map(len, held)) == num_blocks


def test_refuses_more_blocks_than_are_free_and_takes_none():
    allocator = BlockAllocator(4)
    allocator.allocate(3)

    with pytest.raises(ValueError, match="wanted 2 KV blocks, 1 of 4 are free"):
        allocator.allocate(2)

    assert allocator.num_free == 1


def test_refuses_a_block_that_is_freed_twice():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.free(blocks)

    with pytest.raises(ValueError, match="freed but not held"):
        allocator.free(blocks)


def test_check_finds_a_block_with_two_holders_and_a_forgotten_one():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)

    with pytest.raises(AssertionError, match="held twice"):
        allocator.check([blocks, blocks])
    with pytest.raises(AssertionError, match="differ"):
        allocator.check([blocks[:1]])
