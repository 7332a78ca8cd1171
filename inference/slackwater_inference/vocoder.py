"""When a stream's codes become sound, in which order and in which batch.

Owns the chunk sizes, the deadlines and the batching of the codec; each stream's codes, codec state and
listener's clock lie in its `CodeStream`.  Does not own the network (`codec`) or delivery (`engine`).
Called by the engine, from one thread.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from slackwater_inference.codec.codec import Codec, CodecState
from slackwater_inference.core import Chunk


@dataclass(slots=True, eq=False)
class _Part:
    """One text part's frames on their way to sound."""

    index: int
    said_s: float
    frames: deque[tuple[int, ...]] = field(default_factory=deque)
    has_sent: bool = False  # some of it was decoded before
    has_ended: bool = False  # no frame follows; what is here is due


class CodeStream:
    """One stream's frames on their way to sound, and the clock of its listener.

    The parts of a stream share one codec state, so nothing clicks where they meet; a chunk belongs to one part.
    The listener is taken to begin at the first chunk, to hear in real time, and to wait where it runs dry.
    """

    def __init__(self, state: CodecState, min_chunk_frames: int) -> None:
        self.state = state
        self.min_chunk_frames = min_chunk_frames
        self.num_sent = 0
        """Frames decoded so far."""
        self.dry_s: float | None = None
        """When the listener has heard all that was sent; None before the first audio."""
        self.num_underruns = 0
        """How often the listener ran dry while there was text to speak."""
        self.longest_gap_s = 0.0
        """The longest that it then had to wait."""
        self._parts: deque[_Part] = deque()

    def begin_part(self, index: int, said_s: float) -> None:
        """Frames of text part `index`, whose text came at `said_s`, are about to follow."""
        if self._parts and not self._parts[-1].has_ended:
            raise ValueError(f"part {index} must begin after part {self._parts[-1].index} has ended; call end_part")
        self._parts.append(_Part(index, said_s))

    def put(self, codes: tuple[int, ...]) -> None:
        """Append one frame to the part that was begun last."""
        if not self._parts or self._parts[-1].has_ended:
            raise ValueError("a frame must belong to a part, got one after end_part; call begin_part first")
        self._parts[-1].frames.append(codes)

    def end_part(self) -> None:
        """No frame of the part that was begun last follows; what is left of it is due at once."""
        if not self._parts or self._parts[-1].has_ended:
            raise ValueError("no part is open; call begin_part first")
        self._parts[-1].has_ended = True
        self._drop_spoken_parts()

    @property
    def num_pending(self) -> int:
        """Frames that are not decoded yet."""
        return sum(len(part.frames) for part in self._parts)

    def num_due(self, now_s: float, *, max_chunk_frames: int, low_buffer_s: float) -> int:
        """Frames of the chunk that is due at `now_s`; 0 if none is."""
        if not self._parts:
            return 0
        part = self._parts[0]
        num_frames = min(len(part.frames), max_chunk_frames)
        if part.has_ended or num_frames == max_chunk_frames:
            return num_frames
        # Large chunks cost the codec less, but a listener who has little left gets what there is.
        is_low = self.dry_s is None or self.dry_s - now_s < low_buffer_s
        return num_frames if is_low and num_frames >= self.min_chunk_frames else 0

    def is_low(self, now_s: float, low_buffer_s: float) -> bool:
        """True if the listener has begun, has less than `low_buffer_s` left, and a part is still being spoken."""
        return bool(self._parts) and self.dry_s is not None and self.dry_s - now_s < low_buffer_s

    def due_from_s(self, low_buffer_s: float) -> float | None:
        """When a chunk that is not due yet will be, if no frame comes until then; None if it needs more frames."""
        has_chunk = bool(self._parts) and len(self._parts[0].frames) >= self.min_chunk_frames
        return self.dry_s - low_buffer_s if has_chunk and self.dry_s is not None else None

    def deadline_s(self, now_s: float) -> float:
        """When the listener will miss the next chunk: now, before the first one or where it waits for text anyway."""
        if self.dry_s is None or not self._parts:
            return now_s
        part = self._parts[0]
        return now_s if not part.has_sent and part.said_s > self.dry_s else self.dry_s

    def take(self, num_frames: int) -> tuple[int, list[tuple[int, ...]]]:
        """Part index and codes of the next `num_frames` frames; they stay until `sent`."""
        part = self._parts[0]
        return part.index, [part.frames[i] for i in range(num_frames)]

    def sent(self, num_frames: int, state: CodecState, now_s: float, frame_rate_hz: float) -> None:
        """The next `num_frames` frames were decoded at `now_s`; `state` is what the codec carries on with."""
        part = self._parts[0]
        dry_s = now_s if self.dry_s is None else self.dry_s
        if now_s > dry_s and (part.has_sent or part.said_s <= dry_s):
            self.num_underruns += 1
            self.longest_gap_s = max(self.longest_gap_s, now_s - dry_s)
        self.dry_s = max(now_s, dry_s) + num_frames / frame_rate_hz
        self.num_sent += num_frames
        self.state = state
        for _ in range(num_frames):
            part.frames.popleft()
        part.has_sent = True
        self._drop_spoken_parts()

    def _drop_spoken_parts(self) -> None:
        while self._parts and self._parts[0].has_ended and not self._parts[0].frames:
            self._parts.popleft()


