"""Tempo, loudness, volume, rate, limiter and fade: signal processing on a stream of samples.

Owns the state that each of them keeps over the chunks, so that any cut of a stream gives the same sound.  Owns neither
the order (output.py) nor the bytes.  All work on fp32 mono.
"""

import math
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from av import AudioFrame

Samples = npt.NDArray[np.float32]

_EMPTY: Samples = np.empty(0, np.float32)
# atempo gives a frame out when the next one is complete, so short frames mean little delay.
_TEMPO_BLOCK = 512
# The limiter works in blocks of 1.5 ms at 44.1 kHz: so fast falls its gain, and so far it looks ahead.
_LIMIT_BLOCK = 64
_LIMIT_CEILING = 0.977  # -0.2 dB, so that an encoder's own overshoot seldom clips
_LIMIT_RELEASE_S = 0.08
_FADE_OUT_S = 0.001  # no steeper than a loud voice itself, and short, since it is held back
# Streaming loudness.  -18 LUFS is what speech in apps and podcasts is mastered to for one (mono) channel.
TARGET_LUFS = -18.0
_MAX_GAIN_DB = 12.0
_SLEW_DB_PER_S = 8.0  # slower than a syllable, so that it cannot pump
_LOUDNESS_BLOCK_S = 0.025
_WINDOW_BLOCKS = 16  # 400 ms, the momentary window of ITU-R BS.1770
_ABSOLUTE_GATE_LUFS = -55.0  # quieter is silence, which tells nothing about the speech
_RELATIVE_GATE_DB = -10.0
_TRUSTED_BLOCKS = 40  # after a second of speech its loudness is known; before, only part of the gain is applied


class Stage(Protocol):
    """One step of the chain.  What `finish` gives is the tail; it is called once."""

    def feed(self, samples: Samples) -> Samples:
        """What can be given after `samples` came."""

    def finish(self) -> Samples:
        """What was held back."""


class Tempo:
    """Speech made faster or slower at the same pitch, by FFmpeg's `atempo` (overlapping similar waveforms)."""

    def __init__(self, speed: float, rate_hz: int) -> None:
        from fractions import Fraction

        import av
        from av.filter import Graph

        graph = Graph()
        self._source = graph.add_abuffer(
            sample_rate=rate_hz, format="fltp", layout="mono", time_base=Fraction(1, rate_hz)
        )
        tempo = graph.add("atempo", f"{speed:.6f}")
        self._sink = graph.add("abuffersink")
        self._source.link_to(tempo)
        tempo.link_to(self._sink)
        graph.configure()
        self._graph = graph
        self._new_frame = av.AudioFrame.from_ndarray
        self._nothing_yet = (av.error.BlockingIOError, av.error.EOFError)
        self._rate_hz = rate_hz
        self._num_in = 0
        self._held = _EMPTY

    def feed(self, samples: Samples) -> Samples:
        """Give out what the filter has ready; it holds some 60 ms."""
        self._held = np.concatenate([self._held, samples])
        whole = len(self._held) // _TEMPO_BLOCK * _TEMPO_BLOCK
        for start in range(0, whole, _TEMPO_BLOCK):
            self._push(self._held[start : start + _TEMPO_BLOCK])
        self._held = self._held[whole:]
        return self._pull()

    def finish(self) -> Samples:
        """The filter's own tail."""
        if len(self._held):
            self._push(self._held)
        if self._num_in:
            self._source.push(None)
        return self._pull()

    def _push(self, samples: Samples) -> None:
        frame = self._new_frame(samples[np.newaxis], format="fltp", layout="mono")  # [1, n]
        frame.sample_rate = self._rate_hz
        frame.pts = self._num_in
        self._num_in += len(samples)
        self._source.push(frame)

    def _pull(self) -> Samples:
        pieces = [_EMPTY]
        while True:
            try:
                frame = cast("AudioFrame", self._sink.pull())
            except self._nothing_yet:
                return np.concatenate(pieces)
            pieces.append(frame.to_ndarray()[0])


