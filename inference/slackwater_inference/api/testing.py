"""An API on an engine with a micro voice, a client of it, and what its errors must be, for tests.

Owns nothing that serves users.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from torch import Tensor

from slackwater_inference.api.app import create_app
from slackwater_inference.api.services import Services
from slackwater_inference.asr import Transcriber, Transcript
from slackwater_inference.cloning import Cloner, VoiceLibrary
from slackwater_inference.codec.codec import Codec
from slackwater_inference.config.api import ApiSettings
from slackwater_inference.core import BadRequest
from slackwater_inference.store.database import MEMORY_URL as MEMORY_DATABASE_URL
from slackwater_inference.store.database import Database
from slackwater_inference.store.keys import KeyStore
from slackwater_inference.store.objects import MEMORY_URL as MEMORY_STORE_URL
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.voices import VoiceStore
from slackwater_inference.testing.engine import MODEL, TEXT, new_engine

FRAME_BYTES = 2 * MODEL.codec.frame_samples  # of pcm


class _BriefEncoder:
    """Encodes the first frames only: a micro frame is so short that a real recording's would not fit the model."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.revision = codec.revision

    def encode(self, samples: npt.NDArray[np.float32]) -> Tensor:
        """See cloning.Encoder."""
        return self._codec.encode(samples[: 20 * self._codec.config.frame_samples])


def micro_services(
    *, needs_keys: bool = False, asr: Transcriber | None = None, settings: ApiSettings | None = None, **engine: Any
) -> Services:
    """Services in memory, on an engine that is not started.  engine: fields of EngineConfig."""
    built = new_engine(**engine)
    database = Database(MEMORY_DATABASE_URL)
    voices = VoiceStore(database, ObjectStore(MEMORY_STORE_URL))
    cloner = Cloner(_BriefEncoder(built.codec), MODEL.codec.sample_rate_hz, built.metrics.count_voice)
    return Services(
        engine=built,
        voices=voices,
        library=VoiceLibrary(voices, cloner),
        cloner=cloner,
        keys=KeyStore(database) if needs_keys else None,
        asr=asr,
        settings=settings or ApiSettings(),
    )


@contextlib.asynccontextmanager
async def running(services: Services) -> AsyncIterator[Services]:
    """Start the engine of `services`, and end it."""
    services.engine.start()
    try:
        yield services
    finally:
        services.engine.stop()
        services.cloner.close()


@contextlib.asynccontextmanager
async def client_of(served: Services | FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client, in this process, of an application or of one that is made on these services."""
    app = create_app(served) if isinstance(served, Services) else served
    # An error after the first byte must reach the server, so it must not be turned into an answer here.
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    """A request to speak TEXT as pcm, but for these fields of it."""
    return {"text": TEXT, "format": "pcm", **fields}


def assert_error(answer: httpx.Response, status: int, *words: str) -> None:
    """Raise AssertionError unless this is an error as ours are, with these words in its message."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"status", "message"}
    assert answer.json()["status"] == status
    message = answer.json()["message"]
    assert "\n" not in message
    for word in words:
        assert word in message


class FakeTranscriber:
    """Answers with `transcript` and notes what it was asked; refuses the recording b"bad"."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.asked: list[tuple[bytes, str | None]] = []

    async def transcribe(self, audio: bytes, language: str | None) -> Transcript:
        """See Transcriber."""
        if audio == b"bad":
            raise BadRequest("the recording cannot be read")
        self.asked.append((audio, language))
        return self.transcript
