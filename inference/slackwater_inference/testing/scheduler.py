"""A scheduler stepped by hand, for tests: short requests, small limits, one step as the engine does it.

Owns no policy; `step` checks the scheduler's own invariants each time.  Not imported by the product.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from slackwater_inference.batch import PrefillChunk, Sequence, StepPlan
from slackwater_inference.core import EndReason, Frame, FrameBudget, Request, SamplingParams
from slackwater_inference.scheduler import Limits, Scheduler


def request(name: str, prompt_len: int = 5, frames: int = 4, expected: int | None = None, base: int = 0) -> Request:
    """A request of `frames` frames at most, all of them expected if nothing else is; another base is another prompt."""
    prompt = tuple((base + i, 0) for i in range(prompt_len))
    return Request(name, prompt, FrameBudget(frames if expected is None else expected, frames), SamplingParams())


def scheduler(
    slots: int = 2,
    queued: int = 8,
    block: int = 4,
    blocks: int = 64,
    prefill: int = 16,
    piece: int | None = None,
    held: int = 0,
    pace: float = 0.0,
    burst: int = 2,
    loop: int = 0,
) -> Scheduler:
    """A scheduler with these `Limits`, in their order.  piece: None is as much as one step prefills."""
    return Scheduler(Limits(slots, queued, block, blocks, prefill, piece or prefill, held, pace, burst, loop))


def step(
    s: Scheduler, now_s: float = 0.0, ends: Collection[str] = (), abort: str | None = None
) -> tuple[StepPlan, dict[str, EndReason]]:
    """Run one step as the engine does; returns the plan and what ended.

    ends: requests to which the model says im_end.   abort: a request that goes away while the step runs.
    """
    plan = s.plan(now_s)
    made = names(plan.decode) + computed(chunk for chunk in plan.prefill if chunk.is_last)
    if abort is not None:
        assert s.abort(abort)
        s.check()
    # Also of a sequence that is gone, the step that is running reads where it lies.
    block = s.limits.block_size
    assert all(chunk.stop <= len(chunk.sequence.blocks) * block for chunk in plan.prefill)
    assert all(seq.next_position < len(seq.blocks) * block for seq in plan.decode)
    ended = s.commit(plan, [Frame(name, 9, () if name in ends else (1,)) for name in made], now_s)
    s.check()
    return plan, ended


def hold(s: Scheduler, name: str, length: int = 20, base: int = 0) -> None:
    """Ask for a prefix of `length` positions to be computed and kept."""
    s.hold(replace(request(name, length, frames=0, base=base)))


def names(sequences: Iterable[Sequence]) -> list[str]:
    """Whose sequences these are."""
    return [sequence.request.request_id for sequence in sequences]


def computed(chunks: Iterable[PrefillChunk]) -> list[str]:
    """Whose prompts these pieces are of."""
    return names(chunk.sequence for chunk in chunks)
