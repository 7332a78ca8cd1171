"""The engine: requests in, streams of audio out.

Owns the step loop, in a thread of its own, and each request's stream from arrival to its end.  Does not
own who runs (scheduler), the arithmetic (model runner, vocoder) or HTTP (api).  Called from one asyncio
event loop; every public method may be called while a step is running.

    submit -> scheduler.add | plan -> runner.step -> commit -> vocoder -> AudioStream   (abort at any point)
"""

import asyncio
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slackwater_inference.batch import StepPlan
from slackwater_inference.codec.decoder import CodecDecoder
from slackwater_inference.config import EngineConfig, ModelConfig
from slackwater_inference.core import (
    BadRequest,
    Chunk,
    Draining,
    EngineError,
    EngineFailed,
    EngineStatus,
    QueueFull,
    Request,
    SamplingParams,
    Stage,
    StepResult,
)
from slackwater_inference.metrics import EngineMetrics
from slackwater_inference.model.weights import seeded_weights
from slackwater_inference.model_runner import ModelRunner
from slackwater_inference.scheduler import Limits, Scheduler
from slackwater_inference.text.prompt import encode_bytes, frame_budget, prompt_columns
from slackwater_inference.vocoder import CodeStream, Vocoder

logger = logging.getLogger(__name__)

_SMOOTHING = 0.1  # weight of the newest value in the running means
_MAX_RETRY_AFTER_S = 60
_CHECK_EVERY_STEPS = 256


