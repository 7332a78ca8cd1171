"""What kind of file some bytes are."""

import io

import numpy as np
import pytest
import soundfile

from slackwater_inference.api.media import audio_type, image_type


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [("WAV", "audio/wav"), ("FLAC", "audio/flac"), ("OGG", "audio/ogg"), ("MP3", "audio/mpeg")],
)
def test_a_recording_is_known_by_how_it_begins(kind, media_type):
    file = io.BytesIO()
    soundfile.write(file, np.zeros(44_100), 44_100, format=kind)

    assert audio_type(file.getvalue()) == media_type


@pytest.mark.parametrize(
    ("beginning", "media_type"),
    [
        (b"\x00\x00\x00\x20ftypM4A ", "audio/mp4"),
        (b"\x1a\x45\xdf\xa3", "audio/webm"),
        (b"<html>", "application/octet-stream"),
        (b"\xff", "application/octet-stream"),
        (b"", "application/octet-stream"),
    ],
)
def test_what_browsers_might_run_is_no_recording(beginning, media_type):
    assert audio_type(beginning) == media_type


@pytest.mark.parametrize(
    ("beginning", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
        (b"GIF89a", "image/gif"),
        (b"<svg xmlns=", None),
        (b"RIFF\x00\x00\x00\x00WAVE", None),
        (b"", None),
    ],
)
def test_a_picture_is_known_by_how_it_begins(beginning, media_type):
    assert image_type(beginning) == media_type
