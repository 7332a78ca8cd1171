"""The engine: texts in, streams of audio out.

Owns the step loop, in a thread of its own, the lock, and the engine's stages.  Does not own what a stream says
(jobs), who runs (scheduler), the arithmetic (model runner, vocoder) or HTTP (api).  Called from one asyncio event
loop; every public method may be called while a step is running.

    open, say -> scheduler.add | plan -> runner.step -> commit -> vocoder -> SpeechStream   (close at any point)
"""

import itertools
import logging
import secrets
import threading
import time

from slackwater_inference.batch import StepPlan
from slackwater_inference.checkpoint import Loaded
from slackwater_inference.codec.codec import Codec
from slackwater_inference.config import EngineConfig
from slackwater_inference.core import (
    BadRequest,
    Draining,
    EngineError,
    EngineFailed,
    EngineStatus,
    SamplingParams,
    Speech,
    Stage,
    StepResult,
)
from slackwater_inference.jobs import MAX_SEED, Job, Jobs, smoothed
from slackwater_inference.metrics import EngineMetrics
from slackwater_inference.model_runner import ModelRunner
from slackwater_inference.scheduler import Limits, Scheduler
from slackwater_inference.stream import SpeechStream
from slackwater_inference.vocoder import Vocoder

logger = logging.getLogger(__name__)

_CHECK_EVERY_STEPS = 256


