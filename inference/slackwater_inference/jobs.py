"""The open streams, from what is said to the scheduler and from frames to audio.

Owns each stream's parts and counts, and the requests that are made of them.  Owns no thread and no lock: the
engine calls every method under its own.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from slackwater_inference.batch import Pace, StepPlan
from slackwater_inference.config import EngineConfig, ModelConfig
from slackwater_inference.core import (
    BadRequest,
    Chunk,
    Codes,
    EndReason,
    EngineError,
    Frame,
    FrameBudget,
    QueueFull,
    Request,
    SamplingParams,
    Speech,
)
from slackwater_inference.metrics import EngineMetrics
from slackwater_inference.scheduler import Scheduler
from slackwater_inference.stream import SpeechStream
from slackwater_inference.text.prompt import PromptBuilder, frame_budget
from slackwater_inference.text.tokenizer import Tokenizer
from slackwater_inference.vocoder import CodeStream

MAX_SEED = 2**62
_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that every part of a stream has a seed of its own
_MAX_RETRY_AFTER_S = 60
_LEAST_ROOM = 2  # times the expected length of a text
_SMOOTHING = 0.1  # weight of the newest value in the running means


def smoothed(mean: float | None, value: float) -> float:
    """A running mean, moved towards `value`."""
    return value if mean is None else mean + _SMOOTHING * (value - mean)


@dataclass(slots=True, eq=False)
class Part:
    """One part of a stream's text.  request_id: of its sequence in the scheduler."""

    request_id: str
    index: int
    text: str
    said_s: float
    is_admitted: bool = False
    codes: list[tuple[int, ...]] = field(default_factory=list)  # what was made of it so far


@dataclass(slots=True, eq=False)
class Job:
    """What the engine knows of an open stream."""

    stream: SpeechStream
    speech: Speech
    sampling: SamplingParams
    codes: CodeStream
    opened_s: float
    pace: Pace = field(default_factory=Pace)
    waiting: deque[Part] = field(default_factory=deque)
    """Parts behind the one that is spoken."""
    part: Part | None = None
    """The part that is spoken, or waits for a slot."""
    previous: tuple[str, Codes] | None = None
    """Text and codes of the part before it."""
    num_parts: int = 0
    num_fixed: int = 0
    """Positions of its prompts beside those of the text; known from its first part on."""
    has_ended: bool = False
    """No further part follows."""
    num_made: int = 0
    num_delivered: int = 0
    num_unread: int = 0
    """Frames made, of those turned into audio, and of those not read by the caller."""
    first_text_s: float | None = None
    admitted_s: float | None = None
    first_audio_s: float | None = None
    speaking_since_s: float | None = None
    """Since when there is text to speak; None between two texts."""
    speaking_s: float = 0.0
    """Seconds in which there was text to speak, up to `speaking_since_s`."""

    @property
    def has_spoken(self) -> bool:
        """True if nothing that was said is without its audio."""
        return self.part is None and not self.waiting and self.num_made == self.num_delivered

    @property
    def phase(self) -> str:
        """What the stream waits for, as `tts_client_aborts_total` calls it."""
        if self.first_audio_s is not None:
            return "streaming"
        return "queued" if self.admitted_s is None else "first_audio"


