"""One recording through all steps.

Owns the order of the steps and the scratch files between them.  Called by the pipeline, once per item.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import soundfile

from slackwater_workers.config import JobConfig, fingerprint, identity, work_key
from slackwater_workers.core import Cleaned, Item, ItemRefused, TemporaryError
from slackwater_workers.ledger.frames import pieces
from slackwater_workers.ledger.store import is_regular, storage_error
from slackwater_workers.steps import decode, loudness, manifest, resample, vad
from slackwater_workers.steps.decode import Block, DecodeFailed, Decoder, Source

_SCRATCH_IN_MEMORY_BYTES = 64 << 20  # eleven minutes at 24 kHz; longer recordings go to the temporary folder
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Mono:
    """A recording after the first pass: one channel at the job's rate, in a scratch file."""

    source: Source
    scratch: "_Scratch"
    num_samples: int
    source_s: float  # decoded
    claimed_s: float | None  # by the container
    meter: loudness.LoudnessMeter
    marks: frozenset[str]


class SpeechCleaner:
    """Decode, mix, resample, measure; then gain, FLAC and voice activity.  Two passes, since gain needs the whole."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self.versions: Mapping[str, str] = {
            "decode": decode.VERSION,
            "resample": resample.VERSION,
            "loudness": loudness.VERSION,
            "vad": vad.VERSION,
            "vad_model": vad.model_sha256(),
            "manifest": manifest.VERSION,
        }
        self._fingerprint = fingerprint(identity(config, self.versions))
        self._model = vad.SpeechModel(config.vad_threshold, config.min_silence_s, config.min_segment_s)

    def clean(self, folder: Path, item: Item, keep_going: Callable[[], None]) -> Cleaned:
        """See `Cleaner.clean`."""
        path = folder / item.path
        try:
            _check_unchanged(path, item)
            mono = self._read(path, keep_going)
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise TemporaryError(f"the input folder {folder} is gone; is it still mounted?") from error
            raise ItemRefused("decode", "the file vanished after it was indexed") from error
        except OSError as error:
            raise ItemRefused("decode", f"cannot be read: {error.strerror or error}") from error
        try:
            return self._finish(item, mono, keep_going)
        finally:
            mono.scratch.close()

    def _read(self, path: Path, keep_going: Callable[[], None]) -> _Mono:
        """The first pass, by the first decoder that gets through and finds sound."""
        claim, candidates = decode.decoders(path)
        failures: list[str] = []
        marks: set[str] = set()
        for decoder in candidates:
            try:
                mono = self._first_pass(path, decoder, None, keep_going)
            except DecodeFailed as error:
                failures.append(str(error))
                marks |= {"damaged"} if error.is_damage else set()
                continue
            if mono.num_samples:
                if claim.is_chained:
                    marks.add("chained" if mono.source.decoder == "ffmpeg" else "first_stream_only")
                is_short = mono.claimed_s is not None and mono.source_s < mono.claimed_s - max(
                    0.1, mono.claimed_s / 100
                )
                return replace(mono, marks=mono.marks | marks | ({"truncated"} if is_short or claim.is_cut else set()))
            # A header that says "empty" may stand over sound that the other decoder finds.
            mono.scratch.close()
            failures.append("it holds no samples")
        raise ItemRefused("decode", "; ".join(dict.fromkeys(failures)))

    def _first_pass(self, path: Path, decoder: Decoder, channel: int | None, keep_going: Callable[[], None]) -> _Mono:
        """Decode to one channel at the job's rate.  channel: take this one alone, not the mean."""
        source = decoder(path, self._config.window_s)
        mix = resample.MonoMix(source.num_channels, channel)
        meter = loudness.LoudnessMeter(self._config.sample_rate_hz)
        scratch = _Scratch()
        source_samples = num_samples = 0

        def mono_blocks() -> Iterator[Block]:
            nonlocal source_samples
            for block in source.blocks:
                keep_going()
                decode.check_finite(block, source_samples)
                source_samples += len(block)
                yield mix.mix(block)

        try:
            for block in resample.resample(mono_blocks(), source.sample_rate_hz, self._config.sample_rate_hz):
                meter.add(block)
                scratch.write(block)
                num_samples += len(block)
        except BaseException:
            scratch.close()
            raise
        louder = mix.channel_instead()
        if louder is not None:
            scratch.close()
            mono = self._first_pass(path, decoder, louder, keep_going)
            return replace(mono, marks=mono.marks | {"phase_inverted"})
        source_s = source_samples / source.sample_rate_hz
        return _Mono(source, scratch, num_samples, source_s, source.claimed_s, meter, frozenset())

    def _finish(self, item: Item, mono: _Mono, keep_going: Callable[[], None]) -> Cleaned:
        """The second pass: gain, FLAC, voice activity."""
        config = self._config
        lufs = mono.meter.lufs()
        gain = loudness.gain_for(lufs, mono.meter.peak, config.loudness_lufs, config.peak_dbfs, config.max_gain_db)
        finder = vad.SpeechFinder(self._model, config.window_s, config.min_segment_s, config.max_segment_s)
        audio = cast(BinaryIO, tempfile.SpooledTemporaryFile(max_size=_SCRATCH_IN_MEMORY_BYTES))  # noqa: SIM115 - the receiver closes it
        try:
            with soundfile.SoundFile(audio, "w", config.sample_rate_hz, 1, "PCM_16", format="FLAC") as flac:

                def finished_blocks() -> Iterator[Block]:
                    for block in mono.scratch.blocks(round(config.window_s * config.sample_rate_hz)):
                        keep_going()
                        louder = block * np.float32(gain.factor)
                        flac.write(louder)
                        yield louder

                for block in resample.resample(finished_blocks(), config.sample_rate_hz, vad.RATE_HZ):
                    keep_going()
                    finder.add(block)
            duration_s = mono.num_samples / config.sample_rate_hz
            segments = [(start_s, min(end_s, duration_s)) for start_s, end_s in finder.segments()]
            audio_bytes, audio_sha256 = _measure(audio)
        except soundfile.LibsndfileError as error:
            audio.close()
            raise TemporaryError(f"cannot write scratch audio in {tempfile.gettempdir()}: {error}") from error
        except BaseException:
            audio.close()
            raise
        marks = mono.marks | _marks(lufs, gain, duration_s, segments)
        found = manifest.Measured(duration_s, lufs, mono.meter.peak, gain, segments, marks, audio_bytes, audio_sha256)
        key = work_key(item.id, self._fingerprint)
        row = manifest.manifest_row(item, key, mono.source, config.sample_rate_hz, found)
        return Cleaned(row, audio, audio_bytes)


