"""Sound of any file, in bounded blocks.

Owns the choice between two decoders: libsndfile, which refuses damage, then FFmpeg, which reads nearly everything.
The content decides, never the file's name.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from slackwater_workers.core import ItemRefused, WorkersError
from slackwater_workers.steps.probe import Claim, probe

VERSION = "1"

Block = np.ndarray[Any, np.dtype[np.float32]]

_MAX_CHANNELS = 64
_RATES_HZ = (1_000, 768_000)
_MAX_BLOCK_VALUES = 8 << 20  # 32 MiB of float32, whatever the rate and the number of channels
# Badly made recordings go to sixty times full scale, integers stored as float to 32,768; beyond is garbage.
_MAX_SAMPLE = 65_536.0


class DecodeFailed(WorkersError):
    """This decoder cannot read the file, or stopped inside it (`is_damage`); the other one may."""

    def __init__(self, error: Exception | str, *, is_damage: bool = False) -> None:
        # FFmpeg's errors name the absolute path, which a record must not.
        text = getattr(error, "strerror", None) or str(error)
        super().__init__(" ".join(text.split()) or type(error).__name__)
        self.is_damage = is_damage


@dataclass(frozen=True, slots=True)
class Source:
    """An opened recording.  `blocks` may be iterated once: float32 [n, num_channels]; raises DecodeFailed."""

    decoder: str
    container: str
    sample_rate_hz: int
    num_channels: int
    claimed_s: float | None
    blocks: Iterator[Block]


Decoder = Callable[[Path, float], Source]


def decoders(path: Path) -> tuple[Claim, list[Decoder]]:
    """What the file claims, and the decoders to try on it, in order."""
    claim = probe(path)
    # libsndfile reads only the first of several chained streams and does not say so.
    return claim, [open_ffmpeg, open_strict] if claim.is_chained else [open_strict, open_ffmpeg]


def open_strict(path: Path, window_s: float) -> Source:
    """Open with libsndfile.  Raises DecodeFailed."""
    try:
        file = soundfile.SoundFile(path)
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: headerless raw audio
        raise DecodeFailed(error) from error
    _check_shape(file.samplerate, file.channels)
    claimed_s = file.frames / file.samplerate if 0 < file.frames < 1 << 40 else None
    return Source("libsndfile", file.format, file.samplerate, file.channels, claimed_s, _strict_blocks(file, window_s))


def _strict_blocks(file: soundfile.SoundFile, window_s: float) -> Iterator[Block]:
    size = _block_frames(file.samplerate, file.channels, window_s)
    with file:
        while True:
            try:
                block: Block = file.read(size, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError as error:
                raise DecodeFailed(error, is_damage=True) from error
            if not len(block):
                return
            yield block


def open_ffmpeg(path: Path, window_s: float) -> Source:
    """Open with FFmpeg.  Raises DecodeFailed."""
    import av  # 30 MB that the usual recording never needs

    try:
        container = av.open(str(path), metadata_errors="ignore")
    except (av.FFmpegError, ValueError, UnicodeError) as error:
        raise DecodeFailed(error) from error
    if not container.streams.audio:
        container.close()
        raise DecodeFailed("it has no audio stream")
    stream = container.streams.audio[0]
    rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
    try:
        _check_shape(rate, channels)
    except DecodeFailed:
        container.close()
        raise
    claimed_s = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else None
    blocks = _ffmpeg_blocks(container, _block_frames(rate, channels, window_s))
    return Source("ffmpeg", container.format.name, rate, channels, claimed_s, blocks)


def _ffmpeg_blocks(container: Any, size: int) -> Iterator[Block]:
    import av

    stream = container.streams.audio[0]
    context = stream.codec_context
    planar = av.AudioResampler(format="fltp", layout=context.layout, rate=context.sample_rate)
    held: list[Block] = []
    with container:
        try:
            for frame in container.decode(stream):
                for converted in planar.resample(frame):
                    held.append(
                        converted.to_ndarray().astype(np.float32, copy=False).T
                    )  # [channels, n] -> [n, channels]
                if sum(len(block) for block in held) >= size:
                    yield np.concatenate(held)
                    held = []
        except (av.FFmpegError, ValueError) as error:
            raise DecodeFailed(error, is_damage=True) from error
    if held:
        yield np.concatenate(held)


def _block_frames(rate: int, channels: int, window_s: float) -> int:
    return max(1, min(math.ceil(rate * window_s), _MAX_BLOCK_VALUES // channels))


def _check_shape(rate: int, channels: int) -> None:
    low, high = _RATES_HZ
    if not low <= rate <= high:
        raise DecodeFailed(f"a sample rate of {rate} Hz is no recording's; {low} to {high} are read")
    if not 1 <= channels <= _MAX_CHANNELS:
        raise DecodeFailed(f"{channels} channels; 1 to {_MAX_CHANNELS} are read")


def check_finite(block: Block, seen: int) -> None:
    """Refuse samples that no recording has; one NaN would poison all that follows it.

    seen: samples before this block, for the message.  Raises ItemRefused.
    """
    good = np.abs(block) <= _MAX_SAMPLE  # false for NaN too
    if not good.all():
        row, channel = (int(at) for at in np.argwhere(~good)[0])
        value = float(block[row, channel])
        raise ItemRefused("decode", f"sample {seen + row} of channel {channel} is {value:g}; full scale is 1")
