"""When a stream's codes become sound, and in which batch.

Owns the chunk sizes and the batching of the codec; each stream's codes and codec state lie in its
`CodeStream`.  Does not own the network (`codec`) or delivery (`engine`).  Called by the engine.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from slackwater_inference.codec.decoder import CodecDecoder, CodecState
from slackwater_inference.core import Chunk

_INT16_PEAK = 32767


@dataclass(slots=True, eq=False)
class CodeStream:
    """One stream's frames on their way to sound."""

    state: CodecState
    pending: list[tuple[int, ...]] = field(default_factory=list)  # frames of codes not decoded yet
    num_sent: int = 0  # frames decoded so far
    first_sent_s: float | None = None  # when the first of them were, and a listener could begin
    has_ended: bool = False  # no frame follows; what is pending is due


class Vocoder:
    """Decodes what is due."""

    def __init__(
        self,
        codec: CodecDecoder,
        *,
        min_chunk_frames: int,
        max_chunk_frames: int,
        low_buffer_frames: int,
        max_batch_frames: int,
    ) -> None:
        """The arguments are those of `EngineConfig`."""
        self._codec = codec
        self._min_chunk_frames = min_chunk_frames
        self._max_chunk_frames = max_chunk_frames
        self._low_buffer_frames = low_buffer_frames
        self._max_batch_frames = max_batch_frames

    def open(self) -> CodeStream:
        """A stream before its first frame."""
        return CodeStream(self._codec.new_state())

    def run(self, streams: Iterable[CodeStream], now_s: float) -> Iterator[tuple[CodeStream, Chunk]]:
        """Decode one chunk of every stream that has one due at `now_s`, the shortest chunks first."""
        by_length: defaultdict[int, list[CodeStream]] = defaultdict(list)
        for stream in streams:
            if num_frames := self._num_due(stream, now_s):
                by_length[num_frames].append(stream)
        # Streams of equal chunk length share a batch.  Short chunks are those that somebody waits for.
        for num_frames, group in sorted(by_length.items()):
            batch = max(1, self._max_batch_frames // num_frames)
            for i in range(0, len(group), batch):
                yield from self._decode(group[i : i + batch], num_frames, now_s)

    def _num_due(self, stream: CodeStream, now_s: float) -> int:
        num_pending = min(len(stream.pending), self._max_chunk_frames)
        if stream.has_ended or num_pending == self._max_chunk_frames:
            return num_pending
        # Large chunks cost the codec less, but a listener who has little left gets what there is.
        is_low = self._buffered_frames(stream, now_s) < self._low_buffer_frames
        return num_pending if is_low and num_pending >= self._min_chunk_frames else 0

    def _buffered_frames(self, stream: CodeStream, now_s: float) -> float:
        """Frames that a listener who began at the first chunk has not heard yet; 0 before it."""
        if stream.first_sent_s is None:
            return 0.0
        return stream.num_sent - (now_s - stream.first_sent_s) * self._codec.config.frame_rate_hz

    @torch.inference_mode()
    def _decode(self, streams: list[CodeStream], num_frames: int, now_s: float) -> list[tuple[CodeStream, Chunk]]:
        codes = torch.tensor([s.pending[:num_frames] for s in streams]).transpose(1, 2)  # [b, num_codebooks, n]
        samples, states = self._codec.decode(codes, [s.state for s in streams])
        pcm = (samples * _INT16_PEAK).round().short()
        for stream, state in zip(streams, states, strict=True):
            stream.state = state
            stream.num_sent += num_frames
            if stream.first_sent_s is None:
                stream.first_sent_s = now_s
            del stream.pending[:num_frames]
        return [
            (s, Chunk(row.numpy().astype("<i2").tobytes(), num_frames)) for s, row in zip(streams, pcm, strict=True)
        ]
