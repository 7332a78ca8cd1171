"""An engine with a micro voice, and one caller's ways with it, for tests: say, listen, compare what was heard.

Owns nothing that serves users.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slackwater_inference.batch import StepPlan
from slackwater_inference.checkpoint import Loaded
from slackwater_inference.codec.weights import Weights, seeded_codec_weights
from slackwater_inference.config import CodecConfig, EngineConfig, ModelConfig
from slackwater_inference.core import Chunk, Codes, Reference, SamplingParams, Speech, StepResult, Voice
from slackwater_inference.engine import Engine
from slackwater_inference.model.weights import seeded_weights
from slackwater_inference.model_runner import ModelRunner
from slackwater_inference.stream import SpeechStream
from slackwater_inference.testing.model import micro
from slackwater_inference.text.tokenizer import ByteTokenizer

MODEL = micro()
TEXT = "a text of some forty characters, or so.."  # 40 bytes: 38 frames
VOICE = Voice("v1", (Reference("what it says", tuple((i % 40, i % 24, i % 7) for i in range(50))),))


def new_engine(model: ModelConfig = MODEL, **settings: Any) -> Engine:
    """An engine with seeded weights that is not started.  settings: fields of EngineConfig; 2 slots, 2 may wait."""
    codec_weights = _codec_weights(model.codec, model.num_codebooks, model.num_semantic)
    loaded = Loaded(model, seeded_weights(model, 0), codec_weights, ByteTokenizer(), "memory")
    return Engine(EngineConfig(**{"max_running_requests": 2, "max_queued": 2, **settings}), loaded)


@functools.cache  # nobody writes to them, and drawing them takes longer than many a test
def _codec_weights(config: CodecConfig, num_codebooks: int, num_semantic: int) -> Weights:
    return seeded_codec_weights(config, num_codebooks, num_semantic, 0)


@contextmanager
def engine(model: ModelConfig = MODEL, **settings: Any) -> Iterator[Engine]:
    """`new_engine` while it runs."""
    built = new_engine(model, **settings)
    built.start()
    try:
        yield built
    finally:
        built.stop()


def seeded(seed: int, **fields: Any) -> Speech:
    """How to speak so that it can be repeated.  fields: others of Speech."""
    return Speech(sampling=SamplingParams(seed=seed), **fields)


def say(built: Engine, *parts: str, speech: Speech | None = None, end: bool = True) -> SpeechStream:
    """A stream with these parts.  end: no further one follows."""
    stream = built.open(speech or Speech())
    for part in parts:
        stream.say(part)
    if end:
        stream.end()
    return stream


async def listen(stream: SpeechStream) -> list[Chunk]:
    """All of a stream's audio; it is closed then."""
    try:
        return [chunk async for chunk in stream]
    finally:
        stream.close()


async def read(stream: SpeechStream, num_frames: int) -> list[Chunk]:
    """Read until so many frames have come."""
    chunks: list[Chunk] = []
    while sum(chunk.num_frames for chunk in chunks) < num_frames:
        chunks.append(await anext(stream))
    return chunks


def samples(chunks: Iterable[Chunk]) -> Tensor:
    """The audio as fp32 [T]."""
    return torch.frombuffer(bytearray(b"".join(chunk.samples for chunk in chunks)), dtype=torch.float32)


def num_frames(chunks: Iterable[Chunk]) -> int:
    """How many frames of audio these are."""
    return sum(chunk.num_frames for chunk in chunks)


class _Recorder:
    """A model runner that notes the codes it makes, by the index of their part."""

    def __init__(self, runner: ModelRunner, codes: dict[int, Codes]) -> None:
        self._runner = runner
        self._codes = codes

    def step(self, plan: StepPlan) -> StepResult:
        """See ModelRunner."""
        result = self._runner.step(plan)
        for frame in result.frames:
            part = int(frame.request_id.rpartition(".")[2])
            if not frame.is_end:
                self._codes[part] = (*self._codes.get(part, ()), frame.codes)
        return result


@contextmanager
def recorded(built: Engine) -> Iterator[dict[int, Codes]]:
    """The codes that the engine makes meanwhile, by part; for one stream at a time."""
    codes: dict[int, Codes] = {}
    runner = built._runner
    built._runner = _Recorder(runner, codes)  # type: ignore[assignment]  # it steps as a runner does
    try:
        yield codes
    finally:
        built._runner = runner


async def codes_of(built: Engine, parts: Iterable[str], speech: Speech) -> dict[int, Codes]:
    """The codes of these parts, spoken in one stream."""
    with recorded(built) as codes:
        await listen(say(built, *parts, speech=speech))
    return codes


def assert_same_sound(one: Iterable[Chunk], other: Iterable[Chunk]) -> None:
    """Raise AssertionError where two streams sound different."""
    # Tokens are equal; a codec batch of another size may round differently.
    torch.testing.assert_close(samples(one), samples(other), atol=1e-5, rtol=0)


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Let the event loop run until `condition` holds.  Raises AssertionError when that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        await asyncio.sleep(0.005)


def is_empty(built: Engine) -> bool:
    """Does nobody hold, or wait for, anything of this engine?"""
    status = built.status()
    return (status.running, status.waiting, status.kv_used_ratio) == (0, 0, 0.0) and built.is_idle


def metric(built: Engine, name: str, **labels: str) -> float | None:
    """The engine's metric with exactly these labels; None if nothing was counted yet."""
    return built.metrics.registry.get_sample_value(name, labels)
