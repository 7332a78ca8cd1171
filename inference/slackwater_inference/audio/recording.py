"""A caller's recording: into samples, whatever file it came as, and whether it makes a voice.

Owns which containers are read and how much of one is ever decoded, the bounds of a reference (length, level, clipping,
offset, silence, transcript) with a refusal each, and the trimming of silence at both ends.  Knows no model.  Called
for voices to clone and for speech to transcribe, in a thread.  The checks are simple energy measures: what passes is
usable, not certainly good.
"""

import io
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from slackwater_inference.core import BadRequest

if TYPE_CHECKING:
    from av import AudioCodecContext
    from av.container import InputContainer

Samples = npt.NDArray[np.float32]

MAX_BYTES = 32 * 1024 * 1024  # the API's own bound of a body, engine-api.md 2.3
MAX_DURATION_S = 120.0
# FFmpeg's names.  Only real audio files: its playlist formats (hls, concat) would open addresses and local files.
_FORMATS = "wav,w64,aiff,caf,flac,mp3,ogg,mov,matroska,aac,amr"
_MIN_RATE_HZ, _MAX_RATE_HZ = 4_000, 384_000
_ADVICE = "send wav, flac, mp3, ogg, opus, m4a or webm"

# Less than a second is two or three syllables, from which no voice can be told; 90 s are 1,938 positions of every
# prompt that uses the voice, 0.3 GB of S2's KV cache.  The hosted API calls 10 to 30 s best.
MIN_REFERENCE_S = 1.0
MAX_REFERENCE_S = 90.0
MIN_LEVEL_DBFS = -45.0  # below, 16 bits and the room's noise are close to the voice
CLIPPED_AT = 0.985  # of full scale; what a limiter leaves of a peak that was cut
MAX_CLIPPED_RATIO = 0.005
MAX_DC_OFFSET = 0.05  # of full scale; a broken sound card, and the codec would hear it as a tone
MAX_SILENCE_RATIO = 0.7
# Seconds that the transcript would take at a usual pace, against the seconds between first and last sound.
MIN_TRANSCRIPT_RATIO = 0.2
MAX_TRANSCRIPT_RATIO = 3.0

_FRAME_S = 0.02
_SILENCE_DBFS = -55.0
_BELOW_SPEECH_DB = 30.0  # a frame so far under the loud ones is a pause
_MARGIN_S = 0.1
_LETTERS_PER_S = 14.0
_DIGITS_PER_S = 3.0
_IDEOGRAPHS_PER_S = 4.5
_SYLLABLE_SIGNS_PER_S = 7.0  # kana, hangul


def read_recording(data: bytes, sample_rate_hz: int, max_duration_s: float = MAX_DURATION_S) -> Samples:
    """Decode `data` to mono fp32 at `sample_rate_hz`; channels are averaged.

    It stops at the first sample beyond `max_duration_s`, so a small file that unpacks to hours costs no more than
    one of that length.  Raises BadRequest in one line for what is empty, too large, too long, damaged, no audio
    file or a film without sound.
    """
    import av

    if not data:
        raise BadRequest(f"the recording is empty (0 bytes); {_ADVICE}")
    if len(data) > MAX_BYTES:
        raise BadRequest(f"the recording has {len(data)} bytes, at most {MAX_BYTES} are read; send a shorter one")
    try:
        with av.open(
            io.BytesIO(data), "r", options={"format_whitelist": _FORMATS}, metadata_errors="replace"
        ) as container:
            return _read(container, sample_rate_hz, max_duration_s)
    except (av.error.FFmpegError, ValueError) as error:  # PyAV gives ValueError for some broken headers
        raise BadRequest(f"the recording cannot be read as audio ({_reason(error)}); {_ADVICE}") from error