class Vocoder:
    """Decodes what is due, earliest deadline first, in batches of streams with equally long chunks."""

    def __init__(
        self, codec: Codec, *, min_chunk_frames: int, max_chunk_frames: int, low_buffer_frames: int, max_frames: int
    ) -> None:
        """The arguments are those of `EngineConfig`, max_frames its `max_vocoder_frames`.

        max_frames bounds the streams x frames of a call, and so its time and the codec's memory.
        """
        self._codec = codec
        self._min_chunk_frames = min_chunk_frames
        self._max_chunk_frames = min(max_chunk_frames, max_frames)
        self._low_buffer_s = low_buffer_frames / codec.config.frame_rate_hz
        self._max_frames = max_frames

    def open(self, min_chunk_frames: int | None = None) -> CodeStream:
        """A stream before its first frame.

        min_chunk_frames: >= 1, of any chunk but a part's last; None = the engine's.
        """
        return CodeStream(self._codec.new_state(), min_chunk_frames or self._min_chunk_frames)

    def run(self, streams: Iterable[CodeStream], now_s: float) -> Iterator[tuple[CodeStream, Chunk]]:
        """Decode chunks that are due at `now_s`, most urgent first, until `max_frames` frames are made.

        At most one chunk a stream.  What this call leaves is due for the next one; see `next_due_s`.
        """
        due = [(stream, n) for stream in streams if (n := self._num_due(stream, now_s))]
        due.sort(key=lambda item: item[0].deadline_s(now_s))
        num_left = self._max_frames
        while due and due[0][1] <= num_left:
            num_frames = due[0][1]
            batch = [stream for stream, n in due if n == num_frames][: num_left // num_frames]
            num_left -= num_frames * len(batch)
            due = [item for item in due if item[0] not in batch]
            yield from self._decode(batch, num_frames, now_s)

    def next_due_s(self, streams: Iterable[CodeStream], now_s: float) -> float | None:
        """When `run` has something to do if no frame comes until then: `now_s` if it has, None if it never will."""
        times = [now_s if self._num_due(stream, now_s) else stream.due_from_s(self._low_buffer_s) for stream in streams]
        return min((t for t in times if t is not None), default=None)

    def is_anyone_low(self, streams: Iterable[CodeStream], now_s: float) -> bool:
        """True if a listener who has begun will soon have nothing left, though there is more to say."""
        return any(stream.is_low(now_s, self._low_buffer_s) for stream in streams)

    def _num_due(self, stream: CodeStream, now_s: float) -> int:
        return stream.num_due(now_s, max_chunk_frames=self._max_chunk_frames, low_buffer_s=self._low_buffer_s)

    @torch.inference_mode()
    def _decode(self, streams: list[CodeStream], num_frames: int, now_s: float) -> list[tuple[CodeStream, Chunk]]:
        taken = [stream.take(num_frames) for stream in streams]
        codes = torch.tensor([frames for _, frames in taken]).transpose(1, 2)  # [b, num_codebooks, n]
        samples, states = self._codec.decode(codes, [stream.state for stream in streams])
        for stream, state in zip(streams, states, strict=True):
            stream.sent(num_frames, state, now_s, self._codec.config.frame_rate_hz)
        return [
            (stream, Chunk(row.numpy().astype("<f4", copy=False).tobytes(), num_frames, index))
            for stream, row, (index, _) in zip(streams, samples, taken, strict=True)
        ]