class _Scratch:
    """float32 samples in memory, or in an unnamed file when they are many: a kill leaves nothing behind."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_SCRATCH_IN_MEMORY_BYTES)  # noqa: SIM115 - closed by `close`

    def write(self, block: Block) -> None:
        try:
            self._file.write(block.astype("<f4", copy=False).tobytes())
        except OSError as error:
            raise storage_error(error, tempfile.gettempdir()) from error

    def blocks(self, size: int) -> Iterator[Block]:
        """All samples from the start, `size` at a time."""
        self._file.seek(0)
        while piece := self._file.read(size * _FLOAT_BYTES):
            yield np.frombuffer(piece, "<f4")

    def close(self) -> None:
        self._file.close()


def _marks(lufs: float | None, gain: loudness.Gain, duration_s: float, segments: list[vad.Segment]) -> set[str]:
    facts = {
        "silent": lufs is None,
        "short": duration_s < loudness.BLOCK_S,
        "peak_limited": gain.is_peak_limited,
        "gain_limited": gain.is_gain_limited,
        "no_speech": not segments,
    }
    return {mark for mark, holds in facts.items() if holds}


def _measure(audio: BinaryIO) -> tuple[int, str]:
    """Size and digest of the whole file; leaves it at its beginning."""
    size_bytes = audio.seek(0, os.SEEK_END)
    audio.seek(0)
    digest = hashlib.sha256()
    for piece in pieces(audio, size_bytes):
        digest.update(piece)
    audio.seek(0)
    return size_bytes, digest.hexdigest()


def _check_unchanged(path: Path, item: Item) -> None:
    """Refuse a file that is no longer what the index says.  Raises ItemRefused or OSError."""
    if not is_regular(path):  # opening a FIFO would wait for ever
        raise ItemRefused("decode", "it is no regular file any more")
    status = os.stat(path)
    if (status.st_size, status.st_mtime_ns) == (item.size_bytes, item.mtime_ns):
        return
    with path.open("rb") as file:
        if _measure(file)[1] != item.id:
            raise ItemRefused("decode", "its content changed after it was indexed")
