"""How soon after one tick the next one may begin."""

import pytest

from slackwater_operator.operate.lead import LONGEST_REST_S, earliest_s

SHORTEST_S = 0.1


@pytest.mark.parametrize(
    ("took_s", "early", "rest_s"),
    [
        pytest.param(0.01, 0, 0.09, id="a short one: no more than ten in a second"),
        pytest.param(0.08, 0, 0.08, id="a longer one: others get as much time as it took"),
        pytest.param(0.08, 1, 0.08, id="the first that was wanted early: the next may be what it waits for"),
        pytest.param(0.08, 3, 0.24, id="many in a row: a burst, of which each one takes in more"),
        pytest.param(2.0, 0, LONGEST_REST_S, id="a very long one: but not for ever"),
        pytest.param(0.08, 99, LONGEST_REST_S, id="a long burst: but not for ever"),
    ],
)
def test_after_a_tick_everything_else_has_its_turn(took_s: float, early: int, rest_s: float) -> None:
    began_s, ended_s = 100.0, 100.0 + took_s

    assert earliest_s(began_s, ended_s, SHORTEST_S, early) == pytest.approx(ended_s + rest_s)


def test_what_comes_when_that_time_is_over_is_answered_at_once() -> None:
    poked_s = 100.4

    assert earliest_s(100.0, 100.08, SHORTEST_S, 1) < poked_s
