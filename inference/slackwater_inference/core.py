"""The types that the engine's parts speak, and the room's errors.

Owns the frozen values `Request -> Sequence's frames -> Chunk` and the error tree.  Owns no
behaviour.  Imported by every other module of this room; imports nothing of ours.
"""

from dataclasses import dataclass
from enum import StrEnum


class EngineError(Exception):
    """Root of the inference room's errors."""


class TemporaryError(EngineError):
    """The same request can succeed after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(TemporaryError):
    """Every slot is taken and the waiting queue is at its bound."""


class Draining(TemporaryError):
    """The engine is leaving: it finishes what it has and takes nothing new."""


class PermanentError(EngineError):
    """Trying the same again cannot help.  The message says what to change."""


class BadRequest(PermanentError):
    """The caller's request can never be served as it is."""


class PortUnavailable(PermanentError):
    """The address to listen on cannot be had."""


class EngineFailed(PermanentError):
    """The step loop died of its own fault; every stream that was open breaks with this."""


class Stage(StrEnum):
    """Where the engine is in its life; `/readyz` names it."""

    STARTING = "starting"
    STANDBY = "standby"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class EndReason(StrEnum):
    """Why a sequence has no further frame."""

    STOP = "stop"  # the model said im_end
    LENGTH = "length"  # the frame budget is used up
    LOOP = "loop"  # the model repeats itself


# One column of the model's input: the token id, then one code for each codebook (0 at text).
Column = tuple[int, ...]

# Speech as the model reads and writes it: one tuple a frame, in it one code for each codebook, semantic first.
Codes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.  temperature 0 is greedy.  seed: 0 <= seed < 2**62."""

    temperature: float = 0.7
    top_p: float = 0.7
    top_k: int = 30
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """A recording to imitate: its codes, what is said in it, and the index of its speaker (`<|speaker:i|>`)."""

    text: str
    codes: Codes
    speaker: int = 0


@dataclass(frozen=True, slots=True)
class Voice:
    """References that a stream is conditioned on.

    revision: hash of everything the references hold.  It is the namespace of the prefix cache, so two voices
    can never share a cached page and a changed voice never finds its old ones.
    """

    revision: str
    references: tuple[Reference, ...]


@dataclass(frozen=True, slots=True)
class Speech:
    """How one stream is to be spoken; its text comes in parts through `SpeechStream.say`.

    max_new_tokens: at most so many frames for each part of the text.  min_chunk_frames: frames before the first
    audio; None = the engine's own.  tenant: whose request it is, part of the prefix cache's namespace.
    tier: the caller's, a label of metrics (`metrics.TIERS`).
    """

    voice: Voice | None = None
    sampling: SamplingParams | None = None  # None: defaults, with a seed of its own
    max_new_tokens: int | None = None
    condition_on_previous_parts: bool = True
    min_chunk_frames: int | None = None
    tenant: str = ""
    tier: str = "default"


@dataclass(frozen=True, slots=True)
class FrameBudget:
    """How long a text may get, in frames."""

    expected_frames: int
    max_frames: int  # the sequence ends here at the latest; 0 = only the prompt is wanted, for others to share


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.  `request_id` is made by us, unique for the engine's life."""

    request_id: str
    prompt: tuple[Column, ...]
    budget: FrameBudget
    sampling: SamplingParams
    namespace: str = ""  # of the prefix cache: tenant and voice revision


@dataclass(frozen=True, slots=True)
class Frame:
    """What one step made for one sequence.  codes: one a codebook, semantic first; empty at im_end."""

    request_id: str
    token_id: int
    codes: tuple[int, ...]

    @property
    def is_end(self) -> bool:
        """True for im_end, which carries no audio."""
        return not self.codes


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made, and the seconds that its two parts took."""

    frames: list[Frame]
    prefill_s: float
    decode_s: float  # the slow part's decode pass, sampling and the fast part


@dataclass(frozen=True, slots=True)
class Chunk:
    """Audio of consecutive frames of one part of a stream's text.

    samples: fp32 little-endian mono in [-1, 1].   part: index of the text part (0 is the first).
    """

    samples: bytes
    num_frames: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine at one moment.  step_s: mean seconds of a decode step; None before the first."""

    stage: Stage
    running: int
    waiting: int
    slots: int
    frames_total: int
    step_s: float | None
    kv_used_ratio: float
