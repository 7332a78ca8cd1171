"""From the engine's samples to the bytes of a client's answer.

Owns what a client may ask of the sound (format, rate, bit rate, prosody) and the order in which that is done:
tempo, loudness, volume, resampling, limiter, fade at the end, container.  Owns neither the signal processing
(prosody.py) nor the codecs (container.py).  Called by the API, in a thread beside the model.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from slackwater_inference.audio.container import Container, Mp3, OggOpus, Pcm, Wav
from slackwater_inference.audio.prosody import FadeOut, Gain, Limiter, Loudness, Resampler, Stage, Tempo
from slackwater_inference.core import BadRequest

Samples = npt.NDArray[np.float32]
AudioFormat = Literal["wav", "pcm", "mp3", "opus"]

# engine-api.md 2.2.
SAMPLE_RATES_HZ: dict[AudioFormat, tuple[int, ...]] = {
    "wav": (8_000, 16_000, 24_000, 32_000, 44_100),
    "pcm": (8_000, 16_000, 24_000, 32_000, 44_100),
    "mp3": (32_000, 44_100),
    "opus": (48_000,),
}
MEDIA_TYPES: dict[AudioFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}
MP3_BITRATES_KBPS = (64, 128, 192)
OPUS_AUTO_BITRATE = -1000
OPUS_BITRATES_BPS = (OPUS_AUTO_BITRATE, 24_000, 32_000, 48_000, 64_000)
# What libopus itself takes for "automatic" at 48 kHz mono and 20 ms packets.
_OPUS_AUTO_BPS = 51_000
SPEED_RANGE = (0.5, 2.0)
VOLUME_RANGE_DB = (-20.0, 20.0)


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """How a client wants its audio.  Raises BadRequest for anything that engine-api.md 2.2 does not list.

    sample_rate_hz: None = the format's own (44.1 kHz, opus 48 kHz).   mp3_bitrate: kbit/s.
    opus_bitrate: bit/s, or -1000 = automatic.   speed: 2 = twice as fast, at the same pitch.
    """

    format: AudioFormat = "wav"
    sample_rate_hz: int | None = None
    mp3_bitrate: int = 128
    opus_bitrate: int = OPUS_AUTO_BITRATE
    speed: float = 1.0
    volume_db: float = 0.0
    normalize_loudness: bool = False

    def __post_init__(self) -> None:
        if self.format not in SAMPLE_RATES_HZ:
            raise BadRequest(f"format must be one of {', '.join(SAMPLE_RATES_HZ)}, got {self.format}")
        rates = SAMPLE_RATES_HZ[self.format]
        if self.sample_rate_hz is not None and self.sample_rate_hz not in rates:
            listed = ", ".join(map(str, rates))
            raise BadRequest(f"sample_rate of {self.format} must be one of {listed} Hz, got {self.sample_rate_hz}")
        if self.mp3_bitrate not in MP3_BITRATES_KBPS:
            raise BadRequest(f"mp3_bitrate must be one of {_listed(MP3_BITRATES_KBPS)} kbit/s, got {self.mp3_bitrate}")
        if self.opus_bitrate not in OPUS_BITRATES_BPS:
            raise BadRequest(f"opus_bitrate must be one of {_listed(OPUS_BITRATES_BPS)}, got {self.opus_bitrate}")
        _check_range("speed", self.speed, SPEED_RANGE, "")
        _check_range("volume", self.volume_db, VOLUME_RANGE_DB, " dB")

    @property
    def rate_hz(self) -> int:
        """The rate that the client gets: its own choice or the format's default."""
        return self.sample_rate_hz or SAMPLE_RATES_HZ[self.format][-1]


class AudioOutput:
    """One answer's audio, made as the samples come.

    All state is kept over the chunks, so any cut of the same samples sounds the same.  Calls block shortly;
    one thread at a time.
    """

    def __init__(self, settings: OutputSettings, source_rate_hz: int) -> None:
        self.media_type = MEDIA_TYPES[settings.format]
        self.sample_rate_hz = settings.rate_hz
        self._stages = _stages(settings, source_rate_hz)
        self._container = _container(settings)
        self._is_finished = False

    def feed(self, samples: bytes) -> bytes:
        """Give what can be given of `samples` (fp32 little-endian mono) and of those before.

        Raises ValueError after `finish` or for a broken sample.
        """
        if self._is_finished:
            raise ValueError("audio came after finish(); make a new AudioOutput")
        if len(samples) % 4:
            raise ValueError(f"samples must be whole fp32 values of 4 bytes, got {len(samples)} bytes")
        current: Samples = np.frombuffer(samples, dtype="<f4")
        for stage in self._stages:
            current = stage.feed(current)
        return self._container.feed(current)

    def finish(self) -> bytes:
        """Give all that is still held back, and the container's end.  Afterwards nothing more may be fed."""
        if self._is_finished:
            return b""
        self._is_finished = True
        tail: Samples = np.empty(0, np.float32)
        for stage in self._stages:
            tail = np.concatenate([stage.feed(tail), stage.finish()])
        return self._container.feed(tail) + self._container.finish()


def _stages(settings: OutputSettings, source_rate_hz: int) -> list[Stage]:
    """What the samples run through; plain audio at the engine's rate only fades out."""
    stages: list[Stage] = []
    if settings.speed != 1.0:
        stages.append(Tempo(settings.speed, source_rate_hz))
    if settings.normalize_loudness:
        stages.append(Loudness(source_rate_hz))
    if settings.volume_db != 0.0:
        stages.append(Gain(settings.volume_db))
    if settings.rate_hz != source_rate_hz:
        stages.append(Resampler(source_rate_hz, settings.rate_hz))
    if stages:  # each of them can lift a peak over full scale
        stages.append(Limiter(settings.rate_hz))
    return [*stages, FadeOut(settings.rate_hz)]


def _container(settings: OutputSettings) -> Container:
    match settings.format:
        case "wav":
            return Wav(settings.rate_hz)
        case "pcm":
            return Pcm()
        case "mp3":
            return Mp3(settings.rate_hz, settings.mp3_bitrate * 1000)
        case "opus":
            is_auto = settings.opus_bitrate == OPUS_AUTO_BITRATE
            return OggOpus(_OPUS_AUTO_BPS if is_auto else settings.opus_bitrate)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _check_range(name: str, value: float, bounds: tuple[float, float], unit: str) -> None:
    low, high = bounds
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"{name} must be between {low:g} and {high:g}{unit}, got {value:g}")
