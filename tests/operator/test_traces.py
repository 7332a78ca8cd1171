"""The trace that ships with the package, and slices of it."""

from itertools import pairwise

import pytest

from slackwater_operator.traces import TraceRequest, load_conversation, overlay, slice_trace

FEW = tuple(TraceRequest(float(t_s), 10, 20 + t_s) for t_s in range(10))


def test_the_whole_conversation_trace_is_there_in_time_order():
    requests = load_conversation()

    assert len(requests) == 19_366
    assert requests[0] == TraceRequest(0.0, 374, 44)
    assert requests[-1] == TraceRequest(3501.722, 197, 183)
    assert all(one.t_s <= other.t_s for one, other in pairwise(requests))
    assert all(request.generated_tokens > 0 for request in requests)


def test_a_token_is_a_frame_of_speech():
    assert TraceRequest(0.0, 1, 1000).audio_s == pytest.approx(46.44, abs=0.001)


def test_a_slice_begins_at_zero_and_ends_before_its_end():
    assert [request.t_s for request in slice_trace(FEW, 3, 4)] == [0.0, 1.0, 2.0, 3.0]


def test_speed_divides_the_times_and_leaves_the_lengths():
    cut = slice_trace(FEW, 2, 4, speed=4)

    assert [request.t_s for request in cut] == [0.0, 0.25, 0.5, 0.75]
    assert [request.generated_tokens for request in cut] == [22, 23, 24, 25]


def test_thinning_keeps_each_so_many_th_request_of_the_slice():
    assert [request.generated_tokens for request in slice_trace(FEW, 1, 99, keep_every=4)] == [21, 25, 29]


def test_a_slice_beyond_the_end_is_empty():
    assert slice_trace(FEW, 100, 10) == ()


@pytest.mark.parametrize("values", [{"speed": 0}, {"speed": -1}, {"keep_every": 0}])
def test_a_slice_that_makes_no_sense_is_refused_by_name(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        slice_trace(FEW, 0, 1, **values)


def test_an_overlay_keeps_every_request_in_time_order():
    requests = (TraceRequest(0.0, 1, 10), TraceRequest(5.0, 2, 20))

    laid = overlay(requests, 2, apart_s=3.0)

    assert [(request.t_s, request.generated_tokens) for request in laid] == [(0.0, 10), (3.0, 10), (5.0, 20), (8.0, 20)]
