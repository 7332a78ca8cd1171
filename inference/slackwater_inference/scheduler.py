"""Continuous batching by frame: who computes what in the next step.

Pure: owns the waiting queues, the slots, the sequences' progress and, through the cache, their KV blocks.
Owns no tensor, no clock and no thread; time comes in as `now_s`.  Called by the engine.

Memory is lent by expectation: a sequence is admitted when what it and the running ones are expected to need
fits, though not all of them could reach their budgets at once.  That nobody is stuck all the same is Dijkstra's
banker's rule: a block is lent only if some order remains in which every sequence can reach its whole budget.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Self

from slackwater_inference.batch import Pace, PrefillChunk, Sequence, StepPlan
from slackwater_inference.config import EngineConfig, ModelConfig
from slackwater_inference.core import BadRequest, EndReason, Frame, QueueFull, Request
from slackwater_inference.guard import LoopDetector
from slackwater_inference.kv_cache import KvCache, piece_keys


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler must keep to; the fields are those of `EngineConfig`."""

    max_running_requests: int
    max_queued: int
    block_size: int
    num_kv_blocks: int
    max_prefill_tokens: int
    prefill_piece: int
    max_held_blocks: int = 0
    pace_frames_per_s: float = 0.0
    burst_frames: int = 10
    loop_frames: int = 0

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> Self:
        """The limits of an engine that serves `model`."""
        return cls(
            max_running_requests=config.max_running_requests,
            max_queued=config.max_queued,
            block_size=config.block_size,
            num_kv_blocks=config.kv_blocks(model),
            max_prefill_tokens=config.max_prefill_tokens,
            prefill_piece=config.prefill_piece,
            max_held_blocks=config.held_blocks(model),
            pace_frames_per_s=config.pace_frames_per_s,
            burst_frames=config.burst_frames,
            loop_frames=config.loop_limit(model),
        )


