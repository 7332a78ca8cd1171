"""Speech to text: the interface, and a local Whisper model.

Owns decoding the recording and the rule that one is transcribed at a time.  Does not own HTTP (api.asr).  The
model's library is an extra (`slackwater[asr]`) that is imported only when a folder is given.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slackwater_inference.audio.recording import read_recording
from slackwater_inference.core import PermanentError, QueueFull

_RATE_HZ = 16_000  # what Whisper hears
_MAX_WAITING = 8  # recordings of up to 32 MiB that may wait for the one that is being transcribed


class AsrUnavailable(PermanentError):
    """The speech-to-text model cannot be loaded."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech; seconds from the recording's start."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said.  language_code: ISO 639-1; None if it is not known."""

    text: str
    duration_s: float
    segments: tuple[Segment, ...]
    language_code: str | None


class Transcriber(Protocol):
    """Anything that can write down what a recording says."""

    async def transcribe(self, audio: bytes, language: str | None) -> Transcript:
        """audio: a file of any common format.  language: a hint, an ISO 639-1 code.

        Raises BadRequest for a recording that cannot be read or is too long, QueueFull.
        """
        ...


class FasterWhisper:
    """A Whisper model in CTranslate2's layout (model.bin, config.json, tokenizer.json), on one core of the CPU."""

    def __init__(self, folder: Path, max_duration_s: float) -> None:
        """Load it; takes seconds.  Raises AsrUnavailable."""
        try:
            from faster_whisper import WhisperModel
        except ImportError as error:
            raise AsrUnavailable("speech to text needs the extra: pip install 'slackwater[asr]'") from error
        if not (folder / "model.bin").is_file():
            raise AsrUnavailable(f"no Whisper model in {folder}: there is no model.bin; convert it with CTranslate2")
        try:
            self._model: Any = WhisperModel(
                str(folder), device="cpu", compute_type="int8", cpu_threads=1, local_files_only=True
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise AsrUnavailable(f"the Whisper model in {folder} cannot be loaded: {error}") from error
        self._max_duration_s = max_duration_s
        # One thread: a second transcription would take another core from the engine.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="asr")
        self._num_waiting = 0

    async def transcribe(self, audio: bytes, language: str | None) -> Transcript:
        """See Transcriber."""
        return await self._in_turn(lambda: self._transcribe(audio, language))

    async def _in_turn(self, work: Callable[[], Transcript]) -> Transcript:
        if self._num_waiting > _MAX_WAITING:
            raise QueueFull(f"{_MAX_WAITING} recordings wait to be transcribed; try again soon", retry_after_s=5)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._num_waiting -= 1

    def _transcribe(self, audio: bytes, language: str | None) -> Transcript:
        samples = read_recording(audio, _RATE_HZ, self._max_duration_s)
        known = language if language in self._model.supported_languages else None  # a hint; else it is detected
        found, info = self._model.transcribe(samples, language=known, beam_size=1, condition_on_previous_text=False)
        segments = tuple(Segment(each.text.strip(), each.start, each.end) for each in found)
        text = " ".join(segment.text for segment in segments)
        return Transcript(text, len(samples) / _RATE_HZ, segments, info.language)
