import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.kv_cache import KvCache, piece_keys

PIECE = 4  # positions, in two blocks of two


def prompt(*values):
    return tuple((value, value + 1, value + 2) for value in values)


def keys(length=12, namespace="n", base=0):
    return piece_keys(namespace, prompt(*range(base, base + length)), PIECE)


def put(cache, wanted):
    """Compute the pieces `wanted` and hold them, as a sequence does."""
    for key in wanted:
        cache.publish(key, cache.allocate(2))


def test_a_key_stands_for_a_whole_piece_and_everything_before_it():
    short, long = keys(11), keys(12)

    assert len(short) == 2
    assert long[:2] == short
    assert len(set(long)) == 3


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(piece_keys("m", prompt(0, 1, 2, 3, 4, 5, 6, 7), PIECE), id="another namespace"),
        pytest.param(piece_keys("n", prompt(9, 1, 2, 3, 4, 5, 6, 7), PIECE), id="another first column"),
        pytest.param(
            piece_keys("n", (*prompt(0, 1, 2), (3, 4, 99), *prompt(4, 5, 6, 7)), PIECE), id="another residual code"
        ),
        pytest.param(piece_keys("n", tuple((i, i + 1) for i in range(8)), PIECE), id="fewer codebooks"),
    ],
)
def test_whatever_differs_in_a_piece_changes_its_key_and_all_later_ones(other):
    assert set(keys(8)).isdisjoint(other)


def test_a_prompt_that_comes_again_finds_its_pieces_while_held_and_afterwards():
    cache = KvCache(8, 2)
    put(cache, keys())

    assert cache.num_hits(keys()) == 3
    cache.unshare(keys())
    assert cache.num_hits(keys(8, base=0)) == 2
    assert cache.num_hits(keys(base=1)) == 0
    assert (cache.num_used, cache.num_cached, cache.num_available) == (0, 6, 8)


def test_who_shares_a_piece_gets_its_blocks_and_keeps_them_from_eviction():
    cache = KvCache(6, 2)
    put(cache, keys())
    cache.unshare(keys())

    shared = cache.share(keys()[:2])
    cache.allocate(2)

    assert len(shared) == 4
    assert cache.num_hits(keys()) == 2  # the third piece went
    with pytest.raises(ValueError, match="wanted 1 KV blocks, 0 of 6 are available"):
        cache.allocate(1)


def test_the_piece_that_was_let_go_of_first_is_evicted_first_and_a_leaf_before_its_parent():
    cache = KvCache(12, 2)
    old, new = keys(base=0), keys(base=50)
    put(cache, old)
    put(cache, new)
    cache.unshare(old)
    cache.unshare(new)

    cache.allocate(2)
    assert (cache.num_hits(old), cache.num_hits(new)) == (2, 3)
    cache.unshare(cache.share(old[:1]) and old[:1])  # now the first old piece was used last
    cache.allocate(4)

    assert (cache.num_hits(old), cache.num_hits(new)) == (1, 2)


def test_a_piece_made_twice_is_kept_once():
    cache = KvCache(8, 2)
    put(cache, keys(4))

    mine = cache.allocate(2)
    used = cache.publish(keys(4)[0], mine)

    assert used == [0, 1]
    assert cache.num_available == 6
    cache.check([(keys(4), []), (keys(4), [])])


def test_counts_the_holders_of_a_piece():
    cache = KvCache(8, 2)
    put(cache, keys(8))
    cache.share(keys(8)[:1])

    assert [cache.num_holders(key) for key in keys(8)] == [2, 1]


def test_refuses_a_block_that_is_freed_twice_or_is_shared():
    cache = KvCache(4, 2)
    blocks = cache.allocate(2)
    cache.free(blocks)

    with pytest.raises(ValueError, match="freed but not held"):
        cache.free(blocks)
    put(cache, keys(4))
    with pytest.raises(ValueError, match="freed but not held"):
        cache.free([0])


def test_check_finds_a_block_with_two_holders_and_a_forgotten_one():
    cache = KvCache(4, 2)
    blocks = cache.allocate(2)

    with pytest.raises(AssertionError, match="held twice"):
        cache.check([((), blocks), ((), blocks)])
    with pytest.raises(AssertionError, match="differ"):
        cache.check([((), blocks[:1])])
    cache.publish(keys(4)[0], blocks)
    with pytest.raises(AssertionError, match="miscounted"):
        cache.check([])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_block_is_lost_doubled_or_evicted_from_its_holder_whatever_is_asked(data):
    cache = KvCache(data.draw(st.integers(2, 20)), 2)
    holders = []  # (keys, own blocks)

    for _ in range(data.draw(st.integers(1, 30))):
        if holders and data.draw(st.booleans()):
            held, own = holders.pop(data.draw(st.integers(0, len(holders) - 1)))
            cache.free(own)
            cache.unshare(held)
        else:
            wanted = keys(data.draw(st.integers(0, 16)), base=data.draw(st.sampled_from([0, 4, 100])))
            hits = cache.num_hits(wanted)
            cache.share(wanted[:hits])
            held = list(wanted[:hits])
            own = cache.allocate(min(2, cache.num_available))
            for key in wanted[hits:]:
                if cache.num_available < 2:
                    break
                cache.publish(key, cache.allocate(2))
                held.append(key)
            holders.append((held, own))
        cache.check(holders)
        assert all(cache.num_hits(held) == len(held) for held, _ in holders)

    for held, own in holders:
        cache.free(own)
        cache.unshare(held)
    assert cache.num_available == cache.num_blocks
