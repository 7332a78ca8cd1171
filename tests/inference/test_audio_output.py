"""What a client gets: every format decodes to what went in, however the samples came."""

import io
import subprocess
import sys
from itertools import pairwise
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pyloudnorm
import pytest
import soundfile

from slackwater_inference.audio.output import SAMPLE_RATES_HZ, AudioOutput, OutputSettings
from slackwater_inference.core import BadRequest

RATE_HZ = 44_100
FRAME = 2_048
Samples = npt.NDArray[np.float32]


def sine(seconds: float, hz: float = 440.0, amplitude: float = 0.5, rate_hz: int = RATE_HZ) -> Samples:
    return (amplitude * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(np.float32)


def speech_like(seconds: float, level: float = 0.3) -> Samples:
    """Harmonics that swell and pause as syllables do."""
    t = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    tone = sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 12))
    return (level * tone / 2 * np.clip(np.sin(2 * np.pi * 3 * t) + 0.4, 0, 1)).astype(np.float32)


def made(settings: OutputSettings, samples: Samples, sizes: tuple[int, ...] = (4 * FRAME,)) -> list[bytes]:
    """What each feed and the finish gave; the chunks' sizes take turns."""
    output = AudioOutput(settings, RATE_HZ)
    pieces, start, turn = [], 0, 0
    while start < len(samples):
        size = sizes[turn % len(sizes)]
        pieces.append(output.feed(samples[start : start + size].tobytes()))
        start, turn = start + size, turn + 1
    return [*pieces, output.finish()]


def decoded(data: bytes) -> tuple[Samples, int]:
    """fp32 samples and rate, as FFmpeg reads the file."""
    with av.open(io.BytesIO(data)) as container:
        stream: Any = container.streams.audio[0]
        to_float = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [out.to_ndarray()[0] for frame in container.decode(audio=0) for out in to_float.resample(frame)]
        return np.concatenate(frames), stream.rate


def peak_hz(samples: Samples, rate_hz: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate_hz / len(samples))


def rms(samples: Samples) -> float:
    return float(np.sqrt(np.mean(np.square(samples))))


EVERY_FORMAT = [
    *[OutputSettings("wav", rate) for rate in SAMPLE_RATES_HZ["wav"]],
    *[OutputSettings("mp3", rate, mp3_bitrate=kbps) for rate in (32_000, 44_100) for kbps in (64, 128, 192)],
    *[OutputSettings("opus", None, opus_bitrate=bps) for bps in (-1000, 24_000, 32_000, 48_000, 64_000)],
]


def name_of(settings: OutputSettings) -> str:
    return f"{settings.format}-{settings.rate_hz}-{settings.mp3_bitrate}-{settings.opus_bitrate}"


