"""One engine and a gateway before it, as processes, for all of these tests; and ears for what comes back."""

import io
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from slackwater_inference.store.database import Database
from slackwater_inference.store.keys import KeyStore, Tier
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.records import NewSample, NewVoice, Visibility
from slackwater_inference.store.voices import VoiceStore
from slackwater_inference.testing.process import ENGINE, GATEWAY, ServerProcess, server_process

HERE = Path(__file__).parent
SLOTS = 16
# The client library's own tests speak with a voice of this id; at the hosted service somebody's.
THEIR_VOICE = "ca3007f96ae7499ab87d27ea3599956a"
FRAME_S = 2048 / 44_100


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@dataclass(frozen=True)
class Service:
    """The running servers and the keys that they know.

    owner: may do everything, and has THEIR_VOICE.  other: another user.  poor: has no credit.  single: one request at
    once.  hourly: one request in a minute.  fuzzer: has a voice that may be lost.  revoked: is no key any more.
    """

    engine: ServerProcess
    gateway: ServerProcess
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def owner(self) -> str:
        return self.keys["owner"]

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.owner}"}


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, recording: bytes) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    database_url, objects = f"sqlite:///{folder}/api.db", folder / "objects"
    objects.mkdir()
    keys = prepare(database_url, str(objects), recording)
    engine_options = ["--slots", str(SLOTS), "--max-queued", "64", "--database", database_url, "--store", str(objects)]
    with server_process([*ENGINE, *engine_options], folder / "engine.log") as engine:
        gateway_options = ["--replica", f"{engine.url}={SLOTS}"]
        with server_process([*GATEWAY, *gateway_options], folder / "gateway.log") as gateway:
            yield Service(engine, gateway, keys)


def prepare(database_url: str, objects: str, recording: bytes) -> dict[str, str]:
    """Keys and a voice, put there by the store as an operator would."""
    database = Database(database_url)
    try:
        store = KeyStore(database)
        made: dict[str, str] = {}
        owner, made["owner"] = store.add("owner", tier=Tier.HIGH_VOLUME)
        for name, options in {
            "other": {},
            "poor": {"credit": Decimal(0)},
            "single": {"max_concurrent": 1},
            "hourly": {"requests_per_minute": 1},
            "fuzzer": {"tier": Tier.HIGH_VOLUME},
            "revoked": {},
        }.items():
            key, made[name] = store.add(name, **options)
            if name == "revoked":
                store.revoke(key.key_id)
        voices = VoiceStore(database, ObjectStore(objects))
        sample = NewSample(recording, REFERENCE_TEXT, "audio/wav", 3.0)
        for at in range(7):  # so that a list has a second page
            voices.create(
                NewVoice(
                    voice_id=THEIR_VOICE if at == 0 else None,
                    owner_id=owner.user_id,
                    owner_name="owner",
                    title=f"voice {at}",
                    samples=[sample],
                    visibility=Visibility.PUBLIC,
                )
            )
        fuzzer = store.find(made["fuzzer"])
        assert fuzzer is not None
        private = Visibility.PRIVATE
        voices.create(
            NewVoice(owner_id=fuzzer.user_id, owner_name="f", title="f", samples=[sample], visibility=private)
        )
    finally:
        database.close()
    return made


@pytest.fixture(scope="session", params=["engine", "gateway"])
def url(request: pytest.FixtureRequest, service: Service) -> str:
    """The engine's own address, then the gateway's: clients must see no difference."""
    server: ServerProcess = getattr(service, request.param)
    return server.url


# What goes in

REFERENCE_TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="session")
def tone() -> Callable[..., bytes]:
    """Makes a recording that passes for a voice: harmonics of 140 Hz that swell four times a second, as WAV.

    `level` is the peak of full scale; above 1 it is clipped.
    """

    def make(duration_s: float = 3.0, level: float = 0.5, rate_hz: int = 44_100) -> bytes:
        at_s = np.arange(round(duration_s * rate_hz)) / rate_hz
        voice = sum(np.sin(2 * np.pi * 140 * k * at_s) / k for k in range(1, 12)) * (
            0.6 + 0.4 * np.sin(8 * np.pi * at_s)
        )
        samples = np.clip(voice / np.abs(voice).max() * level, -1, 1)
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(rate_hz)
            out.writeframes((samples * 32_767).astype("<i2").tobytes())
        return file.getvalue()

    return make


@pytest.fixture(scope="session")
def recording(tone: Callable[..., bytes]) -> bytes:
    """One that is fit to be a voice."""
    return tone()


@pytest.fixture(scope="session")
def reference_text() -> str:
    """What a person would have said in `recording`."""
    return REFERENCE_TEXT


# What comes out


@dataclass(frozen=True)
class Sound:
    """Decoded audio.  level_dbfs: RMS over the whole."""

    samples: np.ndarray[Any, np.dtype[np.float32]]
    rate_hz: int
    codec: str

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate_hz

    @property
    def level_dbfs(self) -> float:
        return 10 * float(np.log10(np.mean(np.square(self.samples)) + 1e-12))


@pytest.fixture(scope="session")
def hear() -> Callable[..., Sound]:
    """Decodes what a server sent; raw PCM needs its rate said."""

    def decode(data: bytes, pcm_rate_hz: int | None = None) -> Sound:
        if pcm_rate_hz is not None:
            return Sound(np.frombuffer(data, "<i2").astype(np.float32) / 32_768, pcm_rate_hz, "pcm")
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.audio[0]
            frames = [frame.to_ndarray().astype(np.float32) for frame in container.decode(stream)]
            scale = 1 / 32_768 if stream.format.name.startswith("s16") else 1.0
            samples = np.concatenate([frame.reshape(-1) for frame in frames]) * scale
            return Sound(samples.astype(np.float32), stream.rate, stream.codec_context.codec.canonical_name)

    return decode


@pytest.fixture(scope="session")
def spoken_s() -> Callable[[str], float]:
    """How long the built-in voice speaks a text that is one part: 0.93 frames a byte."""

    def expected(text: str) -> float:
        return len(text.encode()) * 0.93 * FRAME_S

    return expected