class Jobs:
    """The open streams of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._model = model
        self._longest = config.longest(model)
        self._tokenizer = tokenizer
        self._prompts = PromptBuilder(model, tokenizer)
        self._scheduler = scheduler
        self._metrics = metrics
        self._open: dict[str, Job] = {}
        self._speaking: dict[str, Job] = {}  # by the request id of the part that is in the scheduler
        self.by_codes: dict[CodeStream, Job] = {}
        self._service_s: float | None = None  # mean seconds of a stream from its slot to its end

    def __len__(self) -> int:
        return len(self._open)

    def of(self, stream: SpeechStream) -> Job | None:
        """What is known of a stream; None if it is over."""
        return self._open.get(stream.request_id)

    def all(self) -> list[Job]:
        """Every open stream."""
        return list(self._open.values())

    def oldest_wait_s(self) -> float:
        """How long the part that has waited longest for its slot has done so."""
        waiting = [job.part.said_s for job in self._speaking.values() if job.part and not job.part.is_admitted]
        return time.monotonic() - min(waiting) if waiting else 0.0

    # From text to the scheduler.

    def add(self, job: Job, *, hold_prefix: bool) -> None:
        """Take a new stream.  hold_prefix: compute what its prompts begin with now.

        Raises BadRequest for a voice that the model cannot read.
        """
        if hold_prefix:
            with _as_bad_request():
                prefix = self._prompts.prefix(job.speech.voice)
            if len(prefix) >= self._longest:
                self._metrics.count_rejected("too_long")
                raise BadRequest(
                    f"the voice's references take {len(prefix)} positions, at most {self._longest} are kept; "
                    "send shorter ones"
                )
            stream_id, namespace = job.stream.request_id, _namespace(job.speech)
            self._scheduler.hold(Request(stream_id, prefix, FrameBudget(0, 0), job.sampling, namespace))
        self._open[job.stream.request_id] = job
        self.by_codes[job.codes] = job

    def say(self, job: Job, text: str, step_s: float | None) -> int:
        """Add a part to a stream; returns its index.  step_s: of a frame, as far as is known.

        Raises BadRequest or QueueFull, and nothing has changed then.
        """
        now_s = time.monotonic()
        part = Part(f"{job.stream.request_id}.{job.num_parts}", job.num_parts, text, now_s)
        if self._can_begin(job):
            self._begin(job, part, step_s)
        else:
            self._check_length(job.num_fixed, text, job.speech)  # refuses now what it would refuse later
            job.waiting.append(part)
        job.num_parts += 1
        job.first_text_s = now_s if job.first_text_s is None else job.first_text_s
        job.speaking_since_s = now_s if job.speaking_since_s is None else job.speaking_since_s
        return part.index

    def end(self, job: Job) -> None:
        """No further part follows."""
        job.has_ended = True
        self._finish_if_spoken(job)

    def note_read(self, job: Job, num_frames: int) -> None:
        """The caller took audio; a part that waited for that begins."""
        job.num_unread -= num_frames
        self._begin_next(job)

    def _can_begin(self, job: Job) -> bool:
        """True unless a part is being spoken or the caller has yet to read too much."""
        num_unread = job.num_unread + job.num_made - job.num_delivered
        return job.part is None and num_unread <= self._config.max_unread_frames

    def _begin(self, job: Job, part: Part, step_s: float | None = None) -> None:
        """Give a part to the scheduler.  Raises BadRequest or QueueFull, and nothing has changed then."""
        # Every part has noise of its own, which follows from the stream's seed.
        sampling = replace(job.sampling, seed=(job.sampling.seed + part.index * _SEED_STRIDE) % MAX_SEED)
        request = self.request(part.request_id, part.text, job.speech, sampling, job.previous)
        if part.index == 0:
            job.num_fixed = len(request.prompt) - len(self._tokenizer.encode(part.text))
        try:
            self._scheduler.add(request, job.pace, goes_on=part.index > 0)
        except QueueFull as full:
            self._metrics.count_rejected("queue_full")
            raise QueueFull(str(full), retry_after_s=self._retry_after_s(request, step_s)) from full
        except BadRequest:
            self._metrics.count_rejected("too_long")
            raise
        job.part = part
        self._speaking[part.request_id] = job

    def _begin_next(self, job: Job) -> None:
        """Begin the next part that waits in its stream, if it can."""
        if not job.waiting or not self._can_begin(job):
            return
        try:
            self._begin(job, job.waiting.popleft())
        except EngineError as error:  # its text was checked when it came, so this would be our own fault
            self.forget(job)
            job.stream.put(error)

    def request(
        self,
        request_id: str,
        text: str,
        speech: Speech,
        sampling: SamplingParams,
        previous: tuple[str, Codes] | None = None,
    ) -> Request:
        """The sequence that speaks `text`.  `previous` is left out if it does not fit.  Raises BadRequest."""
        with _as_bad_request():
            prompt = self._prompts.prompt(text, speech.voice)
            budget = self._check_length(len(prompt) - len(self._tokenizer.encode(text)), text, speech)
            if previous:
                longer = self._prompts.prompt(text, speech.voice, [previous])
                prompt = longer if len(longer) + budget.max_frames <= self._longest else prompt
        return Request(request_id, prompt, budget, sampling, _namespace(speech))

    def _check_length(self, num_fixed: int, text: str, speech: Speech) -> FrameBudget:
        """The frame budget of `text`.  Raises BadRequest if it does not fit beside `num_fixed` prompt positions."""
        num_tokens = len(self._tokenizer.encode(text))
        budget = frame_budget(text, num_tokens, speech.max_new_tokens, self._model)
        if budget.max_frames < 1:
            raise BadRequest(f"max_new_tokens must be at least 1, got {speech.max_new_tokens}")
        # A text seldom needs its whole budget, which guards against a runaway; twice what is expected must fit.
        num_frames = min(budget.max_frames, _LEAST_ROOM * budget.expected_frames)
        room = self._longest - num_fixed - num_tokens
        if num_frames > room:
            self._metrics.count_rejected("too_long")
            raise BadRequest(
                f"voice, text and its audio need {num_fixed + num_tokens + num_frames} positions, at most "
                f"{self._longest} are kept; send shorter parts or references"
            )
        return replace(budget, max_frames=min(budget.max_frames, room))

    def _retry_after_s(self, request: Request, step_s: float | None) -> int:
        """Whole seconds until the queue has moved on by its own length, at the measured service rate."""
        service_s = self._service_s
        if service_s is None:  # nothing has finished yet: what this request would take
            service_s = request.budget.expected_frames * (step_s or 0.0)
            if self._config.pace_frames_per_s:
                service_s = max(service_s, request.budget.expected_frames / self._config.pace_frames_per_s)
        ahead = self._scheduler.num_waiting + 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(ahead * service_s / self._config.max_running_requests)))

    # From frames to audio.

    def note_admitted(self, plan: StepPlan, now_s: float) -> None:
        """Note the parts of which the first prompt piece is computed in this step."""
        for chunk in plan.prefill:
            job = self._speaking.get(chunk.sequence.request.request_id)
            if job is None or job.part is None or job.part.is_admitted:
                continue
            job.part.is_admitted = True
            self._metrics.prefix_hit_tokens.inc(chunk.start)
            if job.admitted_s is None:
                job.admitted_s = now_s
                self._metrics.observe_queue(job.speech.tier, now_s - job.part.said_s)

    def take(self, frames: list[Frame], ended: dict[str, EndReason]) -> int:
        """Take a step's frames, and the parts that ended with them; returns how many frames have a stream yet."""
        num_frames = 0
        for frame in frames:
            job = self._speaking.get(frame.request_id)
            if job is None or job.part is None:
                continue
            if not frame.is_end:
                self._add_frame(job, job.part, frame.codes)
                num_frames += 1
            if frame.request_id in ended:
                self._end_part(job, job.part, ended[frame.request_id])
        return num_frames

    def deliver(self, job: Job, chunk: Chunk, now_s: float) -> None:
        """Hand audio to a stream's caller, if it is still there."""
        if self._open.get(job.stream.request_id) is not job:
            return
        if job.first_audio_s is None and job.first_text_s is not None:
            job.first_audio_s = now_s
            self._metrics.observe_first_audio(job.speech.tier, now_s - job.opened_s, now_s - job.first_text_s)
        job.num_delivered += chunk.num_frames
        job.num_unread += chunk.num_frames
        job.stream.put(chunk)
        self._finish_if_spoken(job)

    def forget(self, job: Job) -> None:
        """Let go of a stream with all that it holds."""
        stream_id = job.stream.request_id
        del self._open[stream_id]
        del self.by_codes[job.codes]
        if job.part is not None:
            self._speaking.pop(job.part.request_id, None)
            self._scheduler.abort(job.part.request_id)
        self._scheduler.release_hold(stream_id)
        if job.first_audio_s is not None:
            self._metrics.observe_gaps(job.codes.num_underruns, job.codes.longest_gap_s)

    def _add_frame(self, job: Job, part: Part, codes: tuple[int, ...]) -> None:
        if not part.codes:
            job.codes.begin_part(part.index, part.said_s)
        part.codes.append(codes)
        job.codes.put(codes)
        job.num_made += 1

    def _end_part(self, job: Job, part: Part, reason: EndReason) -> None:
        if part.codes:
            job.codes.end_part()
        del self._speaking[part.request_id]
        job.part = None
        self._metrics.count_part(reason)
        # A part that ended in a loop is nothing to go on from.
        can_go_on = job.speech.condition_on_previous_parts and part.codes and reason is not EndReason.LOOP
        job.previous = (part.text, tuple(part.codes)) if can_go_on else None
        self._begin_next(job)
        self._finish_if_spoken(job)

    def _finish_if_spoken(self, job: Job) -> None:
        """End a stream that has all of its audio and can get no more text."""
        if not job.has_spoken or self._open.get(job.stream.request_id) is not job:
            return
        now_s = time.monotonic()
        if job.speaking_since_s is not None:
            job.speaking_s += now_s - job.speaking_since_s
            job.speaking_since_s = None
        if not job.has_ended:
            return
        self.forget(job)
        if job.admitted_s is not None:
            self._service_s = smoothed(self._service_s, now_s - job.admitted_s)
            self._metrics.observe_stream(
                job.speech.tier,
                total_s=now_s - job.opened_s,
                speaking_s=job.speaking_s,
                audio_s=job.num_delivered / self._model.codec.frame_rate_hz,
            )
        job.stream.put(None)


def _namespace(speech: Speech) -> str:
    """Whose cached prompts a stream may share: those of its tenant and its voice's revision."""
    return repr((speech.tenant, speech.voice.revision if speech.voice else ""))


@contextlib.contextmanager
def _as_bad_request() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise BadRequest(f"the model cannot read this voice: {error}") from error