class Engine:
    """One model, its scheduler and its step loop."""

    def __init__(self, config: EngineConfig, loaded: Loaded) -> None:
        """Build everything in host memory; no thread runs before `start`."""
        self.config = config
        self.model = model = loaded.config
        self.metrics = EngineMetrics(model.name, config.max_running_requests)
        self.codec = Codec(model.codec, model.num_codebooks, model.num_semantic, loaded.codec_weights)
        self._scheduler = Scheduler(Limits.of(config, model))
        self._jobs = Jobs(config, model, loaded.tokenizer, self._scheduler, self.metrics)
        self._runner = ModelRunner(
            model,
            loaded.weights,
            max_running_requests=config.max_running_requests,
            num_kv_blocks=self._scheduler.limits.num_kv_blocks,
            block_size=config.block_size,
        )
        self._vocoder = Vocoder(
            self.codec,
            min_chunk_frames=config.min_chunk_frames,
            max_chunk_frames=config.max_chunk_frames,
            low_buffer_frames=config.low_buffer_frames,
            max_frames=config.max_vocoder_frames,
        )
        # Guards the scheduler, the jobs and the stage.  Never held while the model computes.
        self._changed = threading.Condition()
        self._unclosed: set[str] = set()
        self._stage = Stage.STARTING
        self._is_stopping = False
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._frames_total = 0
        self._num_steps = 0
        self._step_s: float | None = None
        self.metrics.watch_queue_age(self._queue_age_s)

    def warm_up(self) -> None:
        """Speak a word to nobody before `start`, so that the first listener does not wait for torch's lazy set-up."""
        codes = self._vocoder.open()
        codes.begin_part(0, time.monotonic())
        self._scheduler.add(self._jobs.request("warm", "warm", Speech(), SamplingParams()))
        while plan := self._scheduler.plan(time.monotonic()):
            result = self._runner.step(plan)
            ended = self._scheduler.commit(plan, result.frames, time.monotonic())
            for frame in result.frames:
                if not frame.is_end:
                    codes.put(frame.codes)
            if ended:
                codes.end_part()
            for _ in self._vocoder.run([codes], time.monotonic()):
                pass
        while codes.num_pending:
            for _ in self._vocoder.run([codes], time.monotonic()):
                pass

    def start(self) -> None:
        """Start the step loop; streams are opened from now on."""
        with self._changed:
            self._stage = Stage.READY
        self._thread.start()

    def stand_by(self) -> None:
        """Say that the engine is built but takes nothing before `start`."""
        with self._changed:
            self._stage = Stage.STANDBY

    def drain(self) -> None:
        """Open no new stream; those that are open go on until their callers end them.  See `is_idle`."""
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
        """True when every stream was closed by its caller, who may still be sending the last of its audio before."""
        with self._changed:
            return not self._unclosed

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

    def open(self, speech: Speech, *, hold_prefix: bool = False) -> SpeechStream:
        """Open a stream; call it on the event loop that will read it.  It takes a place once something is said.

        hold_prefix: compute what every prompt of its voice begins with now, and keep that while the stream is open.
        Raises Draining, EngineFailed, or BadRequest for a voice that the model cannot read.
        """
        stream = SpeechStream(f"r{next(self._ids)}", self)
        sampling = speech.sampling or SamplingParams(seed=secrets.randbelow(MAX_SEED))
        job = Job(stream, speech, sampling, self._vocoder.open(speech.min_chunk_frames), time.monotonic())
        with self._changed:
            if self._stage is Stage.FAILED:
                raise EngineFailed("the engine has failed and is being restarted")
            if self._stage is not Stage.READY:
                self.metrics.count_rejected("draining")
                raise Draining(f"the engine is {self._stage}; ask another replica")
            self._jobs.add(job, hold_prefix=hold_prefix)
            self._unclosed.add(stream.request_id)
            self._changed.notify()
        return stream

    # What a SpeechStream asks for; each is described there.

    def say_part(self, stream: SpeechStream, text: str) -> int:
        """See SpeechStream.say."""
        if not text.strip():
            raise BadRequest("text is empty; send at least one character to speak")
        num_bytes = len(text.encode())
        if num_bytes > self.config.max_text_bytes:
            self.metrics.count_rejected("too_long")
            raise BadRequest(
                f"text must be at most {self.config.max_text_bytes} UTF-8 bytes, got {num_bytes}; send it in parts"
            )
        with self._changed:
            job = self._jobs.of(stream)
            if job is None or job.has_ended:
                raise stream.error or ValueError("say must come before end and close")
            index = self._jobs.say(job, text, self._step_s)
            self._note_load()
            self._changed.notify()
            return index

    def end_parts(self, stream: SpeechStream) -> None:
        """See SpeechStream.end."""
        with self._changed:
            job = self._jobs.of(stream)
            if job is not None:
                self._jobs.end(job)

    def close_stream(self, stream: SpeechStream) -> None:
        """See SpeechStream.close."""
        with self._changed:
            self._unclosed.discard(stream.request_id)
            job = self._jobs.of(stream)
            if job is None:
                return  # it had ended
            self._jobs.forget(job)
            self._note_load()
            self._changed.notify()  # its slot may be someone's
        if not job.has_spoken or not job.has_ended:
            self.metrics.count_abort(job.phase)
            logger.info("closing request=%s phase=%s", stream.request_id, job.phase)

    def note_read(self, stream: SpeechStream, num_frames: int) -> None:
        """The caller took `num_frames` frames of audio; a part that waited for that begins."""
        with self._changed:
            job = self._jobs.of(stream)
            if job is not None:
                self._jobs.note_read(job, num_frames)
                self._changed.notify()

    def _queue_age_s(self) -> float:
        with self._changed:
            return self._jobs.oldest_wait_s()

    def _note_load(self) -> None:
        self.metrics.requests_running.set(self._scheduler.num_running)
        self.metrics.requests_waiting.set(self._scheduler.num_waiting)
        self.metrics.kv_used_ratio.set(self._scheduler.kv_used_ratio)

    # In the engine's thread.

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
        if plan:
            self._take(plan, self._runner.step(plan))
        self._voice()
        self._num_steps += 1
        if self._num_steps % _CHECK_EVERY_STEPS == 0:
            with self._changed:
                self._scheduler.check()
        return True

    def _next_plan(self) -> StepPlan | None:
        """Wait until there is something to compute, which may be audio only; None when the loop is to end."""
        with self._changed:
            while not self._is_stopping:
                now_s = time.monotonic()
                is_urgent = self._vocoder.is_anyone_low(self._jobs.by_codes, now_s)
                plan = self._scheduler.plan(now_s, is_urgent=is_urgent)
                due_s = self._vocoder.next_due_s(self._jobs.by_codes, now_s)
                if plan or (due_s is not None and due_s <= now_s):
                    self._jobs.note_admitted(plan, now_s)
                    self._note_load()
                    return plan
                wake_s = min((at_s for at_s in (plan.wake_at_s, due_s) if at_s is not None), default=None)
                self._changed.wait(None if wake_s is None else max(0.0, wake_s - now_s))
            return None

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        """Note a step's frames; those of streams that went away meanwhile are dropped."""
        now_s = time.monotonic()
        with self._changed:
            ended = self._scheduler.commit(plan, result.frames, now_s)
            num_frames = self._jobs.take(result.frames, ended)
            self._frames_total += num_frames
            if plan.decode:
                self._step_s = smoothed(self._step_s, result.decode_s)
            self._note_load()
        self.metrics.count_tokens(num_frames, self.model.num_codebooks)
        self.metrics.kv_waits.inc(plan.num_kept_waiting)
        if plan.prefill:
            self.metrics.observe_step("prefill", len(plan.prefill), result.prefill_s)
        if plan.decode:
            self.metrics.observe_step("decode", len(plan.decode), result.decode_s)

    def _voice(self) -> None:
        """Decode and hand over the audio that is due."""
        with self._changed:
            jobs = dict(self._jobs.by_codes)
        began_s = time.perf_counter()
        chunks = list(self._vocoder.run(jobs, time.monotonic()))
        if chunks:
            self.metrics.observe_step("codec", len(chunks), time.perf_counter() - began_s)
        with self._changed:
            for codes, chunk in chunks:
                self._jobs.deliver(jobs[codes], chunk, time.monotonic())
            self._note_load()
        num_frames = sum(chunk.num_frames for _, chunk in chunks)
        self.metrics.audio_seconds_total.inc(num_frames / self.model.codec.frame_rate_hz)

    def _break_streams(self, error: EngineError) -> None:
        with self._changed:
            for job in self._jobs.all():
                self._jobs.forget(job)
                job.stream.put(error)
            self._note_load()
