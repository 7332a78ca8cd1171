import pytest

from slackwater_inference.guard import MAX_PERIOD, LoopDetector


def first_loop(frames, num_frames=16):
    """Index of the frame at which a loop is found; None if it never is."""
    detector = LoopDetector(num_frames)
    return next((i for i, codes in enumerate(frames) if detector.is_loop(codes)), None)


def frames(*names):
    return [(name, 7, 7) for name in names]


def test_finds_one_frame_repeated_when_it_has_lasted_long_enough():
    assert first_loop(frames(1, 2, *[3] * 15)) is None
    assert first_loop(frames(1, 2, *[3] * 16)) == 17


@pytest.mark.parametrize("period", range(1, MAX_PERIOD + 1))
def test_finds_a_pattern_of_any_period(period):
    pattern = list(range(period)) * 16

    assert first_loop(frames(90, 91, *pattern)) == 2 + 15


def test_a_longer_pattern_is_no_loop():
    assert first_loop(frames(*list(range(MAX_PERIOD + 1)) * 10)) is None


def test_one_code_that_differs_breaks_a_loop():
    nearly = [(1, 2, 3)] * 15 + [(1, 2, 4)]

    assert first_loop(nearly * 4) is None


def test_speech_that_only_comes_back_to_a_sound_is_no_loop():
    assert first_loop(frames(*[1, 1, 1, 2, 1, 1, 3, 1, 1, 1, 1, 4] * 5)) is None


def test_refuses_a_limit_at_which_a_pattern_would_not_have_come_twice():
    with pytest.raises(ValueError, match="at least 16 frames, got 15"):
        LoopDetector(15)