def _read(container: "InputContainer", sample_rate_hz: int, max_duration_s: float) -> Samples:
    import soxr

    if not container.streams.audio:
        raise BadRequest(f"the recording has no sound in it, only {_kinds(container)}; {_ADVICE}")
    stream = container.streams.audio[0]
    if cast("AudioCodecContext | None", stream.codec_context) is None:  # no decoder knows what is in the container
        raise BadRequest(f"the recording is in an encoding that is not known here; {_ADVICE}")
    source_rate_hz = stream.rate
    if not _MIN_RATE_HZ <= source_rate_hz <= _MAX_RATE_HZ:
        raise BadRequest(
            f"the recording's rate must be {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz, got {source_rate_hz}; resample it"
        )
    resample = soxr.ResampleStream(source_rate_hz, sample_rate_hz, 1, dtype="float32", quality="HQ").resample_chunk
    max_samples = int(max_duration_s * source_rate_hz)
    num_samples = 0
    pieces: list[Samples] = []
    for mono in _mono_frames(container, source_rate_hz):
        num_samples += len(mono)
        if num_samples > max_samples:
            raise BadRequest(f"the recording is longer than {max_duration_s:g} s; send a shorter one")
        pieces.append(resample(mono))
    if not num_samples:
        raise BadRequest(f"the recording holds no sample of sound; {_ADVICE}")
    samples: Samples = np.concatenate([*pieces, resample(np.empty(0, np.float32), last=True)])
    if not np.isfinite(samples).all():
        raise BadRequest("the recording has samples that are no numbers (NaN or infinite); export it anew")
    return samples


def _mono_frames(container: "InputContainer", rate_hz: int) -> Iterator[Samples]:
    """The first audio stream's frames, averaged to one channel, at the rate that the file states."""
    import av

    # Packed: of planes, one for each channel, PyAV reads past the last from the eighth on, which kills the process.
    to_float = av.AudioResampler(format="flt", rate=rate_hz)
    for frame in container.decode(audio=0):
        for converted in to_float.resample(frame):
            packed = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)  # [n, channels]
            yield packed.mean(axis=1, dtype=np.float32)


def _kinds(container: "InputContainer") -> str:
    return ", ".join(sorted({stream.type for stream in container.streams})) or "an empty file"


def _reason(error: Exception) -> str:
    """FFmpeg's own words, without its error number and file name."""
    return cast(str, getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]


@dataclass(frozen=True, slots=True)
class _Sound:
    """Which frames of a recording hold sound.   is_active: bool [n frames];   level_dbfs: RMS of these frames."""

    is_active: npt.NDArray[np.bool_]
    level_dbfs: float

    @property
    def extent(self) -> tuple[int, int]:
        """First active frame and the one after the last; (0, 0) for silence."""
        (active,) = np.nonzero(self.is_active)
        return (int(active[0]), int(active[-1]) + 1) if len(active) else (0, 0)


def prepare_reference(samples: Samples, rate_hz: int) -> Samples:
    """Cut the silence at both ends down to 0.1 s; what is silence altogether comes back as it is."""
    first, end = _sound(samples, rate_hz).extent
    if end == 0:
        return samples
    frame, margin = round(_FRAME_S * rate_hz), round(_MARGIN_S * rate_hz)
    return samples[max(0, first * frame - margin) : end * frame + margin]


def check_reference(samples: Samples, rate_hz: int, text: str | None) -> None:
    """Raise BadRequest that names measure, bound and remedy unless mono `samples` and `text` can make a voice.

    text: what is said in it; None = not known yet, which leaves the transcript unchecked.
    """
    duration_s = len(samples) / rate_hz
    if duration_s < MIN_REFERENCE_S:
        raise BadRequest(
            f"the recording is {duration_s:.2f} s long, at least {MIN_REFERENCE_S:g} s are needed; 10 to 30 s are best"
        )
    if duration_s > MAX_REFERENCE_S:
        raise BadRequest(
            f"the recording is {duration_s:.0f} s long, at most {MAX_REFERENCE_S:g} s are taken; 10 to 30 s are best"
        )
    _check_signal(samples, rate_hz)
    if text is not None:
        first, end = _sound(samples, rate_hz).extent
        _check_transcript(text, (end - first) * _FRAME_S)


