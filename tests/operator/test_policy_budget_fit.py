"""Whether starts that may go to several flavors fit together."""

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from slackwater_operator.policy.budget import _crowded

FLAVORS = "abcde"
families = st.frozensets(st.sampled_from(FLAVORS), min_size=1)


def first_that_is_crowded(wanted, places):
    """By Hall's theorem, tried with every set of flavors."""
    for size in range(1, len(FLAVORS) + 1):
        for some in map(frozenset, combinations(FLAVORS, size)):
            if sum(count for family, count in wanted.items() if family <= some) > sum(
                places.get(one, 0) for one in some
            ):
                return some
    return None


@given(
    st.dictionaries(families, st.integers(1, 6), max_size=8),
    st.dictionaries(st.sampled_from(FLAVORS), st.integers(0, 6)),
)
def test_starts_fit_exactly_if_no_set_of_flavors_is_asked_for_more_than_it_has(wanted, places):
    crowded = _crowded(wanted, places)

    if first_that_is_crowded(wanted, places) is None:
        assert crowded is None
    else:
        assert crowded is not None
        asked = sum(count for family, count in wanted.items() if family <= crowded)
        assert asked > sum(places.get(flavor, 0) for flavor in crowded)


def test_a_job_moves_over_for_one_that_can_go_nowhere_else():
    wanted = Counter({frozenset("ab"): 3, frozenset("a"): 2})

    assert _crowded(wanted, {"a": 2, "b": 3}) is None
    assert _crowded(wanted, {"a": 1, "b": 9}) == frozenset("a")


def test_hundreds_of_combinations_of_flavors_are_judged_as_well():
    flavors = [f"pool-{number}/gpu" for number in range(32)]
    wanted = Counter(
        {frozenset(flavors[(number + k * k) % 32] for k in range(number % 7 + 1)): 6 for number in range(600)}
    )
    most = sum(wanted.values())

    assert _crowded(wanted, dict.fromkeys(flavors, most)) is None
    assert _crowded(wanted, dict.fromkeys(flavors, most // 32 - 1)) is not None