class Gain:
    """A fixed factor.  volume_db: 6 doubles the amplitude."""

    def __init__(self, volume_db: float) -> None:
        self._factor = np.float32(10.0 ** (volume_db / 20.0))

    def feed(self, samples: Samples) -> Samples:
        """As many samples as came."""
        return samples * self._factor

    def finish(self) -> Samples:
        """Nothing: no sample is held back."""
        return _EMPTY


class Resampler:
    """Another rate, by soxr's stream resampler; it holds some 20 ms back."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        import soxr

        self._stream = soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32", quality="HQ")

    def feed(self, samples: Samples) -> Samples:
        """What the filter has ready."""
        return np.asarray(self._stream.resample_chunk(samples), np.float32)

    def finish(self) -> Samples:
        """The filter's tail, so that the length is right."""
        return np.asarray(self._stream.resample_chunk(_EMPTY, last=True), np.float32)


class _Blockwise:
    """Cuts a stream into blocks of `size`, whatever the chunks; what is left over waits for the next chunk."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = _EMPTY

    def feed(self, samples: Samples) -> npt.NDArray[np.float32]:
        """[n, size]."""
        joined = np.concatenate([self._held, samples])
        whole = len(joined) // self._size * self._size
        self._held = joined[whole:]
        return joined[:whole].reshape(-1, self._size)

    def rest(self) -> Samples:
        """The samples that make no whole block."""
        rest, self._held = self._held, _EMPTY
        return rest


class Loudness:
    """Streaming loudness normalisation towards `TARGET_LUFS`.

    Causal: what counts is the gated loudness (ITU-R BS.1770) of what was heard up to now.  The first chunk is hardly
    changed, after a second of speech the whole gain is wanted; it moves at most 8 dB/s, stays within +-12 dB, and
    stands still in silence.
    """

    def __init__(self, rate_hz: int) -> None:
        size = round(_LOUDNESS_BLOCK_S * rate_hz)
        self._blocks = _Blockwise(size)
        self._weights = _k_weighting_power(np.fft.rfftfreq(size, 1.0 / rate_hz)) * (2.0 / size**2)
        self._ramp = (np.arange(1, size + 1) / size).astype(np.float32)
        self._recent: list[float] = []  # power of the last blocks, oldest first
        self._block_s = size / rate_hz
        self._sum = 0.0  # power of the windows that passed the gate, and how many they were
        self._count = 0
        self._gain_db = 0.0

    def feed(self, samples: Samples) -> Samples:
        """Whole blocks of 25 ms with their gain."""
        return np.concatenate([_EMPTY, *(self._adjust(block) for block in self._blocks.feed(samples))])

    def finish(self) -> Samples:
        """The last, shorter block, with the gain as it stands."""
        return self._blocks.rest() * np.float32(_factor(self._gain_db))

    def _adjust(self, block: Samples) -> Samples:
        spectrum = np.fft.rfft(block)
        self._recent = [*self._recent, float(np.sum(self._weights * np.abs(spectrum) ** 2))][-_WINDOW_BLOCKS:]
        momentary = sum(self._recent) / len(self._recent)
        gate = max(_power(_ABSOLUTE_GATE_LUFS), self._sum / max(self._count, 1) * _power_ratio(_RELATIVE_GATE_DB))
        old_db = self._gain_db
        if momentary > gate:
            self._sum += momentary
            self._count += 1
            trust = min(1.0, self._count / _TRUSTED_BLOCKS)
            wanted_db = trust * (TARGET_LUFS - _lufs(self._sum / self._count))
            step_db = _SLEW_DB_PER_S * self._block_s
            moved_db = min(max(wanted_db, old_db - step_db), old_db + step_db)
            self._gain_db = min(max(moved_db, -_MAX_GAIN_DB), _MAX_GAIN_DB)
        old, new = np.float32(_factor(old_db)), np.float32(_factor(self._gain_db))
        return block * (old + (new - old) * self._ramp)


class Limiter:
    """Keeps the peaks under full scale by turning the gain down shortly, one block ahead of each peak."""

    def __init__(self, rate_hz: int) -> None:
        self._blocks = _Blockwise(_LIMIT_BLOCK)
        self._ramp = (np.arange(1, _LIMIT_BLOCK + 1) / _LIMIT_BLOCK).astype(np.float32)
        self._release = math.exp(-_LIMIT_BLOCK / rate_hz / _LIMIT_RELEASE_S)
        self._waiting: Samples | None = None  # the block before, whose end gain is not known yet
        self._allowed = 1.0  # by the waiting block
        self._gain = 1.0  # where the waiting block begins

    def feed(self, samples: Samples) -> Samples:
        """What is one block older than the newest whole block."""
        return np.concatenate([_EMPTY, *(self._advance(block) for block in self._blocks.feed(samples))])

    def finish(self) -> Samples:
        """The block that waited, and the rest after it."""
        rest = self._blocks.rest()
        padded = np.pad(rest, (0, _LIMIT_BLOCK - len(rest)))
        pieces = [self._advance(padded), self._advance(np.zeros(_LIMIT_BLOCK, np.float32))]
        out = np.concatenate(pieces)
        return out[: len(out) - (_LIMIT_BLOCK - len(rest))]

    def _advance(self, block: Samples) -> Samples:
        """Give the waiting block its gain and put `block` in its place."""
        peak = float(np.max(np.abs(block)))
        allowed = min(1.0, _LIMIT_CEILING / peak) if peak else 1.0
        released = 1.0 - (1.0 - self._gain) * self._release
        # Linear from one end to the other, neither of which is more than what the block between them allows.
        end = min(self._allowed, allowed, released)
        before, self._waiting = self._waiting, block
        start, self._gain, self._allowed = self._gain, end, allowed
        if before is None:
            return _EMPTY
        if start == end == 1.0:
            return before
        return before * (np.float32(start) + np.float32(end - start) * self._ramp)


class FadeOut:
    """Takes the last millisecond to zero: speech that is cut at its frame budget must not end in a click."""

    def __init__(self, rate_hz: int) -> None:
        self._size = round(_FADE_OUT_S * rate_hz)
        self._held = _EMPTY

    def feed(self, samples: Samples) -> Samples:
        """All but the last millisecond."""
        joined = np.concatenate([self._held, samples])
        cut = max(0, len(joined) - self._size)
        self._held = joined[cut:]
        return joined[:cut]

    def finish(self) -> Samples:
        """The last millisecond, or all of a shorter sound, down to zero."""
        num = len(self._held)
        return self._held * np.linspace(1.0, 0.0, num, dtype=np.float32)


def _k_weighting_power(frequency_hz: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """|H|^2 of BS.1770's two filters, from their 48 kHz coefficients, at any frequency up to 24 kHz."""
    z = np.exp(-2j * np.pi * np.minimum(frequency_hz, 24_000.0) / 48_000.0)
    shelf = (1.53512485958697 - 2.69169618940638 * z + 1.19839281085285 * z**2) / (
        1.0 - 1.69065929318241 * z + 0.73248077421585 * z**2
    )
    high_pass = (1.0 - 2.0 * z + z**2) / (1.0 - 1.99004745483398 * z + 0.99007225036621 * z**2)
    power: npt.NDArray[np.float64] = np.abs(shelf * high_pass) ** 2
    return power


def _factor(gain_db: float) -> float:
    return float(10.0 ** (gain_db / 20.0))


def _power(lufs: float) -> float:
    return _power_ratio(lufs + 0.691)


def _power_ratio(difference_db: float) -> float:
    return float(10.0 ** (difference_db / 10.0))


def _lufs(power: float) -> float:
    return 10.0 * math.log10(power) - 0.691
