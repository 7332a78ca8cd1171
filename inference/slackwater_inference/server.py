"""One engine process, from its start to its exit.

Owns the port, the events `ready` and `load`, what the API stands on, and the order in which things start and
end.  Does not own signals (lifecycle), requests (api) or generation (engine).  Called by the cli.
"""

import asyncio
import contextlib
import hashlib
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI

from slackwater_inference import checkpoint
from slackwater_inference.api.app import create_app
from slackwater_inference.api.services import Services
from slackwater_inference.asr import FasterWhisper, Transcriber
from slackwater_inference.cloning import Cloner, VoiceLibrary
from slackwater_inference.config import EngineConfig
from slackwater_inference.config.api import ApiSettings
from slackwater_inference.core import Stage
from slackwater_inference.engine import Engine
from slackwater_inference.events import ParentLink
from slackwater_inference.lifecycle import Lifecycle, listen
from slackwater_inference.store.database import MEMORY_URL as MEMORY_DATABASE_URL
from slackwater_inference.store.database import Database
from slackwater_inference.store.keys import KeyStore, Tier
from slackwater_inference.store.objects import MEMORY_URL as MEMORY_STORE_URL
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.voices import VoiceStore
from slackwater_inference.text.normalize import normalize

logger = logging.getLogger(__name__)

EMBEDDED = "tiny"
_POLL_S = 0.05
_LOAD_EVERY_S = 1.0
_MAX_MESSAGE_BYTES = 32 * 1024 * 1024  # of a websocket, as the hosted service has it


@dataclass(frozen=True, slots=True)
class Options:
    """What `slackwater engine serve` was asked for.

    model: `tiny` or a checkpoint's folder.   store, database: URLs; None = in memory, gone with the process.
    asr: folder of a Whisper model.   keys: those that may speak; none = the database's, and everybody if it has none,
    unless `require_key`.
    """

    host: str
    port: int
    model: str
    slots: int
    max_queued: int
    pace_frames_per_s: float
    length: int | None
    seed: int
    store: str | None
    database: str | None
    asr: Path | None
    keys: tuple[str, ...]
    require_key: bool
    threads: int


def run(options: Options, lifecycle: Lifecycle, listener: socket.socket | None) -> int:
    """Serve until told to leave; returns the exit code.

    listener: None if we are to stand by first, and only then take the port.
    Raises PortUnavailable, BadCheckpoint, StoreFault, StoreUnavailable or AsrUnavailable, each for its option.
    """
    torch.set_num_threads(options.threads)
    engine = build_engine(options)
    services = build_services(options, engine)
    engine.warm_up()
    normalize("1")  # reads its rules at the first number
    app = create_app(services)
    if listener is None:
        engine.stand_by()
        logger.info("standing by; SIGUSR1 wakes")
        lifecycle.stand_by()
        listener = listen(options.host, options.port)
    with listener:
        return asyncio.run(_serve(services, app, listener, options, lifecycle))


def build_engine(options: Options) -> Engine:
    """The engine, in host memory, not started.  Raises BadCheckpoint."""
    began_s = time.perf_counter()
    loaded = checkpoint.embedded(options.seed) if options.model == EMBEDDED else checkpoint.load(Path(options.model))
    config = EngineConfig(
        max_running_requests=options.slots,
        max_queued=options.max_queued,
        pace_frames_per_s=options.pace_frames_per_s,
        max_length=options.length,
    )
    engine = Engine(config, loaded)
    engine.metrics.observe_load(loaded.source, time.perf_counter() - began_s)
    return engine


def build_services(options: Options, engine: Engine) -> Services:
    """What the API stands on.  Raises StoreFault, StoreUnavailable, AsrUnavailable."""
    settings = ApiSettings()
    database = Database(options.database or MEMORY_DATABASE_URL)
    voices = VoiceStore(database, ObjectStore(options.store or MEMORY_STORE_URL))
    voices.sweep()
    cloner = Cloner(engine.codec, engine.model.codec.sample_rate_hz, engine.metrics.count_voice)
    asr: Transcriber | None = FasterWhisper(options.asr, settings.max_asr_seconds) if options.asr else None
    if options.store is None:
        logger.info("voices are kept in memory and end with this process; --store and --database keep them")
    return Services(
        engine=engine,
        voices=voices,
        library=VoiceLibrary(voices, cloner),
        cloner=cloner,
        keys=_keys(options, database, settings),
        asr=asr,
        settings=settings,
    )


def _keys(options: Options, database: Database, settings: ApiSettings) -> KeyStore | None:
    """The keys that may speak; None = everybody may."""
    if options.keys:
        keys = KeyStore(Database(MEMORY_DATABASE_URL))
        for key in dict.fromkeys(options.keys):
            # The same key is the same user after a restart, so that it finds its voices again.
            user_id = hashlib.sha256(b"user of " + key.encode()).hexdigest()[:32]
            keys.add(
                "given at start",
                tier=Tier.HIGH_VOLUME,
                user_id=user_id,
                max_concurrent=settings.max_open_requests,
                key=key,
            )
        return keys
    keys = KeyStore(database)
    # A revoked key counts: revoking the last one must not open the door.
    return keys if options.require_key or keys.list() else None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    services: Services, app: FastAPI, listener: socket.socket, options: Options, lifecycle: Lifecycle
) -> int:
    engine = services.engine
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        # Answers pings in its protocol, on the event loop, and holds one message at a time for the application.
        ws="wsproto",
        ws_max_size=_MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # encoded audio gets no smaller, and 400 kB can unpack to 400 MB
        server_header=False,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    engine.start()
    lifecycle.begin_serving()
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lifecycle.link.say("ready", url=url, slots=options.slots)
    logger.info("serving url=%s slots=%d max_queued=%d", url, options.slots, options.max_queued)
    if services.keys is None:
        logger.warning("no API key is set: everyone who can reach %s may speak", url)
    loading = asyncio.create_task(_say_load(engine, lifecycle.link))
    code = await _until_told_to_leave(engine, lifecycle, serving)
    loading.cancel()
    server.should_exit = True
    await serving
    await services.library.settle()
    services.cloner.close()
    engine.stop()
    return code


async def _until_told_to_leave(engine: Engine, lifecycle: Lifecycle, serving: asyncio.Task[None]) -> int:
    """Returns the exit code, once no stream is open; 1 if the engine failed."""
    while not serving.done():
        if lifecycle.is_leaving:
            engine.drain()
            if engine.is_idle:
                return 0
        if engine.status().stage is Stage.FAILED:
            return 1
        await asyncio.sleep(_POLL_S)
    return 1


async def _say_load(engine: Engine, link: ParentLink) -> None:
    said: dict[str, object] = {}
    while True:
        status = engine.status()
        load: dict[str, object] = {
            "running": status.running,
            "waiting": status.waiting,
            "slots": status.slots,
            "frames_total": status.frames_total,
            "step_s": status.step_s,
        }
        if load != said:
            link.say("load", **load)
            said = load
        await asyncio.sleep(_LOAD_EVERY_S)
