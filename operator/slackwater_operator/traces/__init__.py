"""Real traffic to play against the policy and the engine: when requests came and how long each was.

Owns the trace file beside this module (its README.md says whose it is) and cutting slices from it.
Called by the simulator, the demo and tests.  One generated token stands for one frame of speech
(46.44 ms of audio); the trace was recorded from a text service, there is none of a speech service.
"""

import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

FRAME_S = 2048 / 44100  # audio of one frame: 46.44 ms
CONVERSATION = "azure_llm_2023_conv.csv.gz"
COLUMNS = ["t_s", "context_tokens", "generated_tokens"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it came, seconds from the start, and its length."""

    t_s: float
    context_tokens: int
    generated_tokens: int

    @property
    def audio_s(self) -> float:
        """The speech that it asks for."""
        return self.generated_tokens * FRAME_S


@cache
def load_conversation() -> tuple[TraceRequest, ...]:
    """All 19,366 requests of the Azure conversation trace, in time order; 58 minutes."""
    source = files(__name__).joinpath(CONVERSATION)
    with source.open("rb") as packed, gzip.open(packed, "rt", encoding="ascii", newline="") as text:
        rows = csv.reader(text)
        header = next(rows)
        if header != COLUMNS:
            raise ValueError(f"{CONVERSATION} must have the columns {COLUMNS}, got {header}")
        return tuple(TraceRequest(float(t_s), int(context), int(generated)) for t_s, context, generated in rows)


def slice_trace(
    requests: Sequence[TraceRequest], start_s: float, length_s: float, speed: float = 1.0, keep_every: int = 1
) -> tuple[TraceRequest, ...]:
    """The requests of [start_s, start_s + length_s), their times from 0 and divided by `speed`.

    keep_every: only each so-many-th request of the slice is kept, the first one included.  Lengths are
    left as they are.  Raises ValueError on a speed or keep_every that is not positive.
    """
    if speed <= 0:
        raise ValueError(f"speed must be positive, got {speed}")
    if keep_every < 1:
        raise ValueError(f"keep_every must be at least 1, got {keep_every}")
    inside = [request for request in requests if start_s <= request.t_s < start_s + length_s]
    return tuple(
        TraceRequest((request.t_s - start_s) / speed, request.context_tokens, request.generated_tokens)
        for request in inside[::keep_every]
    )


def overlay(requests: Sequence[TraceRequest], copies: int, apart_s: float) -> tuple[TraceRequest, ...]:
    """`copies` of the requests laid over each other, each `apart_s` later than the one before, in time order.

    Stands for many callers: ramps stay, their second-by-second noise averages out.
    """
    return tuple(
        sorted(
            (
                TraceRequest(request.t_s + number * apart_s, request.context_tokens, request.generated_tokens)
                for number in range(copies)
                for request in requests
            ),
            key=lambda request: request.t_s,
        )
    )
