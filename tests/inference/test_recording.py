"""Recordings: every common file is read, nothing bad gets in, and each refusal says why."""

import contextlib
import io
import math
import struct
import tracemalloc
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from slackwater_inference.audio.recording import check_reference, prepare_reference, read_recording
from slackwater_inference.core import BadRequest

RATE_HZ = 44_100
Samples = npt.NDArray[np.float32]


def speech_like(seconds: float, rate_hz: int = RATE_HZ, level: float = 0.2) -> Samples:
    """Three swelling syllables a second on a tone of 220 Hz."""
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    return (level * np.sin(2 * np.pi * 220 * t) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t))).astype(np.float32)


def silence(seconds: float) -> Samples:
    return np.zeros(round(seconds * RATE_HZ), np.float32)


def encoded(container: str, codec: str, samples: Samples, rate_hz: int, channels: int = 1) -> bytes:
    """`samples` on every channel, as a file."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate_hz)
        stream.layout = "mono" if channels == 1 else "stereo"
        frame = av.AudioFrame.from_ndarray(np.tile(samples, (channels, 1)), "fltp", stream.layout.name)
        frame.sample_rate = rate_hz
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def film() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        output.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        output.mux(stream.encode(None))
    return file.getvalue()


def wav_of(samples: bytes, rate_hz: int, format_tag: int = 1, bits: int = 16, channels: int = 1) -> bytes:
    block = channels * bits // 8
    header = struct.pack("<4sIHHIIHH", b"fmt ", 16, format_tag, channels, rate_hz, rate_hz * block, block, bits)
    body = b"WAVE" + header + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def test_a_file_in_an_unknown_encoding_is_refused() -> None:
    data = wav_of(b"\0" * 4_000, RATE_HZ, format_tag=0x7777)

    with pytest.raises(BadRequest, match="encoding that is not known"):
        read_recording(data, RATE_HZ)


@pytest.mark.parametrize("channels", [7, 8, 9, 64])
def test_many_channels_are_averaged(channels: int) -> None:
    # Eight once ended the process.
    first_only = np.zeros((RATE_HZ, channels), "<i2")
    first_only[:, 0] = 16_384

    samples = read_recording(wav_of(first_only.tobytes(), RATE_HZ, channels=channels), RATE_HZ)

    assert len(samples) == RATE_HZ
    assert np.allclose(samples[1_000:-1_000], 0.5 / channels, atol=1e-4)


@pytest.mark.parametrize(
    ("container", "codec", "rate_hz", "channels"),
    [
        ("wav", "pcm_s16le", 44_100, 1),
        ("wav", "pcm_f32le", 16_000, 2),
        ("wav", "pcm_s24le", 96_000, 2),
        ("flac", "flac", 48_000, 2),
        ("mp3", "libmp3lame", 44_100, 2),
        ("ogg", "libopus", 48_000, 1),
        ("ipod", "aac", 44_100, 2),
        ("adts", "aac", 22_050, 1),
        ("webm", "libopus", 48_000, 2),
    ],
)
def test_reads_common_files_as_mono_at_the_wanted_rate(container: str, codec: str, rate_hz: int, channels: int) -> None:
    data = encoded(container, codec, speech_like(1.5, rate_hz), rate_hz, channels)

    samples = read_recording(data, RATE_HZ)

    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) / RATE_HZ == pytest.approx(1.5, abs=0.08)  # lossy codecs pad
    spectrum = np.abs(np.fft.rfft(samples))
    assert np.argmax(spectrum) * RATE_HZ / len(samples) == pytest.approx(220, abs=2)
    assert np.sqrt(np.mean(np.square(samples))) == pytest.approx(0.2 * math.sqrt(0.5 * (0.36 + 0.08)), rel=0.05)


def test_reads_ogg_vorbis() -> None:
    file = io.BytesIO()
    soundfile.write(file, speech_like(1.5, 32_000), 32_000, format="OGG", subtype="VORBIS")

    assert len(read_recording(file.getvalue(), 16_000)) == pytest.approx(24_000, abs=100)


FLAC = encoded("flac", "flac", speech_like(1.0), RATE_HZ)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", r"empty \(0 bytes\)", id="empty"),
        pytest.param(b"hello, this is no audio at all" * 20, "cannot be read as audio", id="text"),
        pytest.param(FLAC[:30], "cannot be read as audio|no sample", id="header-only"),
        pytest.param(b"\0" * 5_000, "cannot be read as audio", id="zeros"),
        pytest.param(film(), "no sound in it, only video", id="film"),
        pytest.param(wav_of(b"", 44_100), "no sample of sound|cannot be read", id="no-samples"),
        pytest.param(wav_of(b"\0" * 400, 100), "rate must be 4000 to 384000 Hz, got 100", id="rate"),
        pytest.param(wav_of(struct.pack("<f", math.nan) * 9_000, 44_100, 3, 32), "no numbers", id="nan"),
        pytest.param(b"\0" * (32 * 1024 * 1024 + 1), "at most 33554432 are read", id="too-large"),
        pytest.param(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n#EXT-X-ENDLIST\n", "cannot be read", id="playlist"),
        pytest.param(b"ffconcat version 1.0\nfile /etc/hosts\n", "cannot be read", id="concat"),
    ],
)
def test_refuses_what_is_no_recording_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        read_recording(data, RATE_HZ)

    assert "\n" not in str(caught.value)


def test_a_small_file_that_unpacks_to_far_more_is_refused_early_and_in_little_memory() -> None:
    bomb = encoded("flac", "flac", np.zeros(8_000 * 900, np.float32), 8_000)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="longer than 20 s"):
            read_recording(bomb, RATE_HZ, max_duration_s=20.0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(bomb) < 170_000
    assert peak_bytes < 20 * RATE_HZ * 4 * 4


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_is_refused_or_read_but_never_anything_else(seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(FLAC if seed % 2 else encoded("ogg", "libopus", speech_like(1.0, 48_000), 48_000))
    for at in random.integers(0, len(data), 40):
        data[at] = random.integers(0, 256)

    with contextlib.suppress(BadRequest):
        assert np.isfinite(read_recording(bytes(data), RATE_HZ)).all()


TEXT = "A plain sentence that takes about three seconds."


def test_a_good_recording_and_its_transcript_pass() -> None:
    check_reference(speech_like(3.0), RATE_HZ, TEXT)
    check_reference(speech_like(3.0), RATE_HZ, None)
    check_reference(speech_like(3.0), RATE_HZ, "这句话大约需要三秒钟。")
    check_reference(speech_like(3.0), RATE_HZ, "これはおよそ三秒かかります")


CLIPPED = np.clip(speech_like(3.0, level=2.0), -1.0, 1.0)


@pytest.mark.parametrize(
    ("samples", "text", "message"),
    [
        pytest.param(speech_like(0.5), TEXT, r"0\.50 s long, at least 1 s", id="short"),
        pytest.param(speech_like(91.0), TEXT, "91 s long, at most 90 s", id="long"),
        pytest.param(speech_like(3.0, level=0.005), TEXT, "dBFS, at least -45 dBFS", id="quiet"),
        pytest.param(silence(3.0), TEXT, "is silence, at least", id="silence"),
        pytest.param(CLIPPED, TEXT, r"% of the recording is clipped, at most 0\.5%", id="clipped"),
        pytest.param(
            np.concatenate([speech_like(1.0), silence(4.0)]), TEXT, "80% of the recording is sil", id="pauses"
        ),
        pytest.param(speech_like(3.0) + np.float32(0.1), TEXT, r"DC offset of \+0\.100, at most 0\.05", id="offset"),
        pytest.param(speech_like(3.0), "", "no word in it; write down", id="no-transcript"),
        pytest.param(speech_like(3.0), " \n...", "no word in it; write down", id="blank-transcript"),
        pytest.param(speech_like(3.0), TEXT * 10, r"has 3\.0 s of speech, such a text takes", id="too-much-text"),
        pytest.param(speech_like(30.0), "Hello.", r"has 30\.0 s of speech, such a text takes", id="too-little-text"),
    ],
)
def test_refuses_with_measure_bound_and_remedy(samples: Samples, text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        check_reference(samples, RATE_HZ, text)

    assert "\n" not in str(caught.value)


def test_preparing_cuts_silence_at_both_ends_and_nothing_between() -> None:
    talk = np.concatenate([speech_like(1.0), silence(0.5), speech_like(1.0)])

    prepared = prepare_reference(np.concatenate([silence(2.0), talk, silence(3.0)]), RATE_HZ)

    assert len(prepared) / RATE_HZ == pytest.approx(2.5 + 0.2, abs=0.05)
    assert np.max(np.abs(prepared[: RATE_HZ // 20])) == 0.0


def test_preparing_leaves_silence_for_the_check_to_refuse() -> None:
    assert len(prepare_reference(silence(2.0), RATE_HZ)) == 2 * RATE_HZ