@pytest.mark.parametrize("settings", EVERY_FORMAT, ids=name_of)
def test_every_format_decodes_to_the_sine_that_went_in(settings: OutputSettings) -> None:
    samples, rate_hz = decoded(b"".join(made(settings, sine(1.0))))

    padding_s = {"wav": 0.001, "mp3": 0.11, "opus": 0.001}[settings.format]  # mp3 has no place for its exact length
    middle = samples[rate_hz // 5 : rate_hz * 4 // 5]
    assert rate_hz == settings.rate_hz
    assert 1.0 - 0.001 <= len(samples) / rate_hz <= 1.0 + padding_s
    assert peak_hz(middle, rate_hz) == pytest.approx(440.0, abs=2.0)
    lossy = 0.08  # LAME turns down by 5 %
    assert rms(middle) == pytest.approx(0.5 / np.sqrt(2), rel=0.01 if settings.format == "wav" else lossy)
    assert np.max(np.abs(np.diff(middle))) < 1.3 * 0.5 * 2 * np.pi * 440 / rate_hz  # a click would be steeper


@pytest.mark.parametrize("settings", EVERY_FORMAT, ids=name_of)
def test_sound_leaves_with_the_first_chunk_of_four_frames(settings: OutputSettings) -> None:
    first = made(settings, sine(4 * FRAME / RATE_HZ))[0]

    samples, rate_hz = decoded(first)
    assert len(samples) / rate_hz > 0.1


SPLITS = [
    pytest.param(OutputSettings("pcm"), id="plain"),
    pytest.param(OutputSettings("pcm", 16_000), id="resampled"),
    pytest.param(OutputSettings("pcm", speed=1.3), id="faster"),
    pytest.param(OutputSettings("pcm", speed=0.5), id="slower"),
    pytest.param(OutputSettings("pcm", volume_db=12.0), id="limited"),
    pytest.param(OutputSettings("pcm", normalize_loudness=True), id="loudness"),
    pytest.param(OutputSettings("mp3", 32_000, speed=0.8, volume_db=3.0, normalize_loudness=True), id="all-mp3"),
]


@pytest.mark.parametrize("settings", SPLITS)
def test_the_cut_of_the_samples_changes_no_byte(settings: OutputSettings) -> None:
    samples = speech_like(1.2)

    whole = b"".join(made(settings, samples, (len(samples),)))

    assert b"".join(made(settings, samples, (8_192,))) == whole
    assert b"".join(made(settings, samples, (1, 700, 63, 0, 2_048))) == whole


def test_the_cut_of_the_samples_changes_no_sound_in_opus() -> None:
    samples = speech_like(1.2)

    whole, _ = decoded(b"".join(made(OutputSettings("opus"), samples, (len(samples),))))
    cut, _ = decoded(b"".join(made(OutputSettings("opus"), samples, (700, 63, 0, 4_096))))

    assert np.array_equal(whole, cut)


def test_ogg_opus_is_read_by_another_library_too() -> None:
    data = b"".join(made(OutputSettings("opus"), sine(12.0)))

    samples, rate_hz = soundfile.read(io.BytesIO(data))

    assert (len(samples), rate_hz) == (12 * 48_000, 48_000)


def test_wav_says_that_its_length_is_unknown_and_has_whole_samples() -> None:
    first, second, last = made(OutputSettings("wav"), sine(8_192 / RATE_HZ), (4_096,))

    assert first[:12] == b"RIFF" + (4_294_967_076).to_bytes(4, "little") + b"WAVE"
    assert first[36:44] == b"data" + (4_294_967_040).to_bytes(4, "little")
    assert (len(first), len(second), len(last)) == (44 + 8_192 - 88, 8_192, 88)  # a millisecond waits


def test_plain_samples_are_rounded_and_what_is_too_loud_does_not_wrap() -> None:
    values = np.array([0.0, 1.0, -1.0, 1.5, -7.0, 0.5 / 32_767], np.float32)

    data = b"".join(made(OutputSettings("pcm"), np.concatenate([values, sine(0.001)])))

    assert np.frombuffer(data, "<i2")[:6].tolist() == [0, 32_767, -32_767, 32_767, -32_767, 0]


@pytest.mark.parametrize("rate_hz", [8_000, 44_100])
def test_a_sound_that_is_cut_at_full_level_ends_without_a_click(rate_hz: int) -> None:
    loud = np.full(RATE_HZ // 10, 0.8, np.float32)

    data = b"".join(made(OutputSettings("pcm", sample_rate_hz=rate_hz), loud, (4_096, 0, 7)))

    samples = np.frombuffer(data, "<i2") / 32_768
    assert len(samples) == rate_hz // 10
    last_ms = samples[-rate_hz // 1_000 :]
    assert samples[-rate_hz // 50] > 0.75
    assert last_ms[-1] == 0.0
    assert np.abs(np.diff(last_ms)).max() < 1.2 * 0.8 / (len(last_ms) - 1)


@pytest.mark.parametrize("format", ["wav", "pcm", "mp3", "opus"])
def test_a_stream_without_samples_is_a_whole_file_without_sound(format: Any) -> None:
    output = AudioOutput(OutputSettings(format, speed=1.5, normalize_loudness=True), RATE_HZ)

    data = output.feed(b"") + output.finish()

    assert len(data) == {"wav": 44, "pcm": 0, "mp3": 0, "opus": len(data)}[format]
    assert format != "opus" or data.startswith(b"OggS")


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.25, 2.0])
def test_speed_changes_the_length_and_not_the_pitch(speed: float) -> None:
    samples, rate_hz = decoded(b"".join(made(OutputSettings("wav", speed=speed), sine(2.0))))

    assert len(samples) / rate_hz == pytest.approx(2.0 / speed, rel=0.02)
    assert peak_hz(samples, rate_hz) == pytest.approx(440.0, abs=3.0)


@pytest.mark.parametrize("volume_db", [-20.0, -6.0, 3.0])
def test_volume_is_a_factor_while_there_is_room(volume_db: float) -> None:
    samples, _ = decoded(b"".join(made(OutputSettings("wav", volume_db=volume_db), sine(0.5))))

    assert rms(samples) == pytest.approx(10 ** (volume_db / 20) * 0.5 / np.sqrt(2), rel=0.01)


def test_too_much_volume_is_turned_down_and_not_cut_off() -> None:
    samples, rate_hz = decoded(b"".join(made(OutputSettings("wav", volume_db=20.0), sine(1.0))))

    settled = samples[rate_hz // 10 :]
    spectrum = np.abs(np.fft.rfft(settled * np.hanning(len(settled))))
    fundamental = round(440 * len(settled) / rate_hz)
    third_harmonic = spectrum[3 * fundamental - 5 : 3 * fundamental + 6].max() / spectrum.max()
    assert 0.9 < np.max(np.abs(samples)) < 0.98
    assert third_harmonic < 0.05  # a sine cut off at +14 dB has 0.27


@pytest.mark.parametrize("level", [0.15, 0.3, 1.0])
def test_loudness_comes_to_the_target(level: float) -> None:
    samples, rate_hz = decoded(b"".join(made(OutputSettings("wav", normalize_loudness=True), speech_like(8.0, level))))

    settled = samples[4 * rate_hz :].astype(np.float64)
    assert pyloudnorm.Meter(rate_hz).integrated_loudness(settled) == pytest.approx(-18.0, abs=1.5)


def test_loudness_moves_slowly_and_leaves_silence_alone() -> None:
    quiet = speech_like(3.0, 0.05)
    hiss = np.random.default_rng(0).normal(0, 1e-4, 2 * RATE_HZ).astype(np.float32)

    output = AudioOutput(OutputSettings("pcm", normalize_loudness=True), RATE_HZ)
    data = output.feed(np.concatenate([hiss, quiet, hiss]).tobytes()) + output.finish()

    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32_767
    before, after = samples[: 2 * RATE_HZ], samples[-2 * RATE_HZ :]
    assert rms(before) == pytest.approx(1e-4, rel=0.05)
    assert rms(after) < 1e-4 * 10 ** (12.1 / 20)
    syllables = [rms(samples[round(s * RATE_HZ) : round((s + 1 / 3) * RATE_HZ)]) for s in np.arange(2.0, 5.0, 1 / 3)]
    assert all(20 * np.log10(later / earlier) < 8.0 / 3 + 0.2 for earlier, later in pairwise(syllables))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "flac"}, "format must be one of wav, pcm, mp3, opus, got flac"),
        ({"format": "mp3", "sample_rate_hz": 8_000}, "sample_rate of mp3 must be one of 32000, 44100 Hz, got 8000"),
        ({"format": "opus", "sample_rate_hz": 44_100}, "sample_rate of opus must be one of 48000 Hz"),
        ({"mp3_bitrate": 100}, "mp3_bitrate must be one of 64, 128, 192 kbit/s, got 100"),
        ({"opus_bitrate": 32}, "opus_bitrate must be one of"),
        ({"speed": 2.1}, "speed must be between 0.5 and 2, got 2.1"),
        ({"speed": float("nan")}, "speed must be between"),
        ({"volume_db": -20.5}, "volume must be between -20 and 20 dB, got -20.5"),
    ],
)
def test_refuses_what_the_api_does_not_list(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        OutputSettings(**settings)


def test_refuses_half_a_sample_and_sound_after_the_end() -> None:
    output = AudioOutput(OutputSettings("pcm"), RATE_HZ)
    with pytest.raises(ValueError, match="whole fp32 values"):
        output.feed(b"\0" * 6)

    output.finish()

    assert output.finish() == b""
    with pytest.raises(ValueError, match="after finish"):
        output.feed(b"\0" * 4)


def test_wav_at_the_engines_rate_loads_no_codec_library() -> None:
    program = (
        "import sys; from slackwater_inference.audio.output import AudioOutput, OutputSettings\n"
        "output = AudioOutput(OutputSettings('wav'), 44100); output.feed(bytes(8)); output.finish()\n"
        "sys.exit(any(name in sys.modules for name in ('av', 'soxr', 'torch')))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