@dataclass(slots=True)
class Scheduler:
    """The state machine: `add`, `hold`, `abort` and `release_hold` at any time between `plan` and `commit`."""

    limits: Limits
    _going_on: deque[Sequence] = field(default_factory=deque)  # waiting, and somebody listens to their streams
    _waiting: deque[Sequence] = field(default_factory=deque)
    _running: dict[str, Sequence] = field(default_factory=dict)
    _holds: dict[str, Sequence] = field(default_factory=dict)  # prefixes that are held, or to be held
    _waiting_holds: deque[Sequence] = field(default_factory=deque)
    _free_slots: list[int] = field(default_factory=list)
    _cache: KvCache = field(init=False)

    def __post_init__(self) -> None:
        self._free_slots = list(reversed(range(self.limits.max_running_requests)))
        self._cache = KvCache(self.limits.num_kv_blocks, self.limits.prefill_piece // self.limits.block_size)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._going_on) + len(self._waiting)

    @property
    def kv_used_ratio(self) -> float:
        """Share of the KV blocks that is held; a cached prompt that nobody holds does not count."""
        return self._cache.num_used / self._cache.num_blocks

    def add(self, request: Request, pace: Pace | None = None, *, goes_on: bool = False) -> Sequence:
        """Take a request into the queue.

        pace: of the stream whose part it is.   goes_on: it is not the stream's first part, so somebody listens:
        it goes ahead of all that are, and always finds a place.
        Raises QueueFull when slots and queue are taken, BadRequest when it could never be admitted.
        """
        num_blocks, available = self._max_blocks(request), self.limits.num_kv_blocks - self.limits.max_held_blocks
        if num_blocks > available:
            raise BadRequest(f"the request needs {num_blocks} KV blocks, the engine has {available}; shorten the text")
        limit = self.limits.max_running_requests + self.limits.max_queued
        if not goes_on and self.num_running + len(self._waiting) >= limit:
            raise QueueFull(
                f"all {self.limits.max_running_requests} slots and {self.limits.max_queued} places are taken"
            )
        sequence = Sequence(request, pace or Pace(), self._keys(request), goes_on=goes_on)
        if self.limits.loop_frames:
            sequence.is_loop = LoopDetector(self.limits.loop_frames).is_loop
        (self._going_on if goes_on else self._waiting).append(sequence)
        return sequence

    def hold(self, request: Request) -> None:
        """Compute the whole pieces of a prompt, once there is room, and keep them until `release_hold`.

        The request's frame budget is 0.  It takes no slot.
        """
        keys = self._keys(request)
        if keys:
            whole = replace(request, prompt=request.prompt[: len(keys) * self.limits.prefill_piece])
            sequence = self._holds[request.request_id] = Sequence(whole, keys=keys)
            self._waiting_holds.append(sequence)

    def release_hold(self, request_id: str) -> None:
        """Let a held prompt go; it stays in the cache until its blocks are wanted.  Not held: nothing happens."""
        sequence = self._holds.pop(request_id, None)
        if sequence is None:
            return
        if sequence in self._waiting_holds:
            self._waiting_holds.remove(sequence)
        self._give_back(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request; its slot and blocks are free at once.  False if it is not here (any more)."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._release(sequence)
            return True
        for queue in (self._going_on, self._waiting):
            for sequence in queue:
                if sequence.request.request_id == request_id:
                    queue.remove(sequence)
                    return True
        return False

    def plan(self, now_s: float, *, is_urgent: bool = False) -> StepPlan:
        """Admit whom there is room for, in order of arrival, and say what the next step computes.

        is_urgent: a listener has little left to hear, so frames go before prompts, of which only a piece is computed.
        """
        self._admit()
        prefill = self._plan_prefill(self.limits.prefill_piece if is_urgent else self.limits.max_prefill_tokens)
        tick = self._tick(now_s)
        due = [
            s
            for s in self._running.values()
            if s.is_prefilled and (self.limits.pace_frames_per_s == 0 or s.pace.lead(tick) < self.limits.burst_frames)
        ]
        decode = self._with_room(due)
        wake_at_s = None
        if self.limits.pace_frames_per_s and self._running and not prefill and not decode:
            # All streams share one clock, so that those which are due are due together, in one batch.
            wake_at_s = (tick + 1) / self.limits.pace_frames_per_s
        return StepPlan(tuple(prefill), tuple(decode), wake_at_s, len(due) - len(decode))

    def commit(self, plan: StepPlan, frames: list[Frame], now_s: float) -> dict[str, EndReason]:
        """Note what a step made; the sequences that end with it are released and returned with the reason.

        A sequence that was aborted during the step is passed over.
        """
        for chunk in plan.prefill:
            if self._has(chunk.sequence):
                chunk.sequence.num_prefilled = chunk.stop
                self._publish(chunk)
        ended: dict[str, EndReason] = {}
        for frame in frames:
            sequence = self._running.get(frame.request_id)
            if sequence is not None and (reason := self._note_frame(sequence, frame, self._tick(now_s))):
                ended[frame.request_id] = reason
                self._release(sequence)
        return ended

    def check(self) -> None:
        """Raise AssertionError if a slot or a KV block is lost or doubled, or if somebody could be stuck."""
        everybody = [*self._running.values(), *self._holds.values()]
        self._cache.check((s.keys[: s.num_shared], s.blocks[self._num_shared_blocks(s) :]) for s in everybody)
        slots = [s.slot for s in self._running.values()] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_running_requests)), f"slots are lost or doubled: {slots}"
        waiting = [*self._going_on, *self._waiting, *self._waiting_holds]
        assert all(s.slot == -1 and not s.blocks for s in waiting), "a waiting sequence holds a slot or blocks"
        assert self._is_safe(self._cache.num_available, self._running.values()), "no order lets every sequence finish"

    # Blocks that a sequence may and will need.

    def _max_blocks(self, request: Request) -> int:
        # The last frame's key is never written: no step follows that would read it.
        return math.ceil((len(request.prompt) + max(0, request.budget.max_frames - 1)) / self.limits.block_size)

    def _need(self, sequence: Sequence) -> int:
        """Blocks that it lacks for its whole budget."""
        return self._max_blocks(sequence.request) - len(sequence.blocks)

    def _expected_need(self, sequence: Sequence) -> int:
        """Blocks that it is expected to take yet, and one more, for the texts that come out longer."""
        frames = max(sequence.request.budget.expected_frames, sequence.num_frames)
        expected = math.ceil((len(sequence.request.prompt) + frames) / self.limits.block_size) + 1
        return max(0, min(expected, self._max_blocks(sequence.request)) - len(sequence.blocks))

    def _is_safe(self, available: int, sequences: Iterable[Sequence], lent: dict[str, int] | None = None) -> bool:
        """True if an order exists in which each of `sequences` gets all that it needs, from `available` blocks and
        what those before it give back.

        lent: blocks, by request, that are no longer in `available` but not yet with their sequence.
        """
        claims = []
        for sequence in sequences:
            extra = lent.get(sequence.request.request_id, 0) if lent else 0
            own = len(sequence.blocks) - self._num_shared_blocks(sequence) + extra
            claims.append((self._need(sequence) - extra, own, sequence.keys[: sequence.num_shared]))
        num_holders: dict[bytes, int] = {}
        # Who needs least goes first: what he gives back only helps the others.
        for need, own, shared in sorted(claims, key=itemgetter(0)):
            if need > available:
                return False
            available += own
            for key in shared:  # comes back with the last of its holders; one that is a hold never does
                num_holders[key] = num_holders.get(key, self._cache.num_holders(key)) - 1
                available += 0 if num_holders[key] else self._cache.blocks_per_piece
        return True

    # Admission.

    def _admit(self) -> None:
        for queue in (self._going_on, self._waiting):
            while queue and self._free_slots:
                if not self._try_to_admit(queue[0]):
                    return  # in order: a small request that overtook a large one could starve it
                sequence = queue.popleft()
                sequence.slot = self._free_slots.pop()
                self._running[sequence.request.request_id] = sequence
        while self._waiting_holds and self._try_to_hold(self._waiting_holds[0]):
            self._waiting_holds.popleft()

    def _try_to_admit(self, sequence: Sequence) -> bool:
        """Lend a sequence the blocks of its prompt, if there is room for it; True if so."""
        hits = sequence.keys[: self._cache.num_hits(self._usable_keys(sequence))]
        sequence.blocks = self._cache.share(hits)
        sequence.num_shared = len(hits)
        num_more = math.ceil(len(sequence.request.prompt) / self.limits.block_size) - len(sequence.blocks)
        everybody = [*self._running.values(), *([] if sequence.is_prefix else [sequence])]
        available = self._cache.num_available
        expected = sum(map(self._expected_need, everybody)) + (num_more if sequence.is_prefix else 0)
        lent = {sequence.request.request_id: num_more}
        if expected > available or not self._is_safe(available - num_more, everybody, lent):
            self._give_back(sequence)
            sequence.blocks, sequence.num_shared = [], 0
            return False
        sequence.blocks += self._cache.allocate(num_more)
        sequence.num_prefilled = sequence.num_shared * self.limits.prefill_piece
        return True

    def _try_to_hold(self, sequence: Sequence) -> bool:
        held = {key for s in self._holds.values() if s.blocks for key in s.keys} | set(sequence.keys)
        return len(held) * self._cache.blocks_per_piece <= self.limits.max_held_blocks and self._try_to_admit(sequence)

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.request.request_id]
        self._free_slots.append(sequence.slot)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        # The sequence keeps its own note of slot and blocks: a step that is running may still write there,
        # and nobody else can be given them before the next `plan`.
        self._cache.free(sequence.blocks[self._num_shared_blocks(sequence) :])
        self._cache.unshare(sequence.keys[: sequence.num_shared])

    # Prompts, in pieces whose bounds depend on the prompt alone: not on the neighbours and not on the cache,
    # so that a request's arithmetic does not, either.

    def _keys(self, request: Request) -> tuple[bytes, ...]:
        return piece_keys(request.namespace, request.prompt, self.limits.prefill_piece)

    def _usable_keys(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Of the pieces that need not be computed: the first frame follows from the last position, which is."""
        last = len(sequence.request.prompt) - (0 if sequence.is_prefix else 1)
        return sequence.keys[: last // self.limits.prefill_piece]

    def _num_shared_blocks(self, sequence: Sequence) -> int:
        return sequence.num_shared * self._cache.blocks_per_piece

    def _plan_prefill(self, budget: int) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        running = sorted(self._running.values(), key=lambda s: not s.goes_on)
        for sequence in [*running, *(s for s in self._holds.values() if s.blocks)]:
            if sequence.is_prefilled:
                continue
            self._adopt(sequence)
            for start in range(sequence.num_prefilled, len(sequence.request.prompt), self.limits.prefill_piece):
                stop = min(len(sequence.request.prompt), start + self.limits.prefill_piece)
                if stop - start > budget:
                    return chunks
                budget -= stop - start
                chunks.append(PrefillChunk(sequence, start, stop))
        return chunks

    def _adopt(self, sequence: Sequence) -> None:
        """Share the next pieces of a prompt if somebody else has computed them since it was admitted."""
        usable = self._usable_keys(sequence)
        while sequence.num_shared < len(usable) and self._cache.num_hits([usable[sequence.num_shared]]):
            self._share_piece(sequence)
            sequence.num_prefilled += self.limits.prefill_piece

    def _publish(self, chunk: PrefillChunk) -> None:
        """Put a piece that was just computed into the cache, if it is a whole one."""
        if chunk.stop - chunk.start == self.limits.prefill_piece:
            self._share_piece(chunk.sequence)

    def _share_piece(self, sequence: Sequence) -> None:
        """Make the first piece that is its own a shared one."""
        start = self._num_shared_blocks(sequence)
        place = slice(start, start + self._cache.blocks_per_piece)
        sequence.blocks[place] = self._cache.publish(sequence.keys[sequence.num_shared], sequence.blocks[place])
        sequence.num_shared += 1

    # Frames.

    def _with_room(self, due: list[Sequence]) -> list[Sequence]:
        """Those of `due` that have a block for their next position, given now where one is needed and can be lent."""
        is_ample = sum(map(self._need, self._running.values())) <= self._cache.num_available
        with_room = []
        for sequence in due:
            if sequence.next_position < len(sequence.blocks) * self.limits.block_size:
                with_room.append(sequence)
                continue
            available = self._cache.num_available
            lent = {sequence.request.request_id: 1}
            if is_ample or (available and self._is_safe(available - 1, self._running.values(), lent)):
                sequence.blocks += self._cache.allocate(1)
                with_room.append(sequence)
        return with_room

    @staticmethod
    def _note_frame(sequence: Sequence, frame: Frame, tick: int) -> EndReason | None:
        if frame.is_end:
            return EndReason.STOP
        sequence.num_frames += 1
        sequence.pace.note_frame(tick)
        if sequence.is_loop is not None and sequence.is_loop(frame.codes):
            return EndReason.LOOP
        return EndReason.LENGTH if sequence.num_frames == sequence.request.budget.max_frames else None

    def _has(self, sequence: Sequence) -> bool:
        request_id = sequence.request.request_id
        return self._running.get(request_id) is sequence or self._holds.get(request_id) is sequence

    def _tick(self, now_s: float) -> int:
        return math.floor(now_s * self.limits.pace_frames_per_s)
