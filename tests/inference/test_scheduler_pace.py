"""The scheduler against the listeners' clock: streams that are paced."""

import pytest

from slackwater_inference.batch import Pace
from slackwater_inference.testing.scheduler import request, scheduler, step


def _num_steps(s, now_s):
    count = 0
    while s.plan(now_s):
        step(s, now_s)
        count += 1
    return count


def test_a_paced_stream_runs_freely_through_its_burst_and_then_at_its_rate():
    s = scheduler(pace=10.0, burst=3)
    s.add(request("a", frames=50))
    made = 0
    at_s = []

    for tick_ms in range(0, 1000, 20):
        while s.plan(tick_ms / 1000):
            step(s, tick_ms / 1000)
            made += 1
            at_s.append(tick_ms / 1000)

    assert at_s[:3] == [0.0, 0.0, 0.0]
    assert made == 3 + 9


def test_paced_streams_are_due_together_whenever_they_began():
    s = scheduler(slots=3, pace=10.0, burst=1)
    for i, at_s in enumerate((0.01, 0.03, 0.07)):
        s.add(request(f"r{i}", frames=9))
        step(s, at_s)

    waiting = s.plan(0.08)
    due = s.plan(0.101)

    assert not waiting
    assert waiting.wake_at_s == pytest.approx(0.1)
    assert len(due.decode) == 3


def test_a_pause_of_the_stream_is_not_caught_up_with_but_begins_a_new_burst():
    s = scheduler(pace=10.0, burst=3)
    pace = Pace()
    s.add(request("r.0", frames=4), pace)
    at_s = [t / 100 for t in range(0, 100, 2) for _ in range(_num_steps(s, t / 100))]
    assert at_s == [0.0, 0.0, 0.0, 0.1]

    s.add(request("r.1", frames=20), pace, goes_on=True)
    at_s = [t / 100 for t in range(500, 560, 2) for _ in range(_num_steps(s, t / 100))]

    assert at_s == [5.0, 5.0, 5.0, 5.1, 5.2, 5.3, 5.4, 5.5]


def test_the_next_part_goes_on_at_the_pace_of_its_stream():
    s = scheduler(pace=10.0, burst=3)
    pace = Pace()
    s.add(request("r.0", frames=3), pace)
    assert _num_steps(s, 0.0) == 3

    s.add(request("r.1", frames=20), pace, goes_on=True)

    assert _num_steps(s, 0.0) == 1  # its first frame comes with its prompt
    assert [_num_steps(s, t) for t in (0.05, 0.1, 0.2, 0.3)] == [0, 0, 1, 1]
