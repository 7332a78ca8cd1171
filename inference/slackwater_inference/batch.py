"""What passes from the scheduler to the model runner: sequences, and the plan of one step.

Pure values.  The scheduler alone changes a `Sequence`; the model runner reads it.
"""

from dataclasses import dataclass

from slackwater_inference.core import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way.  `slot` is its row in the model runner's tables, -1 while it waits."""

    request: Request
    slot: int = -1
    blocks: tuple[int, ...] = ()
    num_prefilled: int = 0
    num_frames: int = 0
    first_tick: int = 0  # the pacing tick of its first frame

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
        return self.stop == len(self.sequence.request.prompt)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.  wake_at_s: when a paced stream is due next, if nothing is to do before; None = no such stream."""

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[Sequence, ...] = ()
    wake_at_s: float | None = None

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)
