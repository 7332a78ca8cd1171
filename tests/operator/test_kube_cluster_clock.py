"""Moments of the API server on a loop's clock that is not the server's."""

import pytest

from slackwater_operator.cluster.kube.clock import Clock


@pytest.mark.parametrize("behind_s", [pytest.param(1.0, id="a second"), pytest.param(3600.0, id="an hour")])
def test_what_was_stamped_by_a_clock_ahead_of_ours_happened_just_now_at_the_latest(behind_s: float) -> None:
    clock = Clock(lambda: 1_000_000.0 - behind_s)
    clock.sync(50.0)

    just_now_s, earlier_s = clock.moment(1_000_000.0), clock.moment(1_000_000.0 - behind_s - 20.0)

    assert just_now_s == 50.0
    assert earlier_s == 30.0


def test_it_moves_on_with_the_loop() -> None:
    clock = Clock(lambda: 1_000_000.0)
    clock.sync(50.0)
    before_s = clock.moment(1_000_010.0)

    clock.sync(50.2)

    assert before_s == 50.0
    assert clock.moment(1_000_010.0) == 50.2
