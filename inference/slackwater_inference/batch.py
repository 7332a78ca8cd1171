"""What passes from the scheduler to the model runner: sequences, and the plan of one step.

Pure values.  The scheduler alone changes a `Sequence` or a `Pace`; the model runner reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from slackwater_inference.core import Request


@dataclass(slots=True, eq=False)
class Pace:
    """A stream's frames against the clock of its listener, over all of its parts.

    first_tick: the pacing tick at which the listener began, moved on by every pause; None before the first frame.
    """

    first_tick: int | None = None
    num_frames: int = 0

    def note_frame(self, tick: int) -> None:
        """A frame was made at `tick`."""
        # A listener who has heard everything waits: what is made next is heard from now on.
        if self.first_tick is None or self.first_tick + self.num_frames < tick:
            self.first_tick = tick - self.num_frames
        self.num_frames += 1

    def lead(self, tick: int) -> int:
        """Frames that the listener has not heard at `tick`."""
        return 0 if self.first_tick is None else max(0, self.num_frames - (tick - self.first_tick))


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way.  `slot` is its row in the model runner's tables, -1 while it has none.

    blocks: its KV blocks, in the order of its positions.   keys: of its prompt's whole pieces, see kv_cache.
    num_shared: so many of the first `keys` are in the prefix cache, and this sequence is a holder of them.
    goes_on: it is not the first part of its stream.   is_loop: told of each frame's codes; True ends it as a loop.
    """

    request: Request
    pace: Pace = field(default_factory=Pace)
    keys: tuple[bytes, ...] = ()
    goes_on: bool = False
    is_loop: Callable[[tuple[int, ...]], bool] | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_shared: int = 0
    num_prefilled: int = 0
    num_frames: int = 0

    @property
    def is_prefix(self) -> bool:
        """True if only its prompt is wanted, for the sequences that will share it."""
        return self.request.budget.max_frames == 0

    @property
    def next_position(self) -> int:
        """Where its last frame goes when the next one is computed: behind the prompt and the frames before it."""
        return len(self.request.prompt) + self.num_frames - 1

    @property
    def is_prefilled(self) -> bool:
        """True once the whole prompt is in the cache."""
        return self.num_prefilled == len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt positions start <= p < stop of a sequence."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """True if the sequence's first frame follows from it."""
        return self.stop == len(self.sequence.request.prompt) and not self.sequence.is_prefix


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    wake_at_s: when a paced stream is due next, if nothing is to do before; None = no such stream.
    num_kept_waiting: sequences that were due but could not be lent a KV block.
    """

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[Sequence, ...] = ()
    wake_at_s: float | None = None
    num_kept_waiting: int = 0

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)
