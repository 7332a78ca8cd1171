"""Files that real collections hold: read what can be read, refuse the rest with a reason."""

import io
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from slackwater_workers.core import ItemRefused
from slackwater_workers.steps.decode import DecodeFailed, check_finite, decoders, open_ffmpeg, open_strict
from slackwater_workers.steps.probe import probe
from slackwater_workers.testing import tone, wav_bytes, wav_header

WINDOW_S = 30.0


def encoded(samples: np.ndarray, rate: int, container: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def length(path: Path) -> tuple[str, int]:
    """By which decoder, and how many samples."""
    for decoder in decoders(path)[1]:
        try:
            source = decoder(path, WINDOW_S)
            count = sum(len(block) for block in source.blocks)
        except DecodeFailed:
            continue
        if count:
            return source.decoder, count
    return "none", 0


SPEECHLESS = np.asarray(tone(0.5), dtype=np.float32)
WAV = wav_bytes(tone(0.5))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(WAV, ("libsndfile", 8000), id="plain WAV"),
        pytest.param(WAV[:44] + WAV[44 : 44 + 6000], ("libsndfile", 3000), id="WAV cut in the middle"),
        pytest.param(wav_header(0) + WAV[44:], ("ffmpeg", 8000), id="recorder crashed: size 0 over sound"),
        pytest.param(wav_header(0xFFFFFFFF) + WAV[44:], ("libsndfile", 8000), id="streamed: size 0xFFFFFFFF"),
        pytest.param(encoded(SPEECHLESS, 16_000, "FLAC"), ("libsndfile", 8000), id="FLAC"),
        pytest.param(encoded(SPEECHLESS, 16_000, "MP3"), ("libsndfile", 8000), id="MP3 under a WAV name"),
        pytest.param(encoded(SPEECHLESS, 16_000, "OGG"), ("libsndfile", 8000), id="Ogg"),
        pytest.param(encoded(SPEECHLESS, 16_000, "WAV", "ULAW"), ("libsndfile", 8000), id="mu-law"),
        pytest.param(encoded(SPEECHLESS, 16_000, "RF64"), ("libsndfile", 8000), id="RF64"),
        pytest.param(encoded(SPEECHLESS, 384_000, "WAV", "DOUBLE"), ("libsndfile", 8000), id="384 kHz, 64-bit"),
        pytest.param(
            encoded(np.tile(SPEECHLESS[:, None], 32), 12_345, "WAV"), ("libsndfile", 8000), id="32 channels, 12,345 Hz"
        ),
        pytest.param(wav_bytes([0.5]), ("libsndfile", 1), id="one sample"),
        pytest.param(b"", ("none", 0), id="zero bytes"),
        pytest.param(WAV[:30], ("none", 0), id="30-byte header"),
        pytest.param(b"<html><body>404</body></html>" * 40, ("none", 0), id="HTML"),
        pytest.param(wav_header(0), ("none", 0), id="a header and nothing"),
        pytest.param(WAV[:22] + b"\0\0" + WAV[24:], ("none", 0), id="0 channels"),
    ],
)
def test_content_decides_how_a_file_is_read(tmp_path: Path, content: bytes, expected: tuple[str, int]) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(content)

    assert length(path) == expected


def test_chained_ogg_is_read_to_its_end(tmp_path: Path) -> None:
    one = encoded(SPEECHLESS, 16_000, "OGG")
    path = tmp_path / "x.ogg"
    path.write_bytes(one + one.replace(one[14:18], b"\1\2\3\4"))

    claim = probe(path)

    assert claim.is_chained
    assert decoders(path)[1][0] is open_ffmpeg


def test_damage_inside_a_file_is_told_from_a_foreign_format(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, 48_000).astype(np.float32)
    content = bytearray(encoded(noise, 16_000, "FLAC"))
    content[len(content) // 2 : len(content) // 2 + 50] = b"\x55" * 50
    path = tmp_path / "x.flac"
    path.write_bytes(content)

    with pytest.raises(DecodeFailed) as damaged:
        list(open_strict(path, WINDOW_S).blocks)
    path.write_bytes(b"nothing that is known")
    with pytest.raises(DecodeFailed) as foreign:
        open_strict(path, WINDOW_S)

    assert damaged.value.is_damage
    assert not foreign.value.is_damage


def test_video_without_sound_and_reasons_without_paths(tmp_path: Path) -> None:
    path = tmp_path / "secret-place.mp3"
    path.write_bytes(b"<html>")

    with pytest.raises(DecodeFailed) as caught:
        open_ffmpeg(path, WINDOW_S)

    assert "secret-place" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "is_cut"),
    [
        pytest.param(WAV, False, id="whole WAV"),
        pytest.param(WAV[:5000], True, id="cut WAV"),
        pytest.param(wav_header(0xFFFFFFFF) + WAV[44:], False, id="streamed WAV claims nothing"),
        pytest.param(encoded(SPEECHLESS, 16_000, "OGG"), False, id="whole Ogg"),
        pytest.param(encoded(SPEECHLESS, 16_000, "OGG")[:-100], True, id="cut Ogg"),
        pytest.param(b"RIFF\0\0\0\0WAVEdata", False, id="header that ends inside a chunk"),
        pytest.param(b"OggS", True, id="four bytes of Ogg"),
    ],
)
def test_a_cut_file_is_known_by_its_header(tmp_path: Path, content: bytes, is_cut: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)

    assert probe(path).is_cut == is_cut


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e29])
def test_a_sample_that_no_recording_has_is_refused_with_its_place(value: float) -> None:
    block = np.zeros((100, 2), np.float32)
    block[7, 1] = value

    with pytest.raises(ItemRefused, match="sample 1007 of channel 1"):
        check_finite(block, 1000)


def test_blocks_are_bounded_whatever_the_rate_and_the_channels(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    frames = 300_000
    with soundfile.SoundFile(path, "w", 384_000, 32, "PCM_16", format="WAV") as file:
        for _ in range(3):
            file.write(np.zeros((frames // 3, 32), np.float32))

    sizes = [block.nbytes for block in open_strict(path, WINDOW_S).blocks]

    assert max(sizes) <= 32 << 20
    assert sum(sizes) == frames * 32 * 4


def test_a_header_is_built_as_the_format_says() -> None:
    assert struct.unpack_from("<HHIIHH", wav_header(8, 8_000, 2, 32), 20) == (3, 2, 8_000, 64_000, 8, 32)
