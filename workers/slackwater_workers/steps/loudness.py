"""How loud a recording is, and the gain that brings it to the target.

Owns BS.1770-4 for one channel, block by block.  The common Python library for it wants the whole recording in
memory and loads SciPy, which takes longer than a worker has to start after each eviction; in the tests it judges.

Rules where the standard is silent: a clip shorter than its block of 0.4 s is measured as one block of
its own length; nothing above -70 LUFS is silence, which has no loudness and gets no gain.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from slackwater_workers.steps.decode import Block

VERSION = "1"

BLOCK_S = 0.4
_BLOCK_HOPS = 4  # a block begins every 0.1 s
_ABSOLUTE_GATE_LUFS = -70.0
_RELATIVE_GATE_LU = -10.0
_OFFSET_LUFS = -0.691
_TAPS = 8192
_FFT_SIZE = 32768

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Gain:
    """What to multiply with, and which bound held it back."""

    db: float
    is_peak_limited: bool = False
    is_gain_limited: bool = False

    @property
    def factor(self) -> float:
        return float(10.0 ** (self.db / 20.0))


class LoudnessMeter:
    """Fed with blocks of one channel (float32 [n]), tells integrated loudness and peak."""

    def __init__(self, sample_rate_hz: int) -> None:
        self._hop = round(sample_rate_hz / 10)
        self._filter = _KWeighting(sample_rate_hz)
        self._hop_energy: list[float] = []
        self._rest = np.zeros(0)
        self._total_energy = 0.0
        self._num_samples = 0
        self.peak = 0.0  # largest magnitude of the samples as they came

    def add(self, block: Block) -> None:
        if not len(block):
            return
        self.peak = max(self.peak, float(np.abs(block).max()))
        self._num_samples += len(block)
        energy = np.square(self._filter.apply(block.astype(np.float64)))
        self._total_energy += float(energy.sum())
        energy = np.concatenate([self._rest, energy])
        whole = len(energy) // self._hop * self._hop
        self._hop_energy.extend(energy[:whole].reshape(-1, self._hop).sum(axis=1).tolist())
        self._rest = energy[whole:]

    def lufs(self) -> float | None:
        """Integrated loudness; None for silence."""
        if len(self._hop_energy) < _BLOCK_HOPS:
            power = self._total_energy / max(self._num_samples, 1)
            return _gated_out(_to_lufs(power))
        hops = np.asarray(self._hop_energy)
        blocks = np.convolve(hops, np.ones(_BLOCK_HOPS), "valid") / (_BLOCK_HOPS * self._hop)
        loud = blocks[blocks > _to_power(_ABSOLUTE_GATE_LUFS)]
        if not len(loud):
            return None
        gate = _to_power(_to_lufs(float(loud.mean())) + _RELATIVE_GATE_LU)
        return _to_lufs(float(loud[loud > gate].mean()))


def gain_for(lufs: float | None, peak: float, target_lufs: float, peak_dbfs: float, max_gain_db: float) -> Gain:
    """The gain that reaches the target loudness without passing the peak.  Silence gets none."""
    if lufs is None or peak <= 0.0:
        return Gain(0.0)
    wanted_db = target_lufs - lufs
    room_db = peak_dbfs - 20.0 * math.log10(peak)
    db = min(wanted_db, room_db, max_gain_db)
    return Gain(db, is_peak_limited=db == room_db < wanted_db, is_gain_limited=db == max_gain_db < wanted_db)


def _gated_out(lufs: float) -> float | None:
    return lufs if lufs > _ABSOLUTE_GATE_LUFS else None


def _to_lufs(power: float) -> float:
    return _OFFSET_LUFS + 10.0 * math.log10(power) if power > 0.0 else -math.inf


def _to_power(lufs: float) -> float:
    return float(10.0 ** ((lufs - _OFFSET_LUFS) / 10.0))


class _KWeighting:
    """The standard's two filters as one convolution, in overlapping FFTs.

    The impulse response is cut after 8192 samples: the slowest pole (38 Hz) is then below -200 dB up to 48 kHz.
    """

    def __init__(self, sample_rate_hz: int) -> None:
        self._spectrum = _spectrum(sample_rate_hz)
        self._history = np.zeros(_TAPS - 1)

    def apply(self, samples: Array) -> Array:
        """Filter the next samples; the state goes on over calls."""
        padded = np.concatenate([self._history, samples])
        step = _FFT_SIZE - (_TAPS - 1)
        out = [
            np.fft.irfft(np.fft.rfft(padded[at : at + _FFT_SIZE], _FFT_SIZE) * self._spectrum, _FFT_SIZE)[_TAPS - 1 :]
            for at in range(0, len(samples), step)
        ]
        self._history = padded[-(_TAPS - 1) :]
        return np.concatenate(out)[: len(samples)]


@functools.cache
def _spectrum(sample_rate_hz: int) -> np.ndarray[tuple[int, ...], np.dtype[np.complex128]]:
    return np.fft.rfft(_impulse_response(sample_rate_hz, _TAPS), _FFT_SIZE)


def _impulse_response(sample_rate_hz: int, taps: int) -> Array:
    # Analogue prototypes of the standard's tables, whose coefficients are given for 48 kHz only.
    shelf = _high_shelf(sample_rate_hz, 1681.974450955533, 0.7071752369554196, 3.999843853973347)
    high_pass = _high_pass(sample_rate_hz, 38.13547087602444, 0.5003270373238773)
    impulse = [1.0] + [0.0] * (taps - 1)
    return np.asarray(_biquad(_biquad(impulse, *shelf), *high_pass))


def _high_shelf(rate: int, corner_hz: float, q: float, gain_db: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    k = math.tan(math.pi * corner_hz / rate)
    high = 10.0 ** (gain_db / 20.0)
    band = high**0.4996667741545416
    a0 = 1.0 + k / q + k * k
    b = ((high + band * k / q + k * k) / a0, 2.0 * (k * k - high) / a0, (high - band * k / q + k * k) / a0)
    return b, (2.0 * (k * k - 1.0) / a0, (1.0 - k / q + k * k) / a0)


def _high_pass(rate: int, corner_hz: float, q: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    k = math.tan(math.pi * corner_hz / rate)
    a0 = 1.0 + k / q + k * k
    # The standard's table gives the numerator 1, -2, 1 and leaves the pass band a little above 0 dB.
    return (1.0, -2.0, 1.0), (2.0 * (k * k - 1.0) / a0, (1.0 - k / q + k * k) / a0)


def _biquad(samples: list[float], b: tuple[float, ...], a: tuple[float, ...]) -> list[float]:
    b0, b1, b2 = b
    a1, a2 = a
    s1 = s2 = 0.0
    out: list[float] = []
    for x in samples:
        y = b0 * x + s1
        s1 = b1 * x - a1 * y + s2
        s2 = b2 * x - a2 * y
        out.append(y)
    return out
