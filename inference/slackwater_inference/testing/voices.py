"""Voices over HTTP, for tests: a recording, stores that are empty, the routes of voices alone, and their users.

Owns nothing that serves users.
"""

import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import soundfile
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient, Response

from slackwater_inference.api.errors import add_error_handlers
from slackwater_inference.api.limits import Limits
from slackwater_inference.api.services import Services
from slackwater_inference.api.voices import voice_routes
from slackwater_inference.asr import Transcriber
from slackwater_inference.cloning import VoiceLibrary
from slackwater_inference.store.database import MEMORY_URL as MEMORY_DATABASE_URL
from slackwater_inference.store.database import Database
from slackwater_inference.store.keys import KeyStore
from slackwater_inference.store.objects import MEMORY_URL as MEMORY_STORE_URL
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.voices import VoiceStore

_RATE_HZ = 16_000


def recording(seconds: float = 3.0, level: float = 0.15) -> bytes:
    """A wav file of almost a voice: a buzz that comes and goes.  level: of its loudest tone, 1 is full scale."""
    at_s = np.arange(int(seconds * _RATE_HZ)) / _RATE_HZ
    harmonics = np.arange(1, 12)[:, None]
    buzz = (np.sin(2 * np.pi * 120 * harmonics * at_s) / harmonics).sum(0)
    samples = (level * buzz * (0.55 + 0.45 * np.sin(2 * np.pi * 3 * at_s))).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, _RATE_HZ, format="WAV")
    return file.getvalue()


RECORDING = recording()
SAID = "This is my own voice, and it says a few words."
PNG = b"\x89PNG\r\n\x1a\n and so on"


def on_empty_stores(services: Services, *, needs_keys: bool, asr: Transcriber | None = None) -> Services:
    """The engine and cloner of `services` with a database and an object store that nobody else has."""
    database = Database(MEMORY_DATABASE_URL)
    voices = VoiceStore(database, ObjectStore(MEMORY_STORE_URL))
    keys = KeyStore(database) if needs_keys else None
    return replace(services, voices=voices, library=VoiceLibrary(voices, services.cloner), keys=keys, asr=asr)


@asynccontextmanager
async def voices_alone(services: Services) -> AsyncIterator[AsyncClient]:
    """A client of these routes and no others: the whole application takes longer to make than a test."""
    app = FastAPI()
    app.state.services = services
    app.state.limits = Limits(8, services.engine.metrics)
    add_error_handlers(app)
    app.include_router(voice_routes(services))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
        yield client


def as_user(services: Services, name: str, **more: Any) -> dict[str, str]:
    """The headers of a new user, whose id is `user-NAME`.  more: arguments of KeyStore.add."""
    assert services.keys is not None
    _, key = services.keys.add(name, user_id=f"user-{name}", **more)
    return {"Authorization": f"Bearer {key}"}


async def created(
    client: AsyncClient,
    headers: dict[str, str] | None = None,
    *,
    recordings: Sequence[bytes] = (RECORDING,),
    texts: Sequence[str] = (SAID,),
    cover: bytes | None = None,
    **fields: Any,
) -> Response:
    """The answer to what the official client sends for a private voice.  fields: others of its form."""
    files = [("voices", data) for data in recordings] + ([("cover_image", cover)] if cover else [])
    data = {"title": "Mine", "visibility": "private", "type": "tts", "train_mode": "fast"} | fields
    return await client.post("/model", data=data | {"texts": list(texts)}, files=files, headers=headers)
