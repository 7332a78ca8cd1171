"""Segments: the same in windows as in one piece; silence has none."""

import itertools

import numpy as np
import pytest

from slackwater_workers.steps.vad import RATE_HZ, Segment, SpeechFinder, SpeechModel, cut_long, join


class EnergyModel:
    """Calls everything loud speech: a model whose answer is known."""

    def detect(self, samples: np.ndarray) -> list[Segment]:
        loud = np.concatenate([[0], (np.abs(samples) > 0.5).astype(int), [0]])
        starts, ends = np.flatnonzero(np.diff(loud) == 1), np.flatnonzero(np.diff(loud) == -1)
        return [(start / RATE_HZ, end / RATE_HZ) for start, end in zip(starts, ends, strict=True)]


def speech_at(segments: list[Segment], duration_s: float) -> np.ndarray:
    samples = np.zeros(round(duration_s * RATE_HZ), np.float32)
    for start_s, end_s in segments:
        samples[round(start_s * RATE_HZ) : round(end_s * RATE_HZ)] = 1.0
    return samples


@pytest.mark.parametrize("block", [1_600, 16_000, 100_000])
def test_windows_give_what_one_piece_gives(block: int) -> None:
    # The second segment lies across a seam of the 5 s windows, the third ends on one, the fourth spans three.
    wanted = [(0.5, 1.5), (4.2, 6.0), (8.0, 10.0), (12.0, 21.0)]
    samples = speech_at(wanted, 23.0)
    finder = SpeechFinder(EnergyModel(), window_s=5.0, min_segment_s=0.2, max_segment_s=30.0)  # type: ignore[arg-type]

    for start in range(0, len(samples), block):
        finder.add(samples[start : start + block])

    assert np.array(finder.segments()) == pytest.approx(np.array(wanted))


def test_short_segments_are_dropped_and_long_ones_cut_into_equal_parts() -> None:
    samples = speech_at([(0.0, 0.1), (1.0, 11.0)], 12.0)
    finder = SpeechFinder(EnergyModel(), window_s=30.0, min_segment_s=0.2, max_segment_s=4.0)  # type: ignore[arg-type]

    finder.add(samples)

    edges = [1.0, 1 + 10 / 3, 1 + 20 / 3, 11.0]
    assert np.array(finder.segments()) == pytest.approx(np.array(list(itertools.pairwise(edges))))


def test_what_meets_is_joined_and_what_does_not_is_not() -> None:
    assert join([(0.0, 1.0), (1.02, 2.0), (2.5, 3.0)], 0.021) == [(0.0, 2.0), (2.5, 3.0)]
    assert join([], 0.021) == []


def test_a_segment_of_just_the_longest_length_stays_whole() -> None:
    assert cut_long((1.0, 31.0), 30.0) == [(1.0, 31.0)]


@pytest.mark.parametrize("num_samples", [0, 1, 399, 400, 1_599, 1_600, 16_000])
def test_the_real_model_takes_any_length_of_silence_for_no_speech(num_samples: int) -> None:
    model = SpeechModel(threshold=0.4, min_silence_s=0.2, min_segment_s=0.2)

    assert model.detect(np.zeros(num_samples, np.float32)) == []
