"""The row that describes one cleaned recording.

Owns the manifest's field names.  A row holds nothing that differs between two runs: no time, no host, no worker.
"""

import math
from dataclasses import dataclass

from slackwater_workers.core import Item
from slackwater_workers.steps.decode import Source
from slackwater_workers.steps.loudness import Gain
from slackwater_workers.steps.vad import Segment

VERSION = "1"


@dataclass(frozen=True, slots=True)
class Measured:
    """What the steps found out about one recording."""

    duration_s: float
    lufs: float | None  # as recorded
    peak: float  # as recorded
    gain: Gain
    segments: list[Segment]
    marks: frozenset[str]
    audio_bytes: int
    audio_sha256: str


def manifest_row(item: Item, key: str, source: Source, sample_rate_hz: int, found: Measured) -> dict[str, object]:
    """The row of a cleaned item.  `lufs` and `peak_db` are those of the cleaned audio; None for silence."""
    return {
        "status": "cleaned",
        "key": key,
        "path": item.path,
        "sha256": item.id,
        "duration_s": round(found.duration_s, 4),
        "sample_rate_hz": sample_rate_hz,
        "lufs": None if found.lufs is None else round(found.lufs + found.gain.db, 2),
        "peak_db": None if found.peak <= 0.0 else round(20.0 * math.log10(found.peak) + found.gain.db, 2),
        "gain_db": round(found.gain.db, 2),
        "segments": [[round(start_s, 3), round(end_s, 3)] for start_s, end_s in found.segments],
        "speech_s": round(sum(end_s - start_s for start_s, end_s in found.segments), 3),
        "marks": sorted(found.marks),
        "source": {
            "container": source.container,
            "decoder": source.decoder,
            "num_channels": source.num_channels,
            "sample_rate_hz": source.sample_rate_hz,
            "size_bytes": item.size_bytes,
        },
        "audio_bytes": found.audio_bytes,
        "audio_sha256": found.audio_sha256,
    }
