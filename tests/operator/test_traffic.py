"""What the samples of a gateway say about demand."""

import math
import random
from collections import deque

import pytest

from slackwater_operator.core import TrafficSample
from slackwater_operator.traffic import History, Ring, Window

SMALL = Window(panic_s=6, stable_s=10, down_s=20, stale_after_s=5, day_s=100)


def played(demands, window=SMALL, *, from_s=0.0, every_s=1.0, history=None) -> History:
    history = history or History(window)
    for number, demand in enumerate(demands):
        assert history.append(TrafficSample(from_s + number * every_s, demand, 0, number))
    return history


def test_without_a_sample_the_load_is_stale_and_of_infinite_age():
    load = History(SMALL).load(5.0, 2.0)

    assert load.stale
    assert load.age_s == math.inf
    assert load.window_max_slots == math.inf
    assert (load.now_slots, load.slope_slots_per_s, load.rise_slots) == (0.0, 0.0, 0.0)


def test_no_requests_is_a_value_and_not_missing_data():
    load = played([0] * 30).load(29.5, 2.0)

    assert not load.stale
    assert load.window_max_slots == 0.0
    assert load.arrival_rps == 1.0


def test_demand_is_what_is_in_flight_and_what_is_queued():
    history = History(SMALL)
    history.append(TrafficSample(0.0, in_flight=7, queued=5, arrivals_total=12))

    assert history.load(0.0, 2.0).now_slots == 12.0


def test_an_old_sample_is_stale_but_is_still_told():
    history = played([3, 3, 8])

    assert not history.load(7.0, 2.0).stale
    assert history.load(7.1, 2.0).stale
    assert history.load(7.1, 2.0).now_slots == 8.0
    assert history.load(7.1, 2.0).age_s == pytest.approx(5.1)


def test_a_sample_that_is_not_later_than_the_newest_is_ignored():
    history = played([3, 4])

    assert not history.append(TrafficSample(1.0, 99, 0, 99))
    assert not history.append(TrafficSample(0.5, 99, 0, 99))
    assert history.load(1.0, 2.0).now_slots == 4.0


def test_means_look_back_over_their_own_windows():
    load = played([0] * 5 + [10] * 4 + [20] * 6).load(14.0, 2.0)

    assert load.panic_slots == 20.0
    assert load.stable_slots == pytest.approx(16.0)  # 4 x 10 and 6 x 20


def test_of_several_samples_in_a_bucket_the_highest_counts():
    load = played([1, 9, 1, 1, 1, 1], every_s=0.5).load(2.5, 2.0)

    assert load.panic_slots == pytest.approx((9 + 1 + 1) / 3)


def test_a_second_without_a_sample_holds_the_last_demand():
    load = played([4, 4, 8], every_s=2.0).load(4.0, 2.0)

    assert load.panic_slots == pytest.approx((4 * 4 + 8) / 5)


@pytest.mark.parametrize(
    ("demands", "slope"),
    [
        pytest.param([5] * 12, 0.0, id="level"),
        pytest.param(list(range(0, 36, 3)), 3.0, id="ramp"),
        pytest.param(list(range(36, 0, -3)), -3.0, id="falling"),
        pytest.param([0, 0, 0, 0, 0, 50], 0.0, id="a step that is over is no trend"),
        pytest.param([10, 0, 10, 0, 10, 0], 0.0, id="noise"),
    ],
)
def test_slope_is_a_trend_and_not_noise(demands, slope):
    history = History(Window(rise_quantile=0.01))  # next to no rise counts as usual, so all of the slope is told
    played([demands[0]] * 20 + demands, history=history)

    assert history.load(len(demands) + 19.0, 2.0).slope_slots_per_s == pytest.approx(
        slope, abs=0.8 if slope == 0 else 1e-6
    )


def test_too_few_samples_have_no_slope():
    assert played([0, 5, 10]).load(2.0, 2.0).slope_slots_per_s == 0.0


def test_of_a_slope_only_what_the_headroom_does_not_cover_is_told():
    usual = [n % 10 for n in range(60)]  # climbs one a second, again and again

    load = played([*usual, *range(10, 40, 5)]).load(65.0, 3.0)

    assert load.rise_slots == 15.0  # the steep end is more than a hundredth of so short a day
    assert load.slope_slots_per_s == pytest.approx(0.0, abs=0.3)


def test_rises_count_over_the_lead_time_from_each_second():
    demands = [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0]

    one = played(demands, Window(rise_quantile=1.0)).load(11.0, 1.0)
    half = played(demands, Window(rise_quantile=0.5)).load(11.0, 3.0)

    assert one.rise_slots == 4.0
    assert half.rise_slots == 0.0  # three of nine starts see the rise