class AudioStream:
    """One request's audio, as an async iterator of `Chunk`; ends cleanly or raises an EngineError.

    Whoever holds it must `close` it, also when it was not read to its end: that frees the slot.
    """

    def __init__(self, request_id: str, on_close: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        # Unbounded here, but a request's frame budget bounds what can ever be put in.
        self._items: asyncio.Queue[Chunk | EngineError | None] = asyncio.Queue()

    def __aiter__(self) -> "AudioStream":
        return self

    async def __anext__(self) -> Chunk:
        item = await self._items.get()
        if isinstance(item, Chunk):
            return item
        self._items.put_nowait(item)  # the end stays the end for a second reader
        if item is None:
            raise StopAsyncIteration
        raise item

    def close(self) -> None:
        """Stop the request if it still runs.  May be called twice."""
        self._on_close(self.request_id)

    def put(self, item: Chunk | EngineError | None) -> None:
        """Hand over an item from the engine's thread; None is the clean end."""
        # A loop that is closed has no reader left.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


@dataclass(slots=True, eq=False)
class _Job:
    """What the engine knows of an open request."""

    stream: AudioStream
    codes: CodeStream
    submitted_s: float
    admitted_s: float | None = None
    first_audio_s: float | None = None

    @property
    def phase(self) -> str:
        """What the request waits for, as `tts_client_aborts_total` calls it."""
        if self.admitted_s is None:
            return "queued"
        return "first_audio" if self.first_audio_s is None else "streaming"


class Engine:
    """One model, its scheduler and its step loop."""

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        """Build everything in host memory; no thread runs before `start`."""
        began_s = time.perf_counter()
        self.config = config
        self.model = model
        self.metrics = EngineMetrics(model.name, config.max_running_requests)
        num_kv_blocks = config.kv_blocks(model)
        self._scheduler = Scheduler(
            Limits(
                max_running_requests=config.max_running_requests,
                max_queued=config.max_queued,
                block_size=config.block_size,
                num_kv_blocks=num_kv_blocks,
                max_prefill_tokens=config.max_prefill_tokens,
                pace_frames_per_s=config.pace_frames_per_s,
                burst_frames=config.burst_frames,
            )
        )
        self._runner = ModelRunner(
            model,
            seeded_weights(model, config.seed),
            max_running_requests=config.max_running_requests,
            num_kv_blocks=num_kv_blocks,
            block_size=config.block_size,
        )
        self._vocoder = Vocoder(
            CodecDecoder(model.codec, model.num_codebooks, model.num_semantic, config.seed),
            min_chunk_frames=config.min_chunk_frames,
            max_chunk_frames=config.max_chunk_frames,
            low_buffer_frames=config.low_buffer_frames,
            max_batch_frames=config.max_vocoder_frames,
        )
        # Guards the scheduler, the jobs and the stage.  Never held while the model computes.
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._stage = Stage.STARTING
        self._is_stopping = False
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._frames_total = 0
        self._num_steps = 0
        self._step_s: float | None = None
        self._service_s: float | None = None
        self.metrics.model_load_seconds.observe(time.perf_counter() - began_s)

    def warm_up(self) -> None:
        """Speak a word to nobody before `start`, so that the first listener does not wait for torch's lazy set-up."""
        stream = self._vocoder.open()
        self._scheduler.add(self._request("warm", 0.7, 0.7, None, seed=0))
        while plan := self._scheduler.plan(time.monotonic()):
            result = self._runner.step(plan)
            ended = self._scheduler.commit(plan, result.frames, time.monotonic())
            stream.pending += [frame.codes for frame in result.frames if not frame.is_end]
            stream.has_ended = bool(ended)
            for _ in self._vocoder.run([stream], time.monotonic()):
                pass

    def start(self) -> None:
        """Start the step loop; requests are taken from now on."""
        with self._changed:
            self._stage = Stage.READY
        self._thread.start()

    def stand_by(self) -> None:
        """Say that the engine is built but takes nothing before `start`."""
        with self._changed:
            self._stage = Stage.STANDBY

    def drain(self) -> None:
        """Take nothing new; what was accepted is finished.  See `status` for when that is done."""
        with self._changed:
            if self._stage is Stage.READY:
                self._stage = Stage.DRAINING

    def stop(self) -> None:
        """End the step loop at once; open streams break."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._break_streams(EngineFailed("the engine was stopped"))

    @property
    def is_idle(self) -> bool:
        """True when no accepted request is unfinished."""
        with self._changed:
            return not self._jobs

    def status(self) -> EngineStatus:
        """The engine now."""
        with self._changed:
            return EngineStatus(
                stage=self._stage,
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                slots=self.config.max_running_requests,
                frames_total=self._frames_total,
                step_s=self._step_s,
                kv_used_ratio=self._scheduler.kv_used_ratio,
            )

    def submit(
        self,
        text: str,
        *,
        temperature: float = 0.7,
        top_p: float = 0.7,
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ) -> AudioStream:
        """Take a request; call it on the event loop that will read the stream.

        max_new_tokens: at most so many frames.   seed: None draws one.
        Raises BadRequest (empty or too long text), QueueFull, Draining or EngineFailed.
        """
        request = self._request(text, temperature, top_p, max_new_tokens, seed)
        stream = AudioStream(request.request_id, self._close)
        job = _Job(stream, self._vocoder.open(), time.monotonic())
        with self._changed:
            if self._stage is Stage.FAILED:
                raise EngineFailed("the engine has failed and is being restarted")
            if self._stage is not Stage.READY:
                self.metrics.count_rejected("draining")
                raise Draining(f"the engine is {self._stage}; ask another replica")
            try:
                self._scheduler.add(request)
            except QueueFull as full:
                self.metrics.count_rejected("queue_full")
                raise QueueFull(str(full), retry_after_s=self._retry_after_s(request)) from full
            self._jobs[request.request_id] = job
            self._note_load()
            self._changed.notify()
        return stream

    def _request(
        self, text: str, temperature: float, top_p: float, max_new_tokens: int | None, seed: int | None
    ) -> Request:
        if not text.strip():
            raise BadRequest("text is empty; send at least one character to speak")
        num_bytes = len(text.encode())
        if num_bytes > self.config.max_text_bytes:
            self.metrics.count_rejected("too_long")
            raise BadRequest(
                f"text must be at most {self.config.max_text_bytes} UTF-8 bytes, got {num_bytes}; send it in parts"
            )
        prompt = prompt_columns(text, self.model, encode_bytes)
        budget = frame_budget(text, len(encode_bytes(text)), max_new_tokens, self.model)
        longest = self.model.text_config.max_seq_len
        if len(prompt) + budget.max_frames > longest:
            self.metrics.count_rejected("too_long")
            raise BadRequest(
                f"text and its audio need {len(prompt) + budget.max_frames} positions, the model has {longest}; "
                "send it in parts"
            )
        sampling = SamplingParams(temperature, top_p, seed=secrets.randbits(62) if seed is None else seed)
        return Request(f"r{next(self._ids)}", prompt, budget, sampling)

    def _retry_after_s(self, request: Request) -> int:
        """Whole seconds until the queue has moved on by its own length, at the measured service rate."""
        service_s = self._service_s
        if service_s is None:  # nothing has finished yet: what this request would take
            service_s = request.budget.expected_frames * (self._step_s or 0.0)
            if self.config.pace_frames_per_s:
                service_s = max(service_s, request.budget.expected_frames / self.config.pace_frames_per_s)
        ahead = self._scheduler.num_waiting + 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(ahead * service_s / self.config.max_running_requests)))

    def _close(self, request_id: str) -> None:
        with self._changed:
            job = self._jobs.pop(request_id, None)
            if job is None:
                return  # it had ended
            self._scheduler.abort(request_id)
            self._note_load()
            self._changed.notify()  # its slot may be someone's
        self.metrics.count_abort(job.phase)
        logger.info("aborting request=%s phase=%s", request_id, job.phase)

    def _run(self) -> None:
        has_stopped = False
        try:
            while self._step():
                pass
            has_stopped = True
        finally:
            if not has_stopped:  # our own fault; the exception itself goes on to the thread's hook, which prints it
                with self._changed:
                    self._stage = Stage.FAILED
                self._break_streams(EngineFailed("the engine failed while this request was in it"))

    def _step(self) -> bool:
        """One step; False when the loop is to end."""
        plan = self._next_plan()
        if plan is None:
            return False
        result = self._runner.step(plan)
        self._take(plan, result)
        self._voice()
        self._num_steps += 1
        if self._num_steps % _CHECK_EVERY_STEPS == 0:
            with self._changed:
                self._scheduler.check()
        return True

    def _next_plan(self) -> StepPlan | None:
        """Wait until there is something to compute; None when the loop is to end."""
        with self._changed:
            while not self._is_stopping:
                now_s = time.monotonic()
                plan = self._scheduler.plan(now_s)
                for chunk in plan.prefill:
                    job = self._jobs[chunk.sequence.request.request_id]
                    if job.admitted_s is None:
                        job.admitted_s = now_s
                        self.metrics.queue_seconds.observe(now_s - job.submitted_s)
                if plan:
                    self._note_load()
                    return plan
                self._changed.wait(None if plan.wake_at_s is None else max(0.0, plan.wake_at_s - now_s))
            return None

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        """Note a step's frames; those of requests that went away meanwhile are dropped."""
        now_s = time.monotonic()
        num_frames = 0
        with self._changed:
            ended = self._scheduler.commit(plan, result.frames, now_s)
            for frame in result.frames:
                job = self._jobs.get(frame.request_id)
                if job is not None:
                    if not frame.is_end:
                        job.codes.pending.append(frame.codes)
                        num_frames += 1
                    job.codes.has_ended = frame.request_id in ended
            self._frames_total += num_frames
            if plan.decode:
                self._step_s = _smoothed(self._step_s, result.decode_s)
            self._note_load()
        self.metrics.semantic_tokens_total.inc(num_frames)
        self.metrics.codebook_tokens_total.inc(num_frames * (self.model.num_codebooks - 1))
        if plan.prefill:
            self.metrics.observe_step("prefill", len(plan.prefill), result.prefill_s)
        if plan.decode:
            self.metrics.observe_step("decode", len(plan.decode), result.decode_s)

    def _voice(self) -> None:
        """Decode and hand over the audio that is due, and end the streams that have all of theirs."""
        with self._changed:
            jobs = {job.codes: job for job in self._jobs.values()}
        more = True
        while more:
            began_s = time.perf_counter()
            chunks = list(self._vocoder.run(jobs, time.monotonic()))
            more = bool(chunks)
            if chunks:
                self.metrics.observe_step("codec", len(chunks), time.perf_counter() - began_s)
            for codes, chunk in chunks:
                self._deliver(jobs[codes], chunk)
        for codes, job in jobs.items():
            if codes.has_ended:
                self._finish(job)

    def _deliver(self, job: _Job, chunk: Chunk) -> None:
        if job.first_audio_s is None:
            job.first_audio_s = time.monotonic()
            self.metrics.first_audio_seconds.observe(job.first_audio_s - job.submitted_s)
        self.metrics.audio_seconds_total.inc(chunk.num_frames / self.model.codec.frame_rate_hz)
        job.stream.put(chunk)

    def _finish(self, job: _Job) -> None:
        now_s = time.monotonic()
        with self._changed:
            if self._jobs.pop(job.stream.request_id, None) is None:
                return  # closed by its client a moment ago
            if job.admitted_s is not None:
                self._service_s = _smoothed(self._service_s, now_s - job.admitted_s)
        self.metrics.request_seconds.observe(now_s - job.submitted_s)
        job.stream.put(None)

    def _break_streams(self, error: EngineError) -> None:
        with self._changed:
            jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.stream.put(error)

    def _note_load(self) -> None:
        self.metrics.requests_running.set(self._scheduler.num_running)
        self.metrics.requests_waiting.set(self._scheduler.num_waiting)
        self.metrics.kv_used_ratio.set(self._scheduler.kv_used_ratio)


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SMOOTHING * (value - mean)
