"""Continuous batching by frame: who computes what in the next step.

Pure: owns the waiting queue, the slots, the sequences' progress and, through the allocator, their KV
blocks.  Owns no tensor, no clock and no thread; time comes in as `now_s`.  Called by the engine.

A sequence's whole frame budget is reserved when it is admitted.  The budget follows from its text
(`prompt.frame_budget`), not from the caller's limit, so little is wasted, and a stream that has started
never waits for a block: it has a listener, who would hear that.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from slackwater_inference.batch import PrefillChunk, Sequence, StepPlan
from slackwater_inference.core import BadRequest, EndReason, Frame, QueueFull, Request
from slackwater_inference.kv_cache import BlockAllocator


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler must keep to; the fields are those of `EngineConfig`."""

    max_running_requests: int
    max_queued: int
    block_size: int
    num_kv_blocks: int
    max_prefill_tokens: int
    pace_frames_per_s: float = 0.0
    burst_frames: int = 10


@dataclass(slots=True)
class Scheduler:
    """The state machine: `add` and `abort` at any time between `plan` and `commit`."""

    limits: Limits
    _waiting: deque[Sequence] = field(default_factory=deque)
    _running: dict[str, Sequence] = field(default_factory=dict)
    _free_slots: list[int] = field(default_factory=list)
    _allocator: BlockAllocator = field(init=False)

    def __post_init__(self) -> None:
        self._free_slots = list(reversed(range(self.limits.max_running_requests)))
        self._allocator = BlockAllocator(self.limits.num_kv_blocks)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    @property
    def kv_used_ratio(self) -> float:
        """Share of the KV blocks that is held."""
        return self._allocator.num_used / self._allocator.num_blocks

    def add(self, request: Request) -> Sequence:
        """Take a request into the queue.

        Raises QueueFull when slots and queue are taken, BadRequest when it could never be admitted.
        """
        num_blocks = self._num_blocks(request)
        if num_blocks > self._allocator.num_blocks:
            available = self._allocator.num_blocks
            raise BadRequest(f"the request needs {num_blocks} KV blocks, the engine has {available}; shorten the text")
        if self.num_running + self.num_waiting >= self.limits.max_running_requests + self.limits.max_queued:
            raise QueueFull(
                f"all {self.limits.max_running_requests} slots and {self.limits.max_queued} places are taken"
            )
        sequence = Sequence(request)
        self._waiting.append(sequence)
        return sequence

    def abort(self, request_id: str) -> bool:
        """Forget a request; its slot and blocks are free at once.  False if it is not here (any more)."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._release(sequence)
            return True
        for sequence in self._waiting:
            if sequence.request.request_id == request_id:
                self._waiting.remove(sequence)
                return True
        return False

    def plan(self, now_s: float) -> StepPlan:
        """Admit whom there is room for, in order of arrival, and say what the next step computes."""
        self._admit()
        prefill: list[PrefillChunk] = []
        budget = self.limits.max_prefill_tokens
        for sequence in self._running.values():
            if sequence.is_prefilled:
                continue
            # Chunk bounds depend on the prompt alone, not on what else is in this step, so that a
            # request's arithmetic does not depend on its neighbours.
            start = sequence.num_prefilled
            stop = min(len(sequence.request.prompt), start + self.limits.max_prefill_tokens)
            if stop - start > budget:
                break
            budget -= stop - start
            prefill.append(PrefillChunk(sequence, start, stop))
        decoding = [s for s in self._running.values() if s.is_prefilled]
        due = tuple(s for s in decoding if self._is_due(s, now_s))
        wake_at_s = None
        if decoding and not due and not prefill:
            wake_at_s = (self._tick(now_s) + 1) / self.limits.pace_frames_per_s
        return StepPlan(tuple(prefill), due, wake_at_s)

    def commit(self, plan: StepPlan, frames: list[Frame], now_s: float) -> dict[str, EndReason]:
        """Note what a step made; the sequences that end with it are released and returned with the reason.

        A sequence that was aborted during the step is passed over.
        """
        for chunk in plan.prefill:
            if self._holds(chunk.sequence):
                chunk.sequence.num_prefilled = chunk.stop
                chunk.sequence.first_tick = self._tick(now_s)
        ended: dict[str, EndReason] = {}
        for frame in frames:
            sequence = self._running.get(frame.request_id)
            if sequence is None:
                continue
            if frame.is_end:
                ended[frame.request_id] = EndReason.STOP
            else:
                sequence.num_frames += 1
                if sequence.num_frames == sequence.request.budget.max_frames:
                    ended[frame.request_id] = EndReason.LENGTH
        for request_id in ended:
            self._release(self._running[request_id])
        return ended

    def check(self) -> None:
        """Raise AssertionError if a slot or a KV block is lost, doubled or held by nobody."""
        self._allocator.check(s.blocks for s in self._running.values())
        slots = [s.slot for s in self._running.values()] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_running_requests)), f"slots are lost or doubled: {slots}"
        assert all(s.slot == -1 and not s.blocks for s in self._waiting), "a waiting sequence holds a slot or blocks"

    def _num_blocks(self, request: Request) -> int:
        # The last frame's key is never written: no step follows that would read it.
        return math.ceil((len(request.prompt) + request.budget.max_frames - 1) / self.limits.block_size)

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            num_blocks = self._num_blocks(self._waiting[0].request)
            if num_blocks > self._allocator.num_free:
                return  # in order: a small request that overtook a large one could starve it
            sequence = self._waiting.popleft()
            sequence.blocks = self._allocator.allocate(num_blocks)
            sequence.slot = self._free_slots.pop()
            self._running[sequence.request.request_id] = sequence

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.request.request_id]
        self._allocator.free(sequence.blocks)
        # The sequence keeps its own note of slot and blocks: a step that is running may still write there,
        # and nobody else can be given them before the next `plan`.
        self._free_slots.append(sequence.slot)

    def _holds(self, sequence: Sequence) -> bool:
        return self._running.get(sequence.request.request_id) is sequence

    def _tick(self, now_s: float) -> int:
        return math.floor(now_s * self.limits.pace_frames_per_s)

    def _is_due(self, sequence: Sequence, now_s: float) -> bool:
        if self.limits.pace_frames_per_s == 0:
            return True
        # All streams share one clock, so that those which are due are due together, in one batch.
        allowed = self.limits.burst_frames + self._tick(now_s) - sequence.first_tick
        return sequence.num_frames < allowed
