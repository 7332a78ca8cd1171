"""Loudness agrees with the common library, block by block as in one piece."""

import numpy as np
import pytest

from slackwater_workers.steps.loudness import LoudnessMeter, gain_for


def measured(samples: np.ndarray, rate: int, block: int = 1 << 30) -> float | None:
    meter = LoudnessMeter(rate)
    for start in range(0, len(samples), block):
        meter.add(samples[start : start + block].astype(np.float32))
    return meter.lufs()


def babble(rate: int, duration_s: float, seed: int = 3) -> np.ndarray:
    """Noise whose level goes up and down, so that both gates matter."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(round(rate * duration_s)) / rate
    envelope = np.clip(np.sin(2 * np.pi * 0.3 * time_s), 0.001, None)
    return rng.normal(0, 0.1, len(time_s)) * envelope


@pytest.mark.parametrize("rate", [24_000, 44_100])
def test_integrated_loudness_agrees_with_the_judge(rate: int) -> None:
    pyloudnorm = pytest.importorskip("pyloudnorm", reason="the judge is not installed")
    samples = babble(rate, 8.0)

    found = measured(samples, rate)

    # 0.1 LU is what the standard allows a meter; the judge rounds its blocks a little differently.
    assert found == pytest.approx(pyloudnorm.Meter(rate, filter_class="DeMan").integrated_loudness(samples), abs=0.1)


def test_a_full_scale_sine_has_the_loudness_that_the_standard_names() -> None:
    rate = 48_000
    sine = np.sin(2 * np.pi * 997 * np.arange(rate * 4) / rate)

    assert measured(sine, rate) == pytest.approx(-3.01, abs=0.05)


@pytest.mark.parametrize("block", [1, 777, 24_000])
def test_the_size_of_the_blocks_does_not_matter(block: int) -> None:
    samples = babble(24_000, 0.1 if block == 1 else 3.0)

    assert measured(samples, 24_000, block) == pytest.approx(measured(samples, 24_000), abs=1e-6)


def test_a_clip_shorter_than_a_block_is_measured_over_its_own_length() -> None:
    rate = 24_000
    sine = 0.1 * np.sin(2 * np.pi * 1000 * np.arange(rate) / rate)

    short = measured(sine[: rate // 4], rate)

    assert short == pytest.approx(measured(sine, rate), abs=0.2)


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(np.zeros(24_000), id="digital silence"),
        pytest.param(np.zeros(10), id="a few zeros"),
        pytest.param(np.full(24_000, 1e-6), id="below the gate"),
        pytest.param(np.zeros(0), id="nothing"),
    ],
)
def test_silence_has_no_loudness_and_gets_no_gain(samples: np.ndarray) -> None:
    lufs = measured(samples, 24_000)

    assert lufs is None
    assert gain_for(lufs, 0.0, -23.0, -1.0, 30.0).db == 0.0


@pytest.mark.parametrize(
    ("lufs", "peak", "db", "bound"),
    [
        pytest.param(-30.0, 0.1, 7.0, "none", id="raised to the target"),
        pytest.param(-10.0, 1.0, -13.0, "none", id="lowered to the target"),
        pytest.param(-30.0, 0.8, 0.938, "peak", id="held by the peak"),
        pytest.param(-60.0, 0.001, 30.0, "gain", id="held by the gain"),
    ],
)
def test_the_gain_reaches_the_target_unless_a_bound_holds_it(lufs: float, peak: float, db: float, bound: str) -> None:
    gain = gain_for(lufs, peak, -23.0, -1.0, 30.0)

    assert gain.db == pytest.approx(db, abs=0.001)
    assert (gain.is_peak_limited, gain.is_gain_limited) == (bound == "peak", bound == "gain")