def _check_signal(samples: Samples, rate_hz: int) -> None:
    offset = float(np.mean(samples))
    if abs(offset) > MAX_DC_OFFSET:
        raise BadRequest(
            f"the recording has a DC offset of {offset:+.3f}, at most {MAX_DC_OFFSET} is allowed; filter it out or "
            "record with another device"
        )
    clipped = float(np.mean(np.abs(samples) >= CLIPPED_AT))
    if clipped > MAX_CLIPPED_RATIO:
        raise BadRequest(
            f"{clipped:.1%} of the recording is clipped, at most {MAX_CLIPPED_RATIO:.1%} is allowed; record it again "
            "with less gain"
        )
    sound = _sound(samples, rate_hz)
    if sound.level_dbfs < MIN_LEVEL_DBFS:
        measured = f"is at {sound.level_dbfs:.0f} dBFS" if sound.is_active.any() else "is silence"
        raise BadRequest(
            f"the recording {measured}, at least {MIN_LEVEL_DBFS:.0f} dBFS is needed; speak closer or raise the gain"
        )
    silence = 1.0 - float(np.mean(sound.is_active))
    if silence > MAX_SILENCE_RATIO:
        raise BadRequest(
            f"{silence:.0%} of the recording is silence, at most {MAX_SILENCE_RATIO:.0%} is allowed; cut the pauses out"
        )


def _check_transcript(text: str, speech_s: float) -> None:
    needed_s = _speaking_time_s(text)
    if needed_s == 0.0:
        raise BadRequest("the transcript has no word in it; write down exactly what is said in the recording")
    ratio = needed_s / speech_s
    if not MIN_TRANSCRIPT_RATIO <= ratio <= MAX_TRANSCRIPT_RATIO:
        low_s, high_s = needed_s / MAX_TRANSCRIPT_RATIO, needed_s / MIN_TRANSCRIPT_RATIO
        raise BadRequest(
            f"the transcript does not fit: the recording has {speech_s:.1f} s of speech, such a text takes "
            f"{low_s:.1f} to {high_s:.1f} s; write down exactly what is said in the recording"
        )


def _speaking_time_s(text: str) -> float:
    """Seconds that `text` takes at a usual pace, by kind of character."""
    seconds = 0.0
    for char in text:
        if char.isdecimal():
            seconds += 1.0 / _DIGITS_PER_S
        elif char.isalpha():
            name = unicodedata.name(char, "")
            if name.startswith("CJK"):
                seconds += 1.0 / _IDEOGRAPHS_PER_S
            elif name.startswith(("HIRAGANA", "KATAKANA", "HANGUL")):
                seconds += 1.0 / _SYLLABLE_SIGNS_PER_S
            else:
                seconds += 1.0 / _LETTERS_PER_S
    return seconds


def _sound(samples: Samples, rate_hz: int) -> _Sound:
    """Energy of frames of 20 ms without the offset; a last, shorter frame is left out."""
    frame = round(_FRAME_S * rate_hz)
    num_frames = len(samples) // frame
    if num_frames == 0:
        return _Sound(np.zeros(0, np.bool_), -np.inf)
    centred = samples - np.mean(samples)
    power = np.mean(np.square(centred[: num_frames * frame].reshape(num_frames, frame)), axis=1) + 1e-12  # [n]
    level_dbfs = 10.0 * np.log10(power)
    is_active = level_dbfs > max(_SILENCE_DBFS, float(np.percentile(level_dbfs, 95)) - _BELOW_SPEECH_DB)
    mean = 10.0 * np.log10(np.mean(power[is_active])) if is_active.any() else -np.inf
    return _Sound(is_active, float(mean))
