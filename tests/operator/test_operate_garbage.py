"""Which garbage is found, and when."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from slackwater_operator.operate.garbage import AGAIN_S, Collector, collect_all, spared


class Knot:
    """Goes by a collection alone."""

    def __init__(self) -> None:
        self.me = self


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    gc.collect()
    with spared(Collector(clock, long_s=0.0)):
        yield clock


def tied() -> "tuple[list[Knot], weakref.ref[Knot]]":
    held = [Knot()]
    return held, weakref.ref(held[0])


def test_what_survived_a_long_collection_is_not_looked_at_again_for_an_hour(clock: Clock) -> None:
    held, knot = tied()
    gc.collect()
    held.clear()

    gc.collect()
    assert knot() is not None

    clock.now_s = AGAIN_S
    gc.collect()
    assert knot() is None


def test_garbage_that_came_after_is_found_by_the_next_collection(clock: Clock) -> None:
    gc.collect()
    held, knot = tied()
    held.clear()

    gc.collect()

    assert knot() is None


def test_what_is_spared_can_be_collected_at_once(clock: Clock) -> None:
    held, knot = tied()
    gc.collect()
    held.clear()

    collect_all()

    assert knot() is None


def test_a_short_collection_spares_nothing() -> None:
    with spared(Collector(Clock(), long_s=1.0)):
        gc.collect()

        assert gc.get_freeze_count() == 0


def test_nothing_is_spared_after_the_end() -> None:
    with spared(Collector(Clock(), long_s=0.0)):
        gc.collect()
        assert gc.get_freeze_count() > 0

    assert gc.get_freeze_count() == 0
