"""Whole recordings through all steps."""

import io
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from slackwater_workers.config import JobConfig
from slackwater_workers.core import Cleaned, Item, ItemRefused, Stopped, TemporaryError
from slackwater_workers.ledger.index import hash_files, walk
from slackwater_workers.steps.cleaner import SpeechCleaner
from slackwater_workers.steps.loudness import LoudnessMeter
from slackwater_workers.testing import tone, wav_bytes, wav_header


def go_on() -> None:
    return


@pytest.fixture(scope="module")
def cleaner() -> SpeechCleaner:
    return SpeechCleaner(JobConfig(window_s=1.0))


def item_of(path: Path) -> Item:
    (listed,) = [entry for entry in walk(path.parent, None, go_on) if entry.path == path.name]
    row = hash_files(path.parent, [listed], go_on)["files"][0]
    return Item(row["sha256"], row["path"], row["size_bytes"], row["mtime_ns"])


def cleaned(cleaner: SpeechCleaner, tmp_path: Path, content: bytes) -> tuple[dict[str, object], np.ndarray]:
    path = tmp_path / "x.wav"
    path.write_bytes(content)
    result: Cleaned = cleaner.clean(tmp_path, item_of(path), go_on)
    with result.audio:
        audio = result.audio.read()
    assert len(audio) == result.audio_bytes
    samples, rate = soundfile.read(io.BytesIO(audio))
    assert rate == 24_000
    return result.row, samples


def test_a_quiet_recording_comes_out_at_the_target_loudness_and_rate(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    row, samples = cleaned(cleaner, tmp_path, wav_bytes(tone(2.5, level=0.01)))

    meter = LoudnessMeter(24_000)
    meter.add(samples.astype(np.float32))
    assert meter.lufs() == pytest.approx(-23.0, abs=0.1)
    assert row["lufs"] == pytest.approx(-23.0)
    assert row["duration_s"] == pytest.approx(2.5, abs=0.001)
    assert row["peak_db"] == pytest.approx(20 * math.log10(np.abs(samples).max()), abs=0.05)


def test_equal_input_gives_equal_bytes(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    content = wav_bytes(tone(2.2, 330.0))

    first, second = (cleaned(cleaner, tmp_path, content) for _ in range(2))

    assert first[0] == second[0]


def test_the_peak_wins_over_the_loudness(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    clicks = [1.0 if n % 8000 == 0 else 0.0 for n in range(32_000)]

    row, samples = cleaned(cleaner, tmp_path, wav_bytes(clicks))

    assert np.abs(samples).max() <= 10 ** (-1 / 20) + 1e-3
    assert "peak_limited" in row["marks"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("content", "marks"),
    [
        pytest.param(wav_bytes([0.0] * 16_000), ["no_speech", "silent"], id="digital silence"),
        pytest.param(wav_bytes(tone(0.2)), ["no_speech", "short"], id="under 0.4 s"),
        pytest.param(wav_bytes([0.5] * 2), ["no_speech", "short"], id="two samples"),
        pytest.param(wav_bytes(tone(1.0))[:20_000], ["no_speech", "truncated"], id="cut"),
    ],
)
def test_odd_recordings_are_valid_results_with_marks(
    cleaner: SpeechCleaner, tmp_path: Path, content: bytes, marks: list[str]
) -> None:
    row, samples = cleaned(cleaner, tmp_path, content)

    assert set(marks) <= set(row["marks"])  # type: ignore[call-overload]
    assert row["segments"] == []
    assert np.isfinite(samples).all()


def test_channels_that_cancel_each_other_are_noticed(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    left = tone(1.0)
    both = [sample for value in left for sample in (value, -value)]

    row, samples = cleaned(cleaner, tmp_path, wav_bytes(both, num_channels=2))

    assert "phase_inverted" in row["marks"]  # type: ignore[operator]
    assert np.abs(samples).max() > 0.05


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "", id="zero bytes"),
        pytest.param(b"<html>404</html>", "", id="HTML"),
        pytest.param(wav_header(0), "no samples", id="header only"),
        pytest.param(
            wav_header(4000, bits=32) + struct.pack("<f", math.nan) * 1000, "sample 0 of channel 0 is nan", id="NaN"
        ),
        pytest.param(wav_bytes([0.1] * 10, sample_rate_hz=7), "sample rate of 7 Hz", id="7 Hz"),
    ],
)
def test_what_cannot_be_cleaned_is_refused_with_step_and_reason(
    cleaner: SpeechCleaner, tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(ItemRefused) as caught:
        cleaned(cleaner, tmp_path, content)

    assert caught.value.step == "decode"
    assert reason in caught.value.reason
    assert caught.value.reason


def test_a_file_that_changed_after_the_index_is_refused(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(wav_bytes(tone(0.5)))
    item = item_of(path)
    path.write_bytes(wav_bytes(tone(0.5, 440.0)))
    os.utime(path, ns=(0, 0))

    with pytest.raises(ItemRefused, match="changed after it was indexed"):
        cleaner.clean(tmp_path, item, go_on)


def test_a_file_that_was_only_touched_is_still_itself(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(wav_bytes(tone(0.5)))
    item = item_of(path)
    os.utime(path, ns=(0, 0))

    cleaner.clean(tmp_path, item, go_on).audio.close()


def test_a_vanished_file_is_the_items_fault_a_vanished_folder_is_not(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "x.wav"
    path.write_bytes(wav_bytes(tone(0.5)))
    item = item_of(path)
    path.unlink()

    with pytest.raises(ItemRefused, match="vanished"):
        cleaner.clean(folder, item, go_on)
    folder.rmdir()
    with pytest.raises(TemporaryError, match="still mounted"):
        cleaner.clean(folder, item, go_on)


def test_a_long_recording_looks_at_the_stop_flag_in_every_window(cleaner: SpeechCleaner, tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(wav_bytes(tone(8.0)))
    looks = []

    def stop_at_the_fourth_look() -> None:
        looks.append(1)
        if len(looks) == 4:
            raise Stopped("preempted")

    with pytest.raises(Stopped):
        cleaner.clean(tmp_path, item_of(path), stop_at_the_fourth_look)