def test_a_new_lead_time_counts_the_day_anew():
    history = played(list(range(40)), Window(rise_quantile=1.0))

    assert [history.load(39.0, lead_s).rise_slots for lead_s in (2.0, 8.0, 7.5, 2.0)] == [2.0, 8.0, 8.0, 2.0]


def test_rises_older_than_a_day_are_forgotten():
    history = played([0, 50] + [0] * 40, SMALL)
    assert history.load(41.0, 1.0).rise_slots > 0

    played([0] * 110, history=history, from_s=42.0)

    assert history.load(151.0, 1.0).rise_slots == 0.0


def test_the_window_maximum_is_unknown_until_the_samples_cover_the_window():
    history = played([9] + [2] * 19)
    assert history.load(19.0, 2.0).window_max_slots == math.inf

    played([2], history=history, from_s=20.0)
    assert history.load(20.0, 2.0).window_max_slots == 9.0

    played([2], history=history, from_s=21.0)
    assert history.load(21.0, 2.0).window_max_slots == 2.0


def test_the_window_maximum_is_what_growing_would_have_asked_for():
    window = Window(panic_s=6, stable_s=10, down_s=20, rise_quantile=0.5)
    history = played([0] * 40 + [6, 12, 18, 24, 30, 36] + [0] * 3, window)

    load = history.load(48.0, 5.0)

    assert load.rise_slots == 0.0
    assert load.window_max_slots == pytest.approx(36 + 5 * 6, abs=1.0)


def test_when_the_samples_break_off_every_window_begins_anew():
    history = played([9] * 30)

    played([1], history=history, from_s=36.0)
    load = history.load(36.0, 2.0)

    assert load.panic_slots == load.stable_slots == 1.0
    assert load.window_max_slots == math.inf
    assert load.rise_slots == 0.0


def test_a_rise_over_a_time_that_nobody_saw_is_not_counted():
    history = played([0] * 10, Window(rise_quantile=1.0))

    played([40] * 10, history=history, from_s=100.0)

    assert history.load(109.0, 3.0).rise_slots == 0.0
    assert history.load(109.0, 9.0).rise_slots == 0.0  # nor when the day is counted again


def test_arrivals_go_on_when_the_gateway_restarts():
    history = History(SMALL)
    for t_s, total in enumerate([100, 102, 104, 106, 2, 4, 6]):
        history.append(TrafficSample(float(t_s), 1, 0, total))

    assert history.load(6.0, 2.0).arrival_rps == pytest.approx(2.0)


def test_first_audio_passes_through():
    history = History(SMALL)
    history.append(TrafficSample(0.0, 1, 0, 1, first_audio_p95_s=0.4))

    assert history.load(0.0, 2.0).first_audio_p95_s == 0.4


def test_memory_is_bounded_by_the_windows():
    rng = random.Random(1)
    history = played([rng.randrange(50) for _ in range(1000)])
    history.load(999.0, 4.0)

    kept = [history._day, history._slopes, history._arrivals, history._rises._kept, history._rises._ahead]
    assert max(map(len, kept)) <= 100
    assert len(history._rises._counts) <= 50


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(-1, 23), id="small"),
        pytest.param([*range(9), 100_000, *range(9), 2_000_000_000], id="some-that-need-more-bytes"),
        pytest.param([], id="none"),
    ],
)
def test_a_ring_holds_the_newest_numbers_as_a_bounded_deque_does(numbers):
    ring, expected = Ring(7), deque(maxlen=7)

    for number in numbers:
        oldest = expected[0] if len(expected) == 7 else None
        assert ring.append(number) == oldest
        expected.append(number)
        assert [ring.last(count) for count in range(9)] == [[*expected][max(0, len(expected) - n) :] for n in range(9)]

    assert [*ring] == [*expected]
    assert len(ring) == len(expected)


def test_the_samples_of_a_day_take_half_a_megabyte_at_most():
    history = History(Window(day_s=86_400.0))

    for second in range(100_000):
        history.append(TrafficSample(float(second), second % 300, 0, second))

    rings = (history._day, history._rises._kept)
    assert [len(ring) for ring in rings] == [86_400, 86_400]
    assert sum(ring.size_bytes for ring in rings) <= 500_000


@pytest.mark.parametrize(
    "values",
    [
        {"panic_s": 0},
        {"down_s": -1},
        {"day_s": math.inf},
        {"bucket_s": math.nan},
        {"rise_quantile": 0},
        {"rise_quantile": 1.1},
    ],
)
def test_a_window_that_cannot_work_is_refused_by_name(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Window(**values)


def test_a_negative_lead_time_is_refused():
    with pytest.raises(ValueError, match="lead_s"):
        History(SMALL).load(0.0, -1.0)
